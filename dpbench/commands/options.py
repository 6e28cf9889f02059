"""What several commands take and do."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench import registry
from dpbench.case import AXES, COUNTS, OF_TRANSFORMER, TRANSFORMER, Case
from dpbench.files import check_is_file
from dpbench.grid import check_belongs
from dpbench.options import AXIS_HELP

if TYPE_CHECKING:
    from dpbench.results.run import Run


USUAL = {"batch_size": 8, "seq_len": 256}
"""What `Case` has no default for, but for the trainer."""


def add_case(parser: argparse.ArgumentParser, axes: Iterable[str] = AXES, **usual: Any) -> None:
    """Declare one case, or these axes of it, with other defaults for some."""
    for axis in axes:
        default = {**USUAL, **usual}.get(axis) or getattr(Case, axis, None)
        parser.add_argument(
            f"--{axis.replace('_', '-')}",
            type=int if axis in COUNTS else str,
            action="append" if axis == "set" else "store",
            # Unasked for, the transformer's are left out of other workloads' cases.
            default=None if axis in OF_TRANSFORMER or axis == "set" else default,
            required=default is None,
            help=AXIS_HELP[axis] + (f" (default {default})" if default else ""),
        )


def chosen_case(options: argparse.Namespace, **usual: Any) -> Case:
    """The case that the options of `add_case` describe, with its defaults."""
    given = {axis: value for axis in AXES if (value := getattr(options, axis, None)) is not None}
    workload = registry.WORKLOADS.canonical(given["workload"])
    check_belongs(given, [workload])
    for axis, value in {**USUAL, **usual}.items():
        if axis not in OF_TRANSFORMER or workload == TRANSFORMER:
            given.setdefault(axis, value)
    return registry.resolve(Case(**{**given, "workload": workload}))


def saved_run(name: str, storage: Path) -> Run:
    """The run that a number names, as ``dpbench list`` shows it, or a path."""
    from dpbench.results.run import Run
    from dpbench.results.storage import Storage

    if not name.isdecimal():
        check_is_file(Path(name))
    return Run.load(Storage(storage).find(name))
