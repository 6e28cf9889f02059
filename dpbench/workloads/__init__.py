"""Workloads: what is trained, with its model, batches and losses."""
