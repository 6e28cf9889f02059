"""The PyTorch profiler: operators, copies, memory, traces."""
