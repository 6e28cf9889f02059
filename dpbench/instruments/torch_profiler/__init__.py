"""Measures operators, copies and memory with the PyTorch profiler, and writes traces."""
