"""Hardware counters: what Nsight Compute and CUPTI share."""
