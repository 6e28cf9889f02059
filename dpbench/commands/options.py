"""What several commands take and do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench import registry
from dpbench.case import AXES, Case, Grid
from dpbench.files import check_is_file
from dpbench.settings import AXIS_HELP, declare

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome
    from dpbench.results.run import Run


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Declare which cases: a grid, and what replaces its axes."""
    declare(parser.add_argument, "grid")
    declare(parser.add_argument_group("cases").add_argument, *AXES)


def chosen_grid(options: argparse.Namespace) -> Grid:
    """The grid that the options of `add_cases` describe; the modules of its classes are there."""
    grid = registry.chosen_grid(options.grid, **{axis: getattr(options, axis) for axis in AXES})
    registry.locate(grid.cases())
    return grid


def add_case(parser: argparse.ArgumentParser) -> None:
    """Declare one case; what `Case` has no default for has one here, but for the trainer."""
    defaults = {"batch_size": 8, "seq_len": 256}
    for axis in AXES:
        default = defaults.get(axis, getattr(Case, axis, None))
        parser.add_argument(
            f"--{axis.replace('_', '-')}",
            type=int if axis in defaults else str,
            default=default,
            required=default is None,
            help=AXIS_HELP[axis] + (" (default %(default)s)" if default is not None else ""),
        )


def chosen_case(options: argparse.Namespace) -> Case:
    """The case that the options of `add_case` describe."""
    return registry.resolve(Case.from_row(vars(options)))


def saved_run(name: str, storage: Path) -> Run:
    """The run that a number names, as ``dpbench list`` shows it, or a path."""
    from dpbench.results.run import Run
    from dpbench.results.storage import Storage

    if not name.isdecimal():
        check_is_file(Path(name))
    return Run.load(Storage(storage).find(name))


def count_cases(cases: Collection[Case]) -> list[Outcome]:
    """The logical counts of each case; what cannot be counted is said on standard error."""
    from tqdm import tqdm

    from dpbench.instruments.logical.instrument import Logical
    from dpbench.runner import measure

    outcomes = []
    with tqdm(cases, unit="case", disable=None, file=sys.stderr) as progress:
        for case in progress:
            progress.set_description(case.id)
            outcomes.append(outcome := measure(case, [Logical()]))
            if outcome.error:
                progress.write(outcome.message, file=sys.stderr)
    return outcomes
