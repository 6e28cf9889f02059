"""What is trained: models and batches."""
