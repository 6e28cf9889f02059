"""Workloads. A workload is a model with batches and losses to train the model."""
