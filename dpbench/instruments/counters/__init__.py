"""Errors, options and metrics of hardware counters. The instruments ncu and cupti share them."""
