"""Nsight Systems: when the GPU works, when it waits, and for which launches."""
