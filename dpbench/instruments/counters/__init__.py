"""Hardware counters: what those who read them share, be that Nsight Compute or CUPTI."""
