"""Runs one case under ``nsys profile``, and prints what it did or why it failed.

``python -m dpbench.instruments.nsys CASE WARMUP ACTIVE``, the case as JSON.
"""

from __future__ import annotations

import json
import sys

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.instruments.nsys.child import trace_case
from dpbench.process.messages import print_record
from dpbench.registry import resolve

if __name__ == "__main__":
    case = resolve(Case(**json.loads(sys.argv[1])))
    try:
        record = trace_case(case, warmup=int(sys.argv[2]), active=int(sys.argv[3]))
    except Exception as error:  # whoever started this process learns why from the record
        kind = type(error).__name__
        first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
        message = str(error) if isinstance(error, DpbenchError) else f"{kind}: {first_line}"
        print_record(error={"kind": kind, "message": message})
        raise
    print_record(**record)
