"""Say which roof of a card, bandwidth or arithmetic, bounds each phase.

Counts the operations and bytes of each case, without a GPU, and holds them against what a card
can do. With FILE, a document of measured rows (dpbench run --json), the bytes are the measured
ones, and the time of each phase stands beside the least that the roofs allow; only the
operations are counted then. The case options choose among the cases of a FILE.

Without --card, the card is the one that the rows were measured on, or the GPU that is visible.
With --ceilings, its roofs are those that dpbench ceilings measured.

Examples:
  dpbench roofline --card h200 --batch-size 8 --seq-len 256
  dpbench roofline docs/results/h200-grid1.json --batch-size 8 --seq-len 256
  dpbench roofline run.json --ceilings ceilings.json --markdown roofline.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import AXES, Case
from dpbench.commands.options import add_cases, chosen_grid, one_of
from dpbench.errors import ConfigurationError, check_writable_file
from dpbench.results.cards import CARDS, Roofs, find_card

if TYPE_CHECKING:
    from dpbench.results.rows import Measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="saved rows (JSON)")
    roofs = parser.add_mutually_exclusive_group()
    roofs.add_argument("--card", help=f"{one_of(CARDS)}, or its name in nvidia-smi")
    roofs.add_argument(
        "--ceilings", type=Path, metavar="FILE", help="measured roofs, of dpbench ceilings --json"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    add_cases(parser)


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.results.frame import to_frame
    from dpbench.results.outcome import write_text
    from dpbench.results.roofline import intensities, roofline_tables, under
    from dpbench.results.tables import as_markdown, as_text

    named = _named_roofs(options)
    if options.markdown:
        check_writable_file(options.markdown)
    saved = [row for path in options.files for row in saved_rows(path)]
    cases = set(_cases(options, saved))
    rows = [row for row in saved if row.case in cases]
    measured_on = {row.device for row in rows if row.instrument != "logical"}
    if named:
        named.require(measured_on)  # before anything is counted
    devices: list[str | None] = [*measured_on] if measured_on else [None]
    roofs = {device: named or _roofs_of(device) for device in devices}
    done = {row.case for row in rows if row.metric == "flops"}
    counted, failed = _count(case for case in _cases(options, saved) if case not in done)
    table = intensities(to_frame(row for row in [*rows, *counted] if row.case not in failed))
    found = []
    for device, group in table.groupby("device", sort=False):
        bounds = roofs.get(str(device)) or named or _roofs_of(None)
        found += roofline_tables(under(group, bounds), bounds)
    print(as_text(found))
    if options.markdown:
        write_text(options.markdown, as_markdown(found))
    return 1 if failed else 0


def saved_rows(path: Path) -> list[Measurement]:
    """The rows of a document that dpbench wrote.

    Raises:
        ConfigurationError: it cannot be read, or is no such document.
    """
    from dpbench.results.rows import Measurement

    try:
        return [Measurement.from_row(row) for row in json.loads(path.read_bytes())["rows"]]
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: not a document of dpbench's rows ({error})") from error


def _cases(options: argparse.Namespace, saved: list[Measurement]) -> list[Case]:
    """The cases of the grid, or those of the saved rows that the case options choose."""
    if not options.files:
        return list(chosen_grid(options).cases())
    wanted = {
        axis: {getattr(_probe(axis, value), axis) for value in getattr(options, axis)}
        for axis in AXES
        if getattr(options, axis) is not None
    }
    cases = dict.fromkeys(row.case for row in saved)
    chosen = [c for c in cases if all(getattr(c, axis) in wanted[axis] for axis in wanted)]
    if not chosen:
        names = ", ".join(map(str, options.files))
        raise ConfigurationError(f"{names}: no rows of the cases that were asked for")
    return chosen


def _probe(axis: str, value: object) -> Case:
    """A case with this value, which checks it and spells it as saved rows do."""
    case: dict[str, object] = {"trainer": "standard", "batch_size": 1, "seq_len": 1, axis: value}
    return Case(**case)  # type: ignore[arg-type]


def _count(cases: Iterable[Case]) -> tuple[list[Measurement], set[Case]]:
    """Logical rows of cases, and the cases that could not be counted."""
    from tqdm import tqdm

    from dpbench.instruments.logical import Logical
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
