"""What several commands say and take."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import ATTENTIONS, AXES, GRIDS, MODEL_SIZES, PRECISIONS, Case, Grid
from dpbench.errors import check_is_file
from dpbench.instruments.child import Steps
from dpbench.instruments.torch_profiler import TorchProfiler
from dpbench.registry import MODELS, TRAINERS
from dpbench.results.rows import STORAGE
from dpbench.results.view import COLUMNS_HELP, GROUP_BY_HELP, SORT_HELP, TOP, View
from dpbench.schedule import Schedule

if TYPE_CHECKING:
    from dpbench.results.run import Run


def add_steps(
    parser: argparse._ActionsContainer, whose: str, steps: Steps, prefix: str = ""
) -> None:
    """Declare how many steps warm up, and how many count, under options with a prefix."""
    for name, default in (("warmup", steps.warmup), ("active", steps.active)):
        parser.add_argument(
            f"--{prefix}{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{whose} {name} steps (default {default})",
        )


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Declare which cases: a grid, and what replaces its axes."""
    parser.add_argument(
        "--grid", default="grid1", help=f"{one_of(GRIDS)}, or a .toml file (default grid1)"
    )
    narrow = parser.add_argument_group("cases", "each replaces one axis of the grid; repeatable")
    narrow.add_argument("--trainer", action="append", help=TRAINER_HELP)
    narrow.add_argument("--batch-size", action="append", type=int, help="examples")
    narrow.add_argument("--seq-len", action="append", type=int, help="tokens")
    narrow.add_argument("--model-size", action="append", help=SIZE_HELP)
    narrow.add_argument("--precision", action="append", help=one_of(PRECISIONS))
    narrow.add_argument("--attention", action="append", help=one_of(ATTENTIONS))
    narrow.add_argument("--model", action="append", help=MODEL_HELP)


def chosen_grid(options: argparse.Namespace) -> Grid:
    """The grid that the options of `add_cases` describe.

    Raises:
        ConfigurationError: it does not exist, or a value or the module of a class does not.
    """
    grid = Grid.named(options.grid).narrow(**{axis: getattr(options, axis) for axis in AXES})
    for registry, names in ((TRAINERS, grid.trainer), (MODELS, grid.model)):
        for name in names:
            registry.locate(name)
    return grid


def add_view(parser: argparse._ActionsContainer) -> None:
    """Declare what the tables show, in the words of pytest-benchmark."""
    parser.add_argument("--columns", metavar="LABELS", help=COLUMNS_HELP)
    parser.add_argument("--sort", metavar="COL", help=SORT_HELP)
    parser.add_argument("--group-by", metavar="LABEL", help=GROUP_BY_HELP)


def chosen_view(options: argparse.Namespace) -> View:
    """The view that the options of `add_view` describe.

    Raises:
        ConfigurationError: a column, an axis or a group does not exist.
    """
    return View.of(options.columns, options.sort, options.group_by, vars(options).get("top", TOP))


def add_case(parser: argparse.ArgumentParser) -> None:
    """Declare one case."""
    parser.add_argument("--trainer", required=True, help=TRAINER_HELP)
    parser.add_argument("--batch-size", type=int, default=8, help="examples (default 8)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--model-size", default="1b", help=f"{SIZE_HELP} (default %(default)s)")
    parser.add_argument(
        "--precision", default="fp32", help=f"{one_of(PRECISIONS)} (default %(default)s)"
    )
    parser.add_argument(
        "--attention", default="sdpa", help=f"{one_of(ATTENTIONS)} (default %(default)s)"
    )
    parser.add_argument("--model", default="simple", help=f"{MODEL_HELP} (default %(default)s)")


def chosen_case(options: argparse.Namespace) -> Case:
    """The case that the options of `add_case` describe.

    Raises:
        ConfigurationError: a value in it does not exist.
    """
    return Case(**{axis: getattr(options, axis) for axis in AXES})


def add_profile(parser: argparse._ActionsContainer) -> None:
    """Declare what the PyTorch profiler records, and what counts as a bottleneck."""
    parser.add_argument(
        "--profile-schedule",
        default=str(Schedule()),
        metavar="NAME=N,…",
        help="steps that the PyTorch profiler skips, waits, warms up, records, and how often "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--profile-threshold",
        type=float,
        default=TorchProfiler.threshold,
        metavar="MS",
        help="list operators with this many ms of a step or more (default %(default)g)",
    )


def add_storage(parser: argparse._ActionsContainer) -> None:
    """Declare where runs are saved."""
    parser.add_argument(
        "--storage",
        type=Path,
        default=STORAGE,
        metavar="DIR",
        help="where runs are saved (default %(default)s)",
    )


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


def one_of(names: Iterable[str]) -> str:
    """Names for a help text."""
    return ", ".join(names)


TRAINER_HELP = f"{one_of(TRAINERS)}, their class names, or package.module:Class"
SIZE_HELP = f"{one_of(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS"
MODEL_HELP = f"{one_of(MODELS)}, or package.module:Class"
METRICS_HELP = "names of dpbench, of nvprof, or ncu counters, by commas (default dpbench's)"
