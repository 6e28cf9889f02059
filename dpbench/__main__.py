"""Runs the command line as ``python -m dpbench``."""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # a file pandas.py in the current directory would hide pandas
    if not hasattr(sys.modules["dpbench"], "__version__"):  # a folder without __init__.py
        del sys.modules["dpbench"]

from dpbench.commands.cli import main

code = main()
gc.freeze()  # the last garbage collection would take as long as a case
sys.exit(code)
