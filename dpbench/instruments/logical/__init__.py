"""Logical counting: what each operator must read and write."""
