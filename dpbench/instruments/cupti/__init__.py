"""Reads hardware counters by phase, in the process that trains, with CUPTI's range profiler.

Counters are read at the start and end of each range while a step runs. Therefore no step is
replayed, and no second process is needed. All modules can be imported without a GPU and without
CUPTI.
"""

NAME = "cupti"  # value of the column ``instrument``
