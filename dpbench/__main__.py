"""``python -m dpbench``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, or a pandas.py there would be imported for pandas

from dpbench.cli import main

sys.exit(main())
