"""Say which roof of a card, bandwidth or arithmetic, bounds each phase.

Counts the operations and bytes of each case, without a GPU, and holds them against what a card
can do. With a saved run (its number in dpbench list, or a JSON file) the bytes are the measured
ones, and the time of each phase stands beside the least that the roofs allow; only the
operations are counted then. The case options choose among the cases of the run.

Without --card, the card is the one that the rows were measured on, or the GPU that is visible.
With --ceilings, its roofs are those that bench/ceilings.py measured.

Examples:
  dpbench roofline --card h200 --batch-size 8 --seq-len 256
  dpbench roofline docs/results/h200-grid1.json --batch-size 8 --seq-len 256
  dpbench roofline run.json --ceilings ceilings.json --markdown roofline.md
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import AXES, Case
from dpbench.commands.options import add_cases, chosen_grid, count_cases, saved_run
from dpbench.errors import ConfigurationError
from dpbench.files import check_writable_file, write_text
from dpbench.registry import registries
from dpbench.results.cards import CARDS, Roofs, find_card, read_ceilings
from dpbench.settings import declare

if TYPE_CHECKING:
    import pandas as pd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("files", nargs="*", metavar="NUM|FILE", help="saved runs")
    roofs = parser.add_mutually_exclusive_group()
    roofs.add_argument("--card", help=f"{', '.join(CARDS)}, or its name in nvidia-smi")
    roofs.add_argument(
        "--ceilings", type=Path, metavar="FILE", help="measured roofs, of bench/ceilings.py"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add_cases(parser)
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Print the tables; returns the exit code, 1 if a case could not be counted."""
    import pandas as pd

    from dpbench.results.frame import to_frame
    from dpbench.results.roofline import intensities, under
    from dpbench.show.kernels import roofline_tables
    from dpbench.show.layout import as_markdown, as_text

    named = find_card(options.card) if options.card else None
    if options.ceilings:
        named = read_ceilings(options.ceilings)
    if options.markdown:
        check_writable_file(options.markdown)
    saved = _saved(options) if options.files else to_frame([])
    cases = _cases_of(saved) if options.files else list(chosen_grid(options).cases())
    measured_on = sorted(set(saved[saved.instrument != "logical"].device))
    if named:
        named.require(measured_on)  # before anything is counted
    roofs = {device: named or find_card(device) for device in measured_on}
    if not roofs:
        named = named or _visible_roofs()
    has_flops = set(_cases_of(saved[saved.metric == "flops"]))
    counted = count_cases([case for case in cases if case not in has_flops])
    for outcome in counted:
        if outcome.error:  # what could not be counted has no place under a roof
            same = saved[list(AXES)] == pd.Series(asdict(outcome.case))
            saved = saved[~same.all(axis="columns")]
    parts = [saved, to_frame(row for outcome in counted for row in outcome.rows)]
    frame = pd.concat([part for part in parts if len(part)] or [saved], ignore_index=True)
    tables = []
    for device, rows in intensities(frame).groupby("device", sort=False):
        card = roofs.get(str(device)) or named or _visible_roofs()
        tables += roofline_tables(under(rows, card), card)
    print(as_text(tables))
    if options.markdown:
        write_text(options.markdown, as_markdown(tables))
    return 1 if any(outcome.error for outcome in counted) else 0


def _saved(options: argparse.Namespace) -> pd.DataFrame:
    """The rows of the files, of the cases that the case options choose."""
    import pandas as pd

    frames = [saved_run(name, options.storage).frame for name in options.files]
    frame = pd.concat(frames, ignore_index=True)
    files = ", ".join(options.files)
    same = [*AXES, "instrument", "phase", "metric", "repeat", "device"]
    if frame.duplicated(same).any():
        raise ConfigurationError(f"{files}: the same case is in two of them; name one")
    for axis in AXES:
        if (values := getattr(options, axis)) is not None:
            names, known = registries().get(axis), set(frame[axis])
            wanted = [names.canonical(v) if names and v not in known else v for v in values]
            frame = frame[frame[axis].isin(wanted)]
    if frame.empty:
        raise ConfigurationError(f"{files}: no rows of the cases that were asked for")
    return frame


def _cases_of(frame: pd.DataFrame) -> list[Case]:
    return [Case(*row) for row in frame[list(AXES)].drop_duplicates().to_numpy(object)]


def _visible_roofs() -> Roofs:
    from dpbench.gpu import visible_gpus

    gpu = next(iter(visible_gpus()), None)
    if gpu is None:
        raise ConfigurationError(
            f"no CUDA GPU is visible here, so name a card with --card: {', '.join(CARDS)}"
        )
    return find_card(gpu.name)
