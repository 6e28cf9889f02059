"""Measures when the GPU is busy, and how many kernels it runs, with Nsight Systems."""
