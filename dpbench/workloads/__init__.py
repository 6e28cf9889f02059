"""Workloads: models with their batches and losses."""
