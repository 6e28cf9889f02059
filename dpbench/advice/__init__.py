"""What to use: which method trains a case in the least time and fits the memory."""
