"""Merge runs of one measurement: shards of a grid, or parts from several machines.

A run is a file that --json wrote, or the number or name of a saved run, as dpbench list shows them.
Runs are refused if they differ in GPU model, versions, code or settings, or if two runs measured
the same case with the same instrument. Differences in CPUs and drivers are allowed and printed. The
exit code is 1 if a shard or a case is missing, or if a case failed.

Examples:
  dpbench run --grid grid1 --shard 1/2 --json shard1.json
  dpbench run --grid grid1 --shard 2/2 --json shard2.json
  dpbench merge shard1.json shard2.json --output grid1.json --output grid1.md
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpbench.commands.list import saved_run
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.grid import Grid
from dpbench.core.metrics import METRICS
from dpbench.core.settings import Settings, declare
from dpbench.core.subject import Subject
from dpbench.results.conditions import differing_conditions
from dpbench.results.outcome import COMPLETE, INTERRUPTED
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.show.layout import as_text, terminal_width
from dpbench.show.outputs import summary_tables, write_output
from dpbench.show.view import TableOptions

OUTPUT_OPTIONS = ("output", "json", "markdown", "csv", "html", "save", "storage")
"""Options for the files of the merged run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="numbers, names or files")
    declare(parser.add_argument, *OUTPUT_OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Merge the runs, then print and write the merged run."""
    settings = Settings.read(options)
    settings.check()
    return finish([saved_run(name, options.storage) for name in options.runs], settings, "merge")


def finish(
    runs: Sequence[Run], settings: Settings, command: str, problems: Sequence[str] = ()
) -> int:
    """Merge runs, then print and write the merged run.

    Args:
        runs: the runs to merge.
        settings: the settings with the files to write.
        command: the command's name, for messages.
        problems: messages about missing parts that are already known.

    Returns:
        The exit code: 1 if a part is missing or a case failed.
    """
    with METRICS.including(*(run.metrics for run in runs)):
        merged, notes = merge_runs(runs)
        view = TableOptions(baseline=merged.baseline)
        merged = merged.with_derived()
        for kind, path in settings.files.values():
            write_output(kind, path, [merged], view)
        if settings.save is not None:
            device = next((name for name in merged.devices if name != NO_HARDWARE), None)
            storage = Storage(settings.storage)
            notes.append(f"saved {storage.allocate(settings.save, device, merged.text)}")
        for note in (*problems, *notes):
            print(printable(f"dpbench {command}: {note}"), file=sys.stderr)
        print(as_text(summary_tables(merged, view), terminal_width()))
    failed = any(outcome.error for outcome in merged.outcomes)
    return int(bool(problems) or failed or merged.status != COMPLETE)


MACHINES_MAY_DIFFER = ("CPU ", "driver ")
"""Prefixes of conditions that may differ between the machines of a cluster."""


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``total`` parts of a grid, counted from 1."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``K/N``."""
        number, slash, total = text.partition("/")
        if not (
            slash and number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)
        ):
            raise ConfigurationError(f"a shard is K/N with K from 1 to N, not {text!r}")
        return cls(int(number), int(total))

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def cases(self, cases: Iterable[Case]) -> list[Case]:
        """Return the cases of this shard, in order. All cases of a cell are in the same shard.

        Cells are assigned to shards in turn, in the order of their hashes. So the sizes of shards
        differ by at most one cell, and every machine divides a grid in the same way.
        """
        trained = cells(cases)
        in_turn = sorted(trained, key=lambda cell: hashlib.sha256(cell.encode()).digest())
        own = {*in_turn[self.number - 1 :: self.total]}
        return [case for cell in trained if cell in own for case in trained[cell]]


def cells(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of each cell. The cases of a cell differ only in the trainer."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.baseline.id, []).append(case)
    return found


def merge_runs(runs: Sequence[Run]) -> tuple[Run, list[str]]:
    """Merge several runs into one.

    Returns:
        The merged run, and notes. The status of the merged run is complete or interrupted. If some
        of the runs are shards, the merged run is complete if no instrument lacks a case of the
        shards' grid. If no run is a shard, the merged run is complete if all of the runs are
        complete.

    Raises:
        ConfigurationError: the runs differ in GPU model, versions, code, settings or baseline, the
            shards differ in grid or number, or two runs measured the same case with the same
            instrument.
    """
    first, *others = runs
    notes = []
    shards = [run for run in runs if _shard(run)]
    for run in others:
        different = differing_conditions(first, run)
        if shards and _shard(run):
            different += _grid_differences(shards[0], run)
        if (ours := first.baseline) != (theirs := run.baseline):
            different.append(f"ratios to {ours} -> {theirs}")
        refused = [text for text in different if not text.startswith(MACHINES_MAY_DIFFER)]
        if refused:
            raise ConfigurationError(
                f"{first.path} and {run.path} cannot be merged: {'; '.join(refused)}"
            )
        notes += [f"{run.path}: {text}" for text in different]
    _refuse_duplicates(runs)
    merged = Run.merge(runs)
    cases = _cases_of(shards[0].grid) if shards else []
    missing = _missing(shards, merged, cases)
    notes += missing
    complete = not missing if shards else all(run.status == COMPLETE for run in runs)
    session = merged.session | {
        "cases_asked": len({*cases, *(o.case for o in merged.outcomes)})
        if shards
        else max(sum(run.cases_asked for run in runs), merged.cases_asked),
        "status": COMPLETE if complete else INTERRUPTED,
    }
    return Run.of(merged.name, merged.outcomes, merged.environment, session), notes


def _shard(run: Run) -> str | None:
    text: str | None = run.session.get("grid", {}).get("shard")
    return text


def _grid_differences(before: Run, after: Run) -> list[str]:
    old, new = before.grid, after.grid
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"grid's {name} {old.get(name)} -> {new.get(name)}" for name in names]


def _cases_of(grid: Mapping[str, Any]) -> list[Case]:
    axes = {axis: tuple(grid[axis]) for axis in AXES if axis in grid}
    return Grid(str(grid.get("name")), axes).cases()


def _refuse_duplicates(runs: Sequence[Run]) -> None:
    """Raise an error if two runs measured the same case with the same instrument."""
    measured: dict[tuple[Subject, str], Run] = {}
    for run in runs:
        for key in {(o.case, name) for o in run.outcomes if o.rows for name in o.instruments}:
            if (other := measured.setdefault(key, run)) is not run:
                case, name = key
                raise ConfigurationError(
                    f"{other.path} and {run.path} both have {case.id} by {name}: leave out one"
                )


def _missing(shards: Sequence[Run], merged: Run, cases: Sequence[Case]) -> list[str]:
    """Return a note for each shard and instrument that lacks cases of the grid."""
    present = [Shard.parse(text) for run in shards if (text := _shard(run))]
    if len(totals := {shard.total for shard in present}) > 1:
        named = " and ".join(sorted(map(str, {*present})))
        raise ConfigurationError(f"the shards {named} belong to different divisions of the grid")
    instruments = {name: "" for outcome in merged.outcomes for name in outcome.instruments}
    if len(instruments) > 1:
        instruments = {name: f" by {name}" for name in instruments}
    notes = []
    for by, words in (instruments or {"": ""}).items():
        measured = {outcome.case for outcome in merged.outcomes if by in outcome.instruments}
        for shard in (Shard(k, total) for total in totals for k in range(1, total + 1)):
            own = {*shard.cases(cases)}
            if lacking := own - measured:
                part = f"{len(lacking)} of {len(own)} cases of " if own & measured else ""
                notes.append(f"{part}shard {shard} {'are' if part else 'is'} missing{words}")
    return notes
