"""Counts one case, and prints what was counted or why it could not be.

``python -m dpbench.instruments.logical CASE``, the case as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.instruments.logical.instrument import Logical
from dpbench.process.messages import print_record
from dpbench.registry import resolve

if __name__ == "__main__":
    faulthandler.enable()
    case = resolve(Case(**json.loads(sys.argv[1])))
    try:
        result = Logical().count(case)
    except DpbenchError as error:
        message = str(error).removeprefix(f"{case.id}: ")  # the parent says whose it is
        print_record(error={"kind": type(error).__name__, "message": message})
    else:
        print_record(
            rows=[row.as_row() for row in result.rows],
            operators=[count.as_row() for count in result.operators],
            notes=result.notes,
        )
    gc.freeze()  # see dpbench.__main__
