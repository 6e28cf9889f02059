"""Measures how long the GPU is busy, and how much work is launched, with Nsight Systems."""
