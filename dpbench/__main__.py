"""Runs the command line as ``python -m dpbench``."""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # a file pandas.py in the current directory would hide pandas
    if not hasattr(sys.modules["dpbench"], "__version__"):  # another folder dpbench
        del sys.modules["dpbench"]

from dpbench.commands.cli import main

code = main()
gc.freeze()  # so that the garbage collection at exit is fast
sys.exit(code)
