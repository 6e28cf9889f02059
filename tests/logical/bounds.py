"""Bounds on logical bytes, all in one file, which ``python -m tests.logical.bounds`` writes.

The bound is the ratio of a DP trainer's logical bytes to the standard trainer's in the same
cell; for the standard trainer it is its bytes. What each operator moved when the file was written
stands below, so that a failure can name the phase and the operator that grew. Nobody edits the
file: what ``git diff`` shows after writing it anew is what a change of the code costs.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.case import BASELINE_TRAINER, GRIDS, OUTSIDE, PHASES, Case
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP
from tests.logical.layers import count_by_layers

FILE = Path(__file__).with_name("bounds.toml")
COMMAND = "python -m tests.logical.bounds"
LISTED_GB = 0.1
"""An operator is listed if it moves this much in any cell."""

HEADER = f"""\
# Logical bytes of one training step of the 1b model in fp32. Do not edit: {COMMAND}
# writes this file. One column for each cell of the named grids, batch size x sequence length.
#
# ratio: bytes of the step / those of standard training; the bound that tests hold a trainer to
# step, and each operator by phase: GB read and written (operators with {LISTED_GB} GB in any cell)

# How far, relatively, a ratio may be from its bound, and a step of standard training from its GB:
tolerance = 0.01

"""


def grid_cases() -> dict[str, list[Case]]:
    """The cases of both named grids by cell, e.g. ``8x256``; the baseline comes first."""
    cases = dict.fromkeys(case for grid in GRIDS.values() for case in grid.cases())
    cells: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: (case.batch_size, case.seq_len)):
        cells.setdefault(cell_of(case), []).append(case)
    return cells


def cell_of(case: Case) -> str:
    """What a column of the file is called."""
    return f"{case.batch_size}x{case.seq_len}"


def gigabytes(report: CaseReport) -> dict[str, float]:
    """GB of the step, and by ``phase operator``."""
    by_operator = report.operators.logical_bytes / 1e9
    return {STEP: report.logical_bytes / 1e9} | {
        " ".join(where): float(moved) for where, moved in by_operator.items()
    }


@dataclass(frozen=True)
class Bounds:
    """The file's content: for each trainer, ``ratio``, ``step`` and operators by cell."""

    tolerance: float
    cells: Sequence[str]
    trainers: Mapping[str, Mapping[str, Sequence[float]]]

    @classmethod
    def read(cls, path: Path = FILE) -> Bounds:
        """The bounds in a file."""
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(table.pop("tolerance"), table.pop("cells"), table)

    def expected(self, case: Case) -> dict[str, float]:
        """The column of a case: each name of the file with its number."""
        column = self.cells.index(cell_of(case))
        return {name: line[column] for name, line in self.trainers[case.trainer].items()}

    def check(self, report: CaseReport, baseline: CaseReport) -> None:
        """Compare a case with its bound.

        Args:
            report: the case.
            baseline: the standard trainer in the same cell; may be the case itself.

        Raises:
            AssertionError: it is outside; the message names phases and operators.
        """
        expected = self.expected(report.case)
        if report.case.trainer == BASELINE_TRAINER:
            bound, found, what = expected[STEP], report.logical_bytes / 1e9, "GB of logical bytes"
        else:
            bound, found = expected["ratio"], report.ratio_to(baseline)
            what = "times the logical bytes of standard training"
        if abs(found / bound - 1) <= self.tolerance:
            return
        reports = dict.fromkeys([report.case, baseline.case])
        changes = [
            line
            for case in reports
            for line in self._changes(report if case == report.case else baseline)
        ]
        raise AssertionError(
            "\n".join(
                [
                    f"{report.case.id}: {found:.3f} {what}; {bound:.3f} is committed, "
                    f"give or take {self.tolerance:.0%}. What changed most:",
                    *changes,
                    f"If that is intended, run {COMMAND} and commit what it writes.",
                ]
            )
        )

    def _changes(self, report: CaseReport, most: int = 5) -> list[str]:
        """By phase and operator, what a report has beyond the file."""
        found, expected = gigabytes(report), self.expected(report.case)
        names = (found.keys() | expected.keys()) - {STEP, "ratio"}
        change = {name: found.get(name, 0.0) - expected.get(name, 0.0) for name in names}
        largest = sorted(names, key=lambda name: (-abs(change[name]), name))[:most]
        return [
            "  {} {}: {} {:+.1f} GB".format(report.case.trainer, *name.split(" "), change[name])
            for name in largest
            if abs(change[name]) >= LISTED_GB
        ]


def as_toml(reports: Iterable[CaseReport]) -> str:
    """The file for these reports, which are all trainers in all cells."""
    by_trainer: dict[str, dict[str, CaseReport]] = {}
    for report in reports:
        by_trainer.setdefault(report.case.trainer, {})[cell_of(report.case)] = report
    baselines = by_trainer[BASELINE_TRAINER]
    names = ", ".join(f'"{cell}"' for cell in baselines)
    parts = [f"{HEADER}cells = [{names}]"]
    for trainer, by_cell in by_trainer.items():
        columns = [gigabytes(by_cell[cell]) for cell in baselines]
        lines = [_line(name, [c.get(name, 0.0) for c in columns]) for name in _listed(columns)]
        if trainer != BASELINE_TRAINER:
            ratios = [by_cell[cell].ratio_to(baselines[cell]) for cell in baselines]
            lines.insert(0, _line("ratio", ratios, digits=3))
        parts.append("\n".join([f"[{trainer}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _listed(columns: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The names worth a line, by phase and alphabet, so that lines stay where they are."""
    order = [STEP, *PHASES, OUTSIDE]
    names = dict.fromkeys(name for column in columns for name in column)
    for name in sorted(names, key=lambda name: (order.index(name.split(" ")[0]), name)):
        if max(column.get(name, 0.0) for column in columns) >= LISTED_GB:
            yield name


def _line(name: str, values: Sequence[float], digits: int = 1) -> str:
    numbers = ", ".join(f"{value:7.{digits}f}" for value in values)
    quoted = f'"{name}"' if " " in name else name
    return f"{quoted:68} = [{numbers}]"


def main() -> None:
    """Count every cell and write the file."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    cases = [case for cell in grid_cases().values() for case in cell]
    FILE.write_text(as_toml(map(count_by_layers, cases)), encoding="utf-8")
    print(f"wrote {FILE}: {len(cases)} cases")


if __name__ == "__main__":
    main()
