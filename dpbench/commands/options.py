"""What several commands say and take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench import registry
from dpbench.case import AXES, Case, Grid
from dpbench.errors import check_is_file
from dpbench.options import AXIS_ARGUMENTS, add_axes, add_grid
from dpbench.show.view import TOP, View

if TYPE_CHECKING:
    from dpbench.results.run import Run


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Declare which cases: a grid, and what replaces its axes."""
    add_grid(parser.add_argument)
    add_axes(parser.add_argument_group("cases").add_argument)


def chosen_grid(options: argparse.Namespace) -> Grid:
    """The grid that the options of `add_cases` describe; the modules of its classes are there."""
    grid = registry.chosen_grid(options.grid, **{axis: getattr(options, axis) for axis in AXES})
    registry.locate(grid.cases())
    return grid


def chosen_view(options: argparse.Namespace) -> View:
    """The view that the options of `dpbench.options.add_view` describe.

    Raises:
        ConfigurationError: a column, an axis or a group does not exist.
    """
    top = vars(options).get("top", TOP)
    return View.of(options.columns, options.sort, options.group_by, top, options.expect)


def add_case(parser: argparse.ArgumentParser) -> None:
    """Declare one case; what `Case` has no default for has one here, but for the trainer."""
    defaults = {"batch_size": 8, "seq_len": 256}
    for axis in AXES:
        declared = dict(AXIS_ARGUMENTS[axis])
        default = defaults.get(axis, getattr(Case, axis, None))
        if default is not None:
            declared["help"] += " (default %(default)s)"
        option = f"--{axis.replace('_', '-')}"
        parser.add_argument(option, default=default, required=default is None, **declared)


def chosen_case(options: argparse.Namespace) -> Case:
    """The case that the options of `add_case` describe."""
    return registry.resolve(Case.from_row(vars(options)))


def saved_run(name: str, storage: Path) -> Run:
    """The run that a number names, as ``dpbench list`` shows it, or a path.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    from dpbench.results.run import Run
    from dpbench.results.storage import Storage

    if not name.isdecimal():
        check_is_file(Path(name))
    return Run.load(Storage(storage).find(name))
