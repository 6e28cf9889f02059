"""``python -m dpbench``."""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, or a pandas.py there would be imported for pandas

from dpbench.cli import main

code = main()
gc.freeze()  # or ending takes as long as a case: Python would look at each of torch's objects
sys.exit(code)
