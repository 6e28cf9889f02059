"""Hardware counters by phase in the process that trains, through CUPTI's range profiler.

The counters are read at the borders of ranges while a step runs: no second process, no replay.
Every module can be imported without a GPU and without CUPTI.
"""

NAME = "cupti"  # the instrument in its rows
