"""``python -m dpbench``."""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, or a pandas.py there would be imported for pandas
    if not hasattr(sys.modules["dpbench"], "__version__"):  # a folder there of that name
        del sys.modules["dpbench"]

from dpbench.commands.cli import main

code = main()
gc.freeze()  # or ending takes as long as a case: Python would look at each of torch's objects
sys.exit(code)
