"""Counts the bytes that each operator must read and write."""
