"""Counts one case, and prints what was counted or why it could not be.

``python -m dpbench.instruments.logical CASE STEPS``, the case as JSON.
"""

from __future__ import annotations

import faulthandler
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
        print_record(counted=Logical(int(sys.argv[2])).count(case).as_json())
    except DpbenchError as error:
        message = str(error).removeprefix(f"{case.id}: ")  # the parent says whose it is
        print_record(error={"kind": type(error).__name__, "message": message})
