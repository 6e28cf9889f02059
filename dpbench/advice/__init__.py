"""Recommends the method that trains a case in the least time within the memory of a GPU."""
