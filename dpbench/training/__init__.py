"""What is measured: models, data, trainers, and the phases of their steps."""
