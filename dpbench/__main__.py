"""Runs the command line as ``python -m dpbench``."""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # a file pandas.py in the current directory would hide pandas
    if not hasattr(sys.modules["dpbench"], "__version__"):  # a namespace package of that name
        del sys.modules["dpbench"]

from dpbench.commands.cli import main

code = main()
gc.freeze()  # skips the garbage collection at exit, which can take as long as counting a case
sys.exit(code)
