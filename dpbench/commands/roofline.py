"""Say which roof of a card, bandwidth or arithmetic, bounds each phase.

Counts the operations and bytes of each case, without a GPU, and holds them against what a card
can do. With a saved run (its number in dpbench list, or a JSON file) the bytes are the measured
ones, and the time of each phase stands beside the least that the roofs allow; only the
operations are counted then. The case options choose among the cases of the run.

Without --card, the card is the one that the rows were measured on, or the GPU that is visible.
With --ceilings, its roofs are those that dpbench ceilings measured.

Examples:
  dpbench roofline --card h200 --batch-size 8 --seq-len 256
  dpbench roofline docs/results/h200-grid1.json --batch-size 8 --seq-len 256
  dpbench roofline run.json --ceilings ceilings.json --markdown roofline.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import AXES, Case
from dpbench.commands.options import add_cases, chosen_grid, saved_run
from dpbench.errors import ConfigurationError
from dpbench.files import check_writable_file
from dpbench.registry import resolve
from dpbench.results.cards import CARDS, Roofs, find_card
from dpbench.results.rows import Measurement
from dpbench.settings import declare, one_of

if TYPE_CHECKING:
    import pandas as pd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("files", nargs="*", metavar="NUM|FILE", help="saved runs")
    roofs = parser.add_mutually_exclusive_group()
    roofs.add_argument("--card", help=f"{one_of(CARDS)}, or its name in nvidia-smi")
    roofs.add_argument(
        "--ceilings", type=Path, metavar="FILE", help="measured roofs, of dpbench ceilings --json"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add_cases(parser)
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    import pandas as pd

    from dpbench.files import write_text
    from dpbench.results.frame import to_frame
    from dpbench.results.roofline import intensities, roofline_tables, under
    from dpbench.show.layout import as_markdown, as_text

    named = _named_roofs(options)
    if options.markdown:
        check_writable_file(options.markdown)
    saved = _saved(options) if options.files else to_frame([])
    cases = _cases_of(saved) if options.files else list(chosen_grid(options).cases())
    measured_on = sorted(set(saved[saved.instrument != "logical"].device))
    if named:
        named.require(measured_on)  # before anything is counted
    devices: list[str | None] = [*measured_on] if measured_on else [None]
    roofs = {device: named or _roofs_of(device) for device in devices}
    done = set(_cases_of(saved[saved.metric == "flops"]))
    counted, failed = _count(case for case in cases if case not in done)
    for case in failed:
        saved = saved[(saved[list(AXES)] != pd.Series(asdict(case))).any(axis="columns")]
    parts = [part for part in (saved, to_frame(counted)) if len(part)]
    table = intensities(pd.concat(parts or [saved], ignore_index=True))
    found = []
    for device, group in table.groupby("device", sort=False):
        bounds = roofs.get(str(device)) or named or _roofs_of(None)
        found += roofline_tables(under(group, bounds), bounds)
    print(as_text(found))
    if options.markdown:
        write_text(options.markdown, as_markdown(found))
    return 1 if failed else 0


def _saved(options: argparse.Namespace) -> pd.DataFrame:
    """The rows of the files, of the cases that the case options choose."""
    import pandas as pd

    frames = [saved_run(name, options.storage).frame for name in options.files]
    frame = pd.concat(frames, ignore_index=True)
    names = ", ".join(options.files)
    same = [*AXES, "instrument", "phase", "metric", "repeat", "device"]
    if frame.duplicated(same).any():
        raise ConfigurationError(f"{names}: the same case is in two of them; name one")
    for axis in AXES:
        if (values := getattr(options, axis)) is not None:
            known = set(frame[axis])  # a saved run may name what this process does not know
            wanted = [value if value in known else _spelled(axis, value) for value in values]
            frame = frame[frame[axis].isin(wanted)]
    if frame.empty:
        raise ConfigurationError(f"{names}: no rows of the cases that were asked for")
    return frame


def _spelled(axis: str, value: object) -> object:
    """A value of an axis as rows spell it.

    Raises:
        ConfigurationError: it does not exist.
    """
    case: dict[str, object] = {"trainer": "standard", "batch_size": 1, "seq_len": 1, axis: value}
    return getattr(resolve(Case(**case)), axis)  # type: ignore[arg-type]


def _cases_of(frame: pd.DataFrame) -> list[Case]:
    """The cases of rows, each once."""
    fields = frame[list(AXES)].drop_duplicates()
    return [Case(*row) for row in fields.to_numpy(object)]


def _count(cases: Iterable[Case]) -> tuple[list[Measurement], set[Case]]:
    """Logical rows of cases, and the cases that could not be counted."""
    from tqdm import tqdm

    from dpbench.instruments.logical.instrument import Logical
    from dpbench.runner import measure

    rows: list[Measurement] = []
    failed: set[Case] = set()
    with tqdm(list(cases), unit="case", disable=None, file=sys.stderr) as progress:
        for case in progress:
            progress.set_description(case.id)
            outcome = measure(case, [Logical()])
            rows += outcome.rows
            if outcome.error:
                failed.add(case)
                progress.write(outcome.message, file=sys.stderr)
    return rows, failed


def _named_roofs(options: argparse.Namespace) -> Roofs | None:
    if options.ceilings:
        from dpbench.results.ceilings import read_ceilings

        return read_ceilings(options.ceilings).roofs()
    return find_card(options.card).roofs() if options.card else None


def _roofs_of(device: str | None) -> Roofs:
    """The roofs of the card that rows name, or of the GPU that is visible here."""
    from dpbench.gpu import visible_gpus

    if device is None:
        gpu = next(iter(visible_gpus()), None)
        if gpu is None:
            raise ConfigurationError(
                f"no CUDA GPU is visible here, so name a card with --card: {one_of(CARDS)}"
            )
        device = gpu.name
    return find_card(device).roofs()
