"""Nsight Compute: hardware counters by phase and by kernel."""
