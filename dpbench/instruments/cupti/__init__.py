"""CUPTI's range profiler: hardware counters by phase, in the process that trains.

Nothing is executed again and no second process is needed: the counters are read at the borders of
ranges while the step runs. Every module here can be imported where there is no GPU and no CUPTI.
"""

NAME = "cupti"  # what its rows say as instrument
