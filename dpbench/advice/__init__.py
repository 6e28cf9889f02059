"""Recommends the private method with the least predicted time that fits the memory of a GPU."""
