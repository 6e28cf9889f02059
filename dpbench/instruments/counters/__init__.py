"""Errors, options and metrics of hardware counters, which the instruments ncu and cupti share."""
