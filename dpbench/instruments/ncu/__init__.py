"""Reads hardware counters by phase and by kernel with Nsight Compute."""
