"""Processes that train: one case, profiled or not."""
