"""Count one case, and print what was counted or why it could not be: the child of `apart`.

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


def main(spelled: str, most_steps: str) -> None:
    """Count one case, and print a record."""
    faulthandler.enable()
    case = resolve(Case(**json.loads(spelled)))
    try:
        counted = Logical(int(most_steps)).count(case)
    except DpbenchError as error:
        message = str(error).removeprefix(f"{case.id}: ")  # the parent says whose it is
        print_record(error={"kind": type(error).__name__, "message": message})
    else:
        print_record(counted=counted.as_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
