"""What DP training must move, in every cell of the named grids, against committed bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.case import BASELINE_TRAINER, GRIDS, Case
from dpbench.results.operators import OperatorCount
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP, Measurement
from tests.logical.bounds import Bounds, as_toml, grid_cases
from tests.logical.layers import count_by_layers

BOUNDS = Bounds.read()
CELLS = grid_cases()


@pytest.mark.parametrize("cell", CELLS)
def test_dp_training_moves_more_than_standard_and_no_more_than_committed(cell: str) -> None:
    baseline, *private = map(count_by_layers, CELLS[cell])
    BOUNDS.check(baseline, baseline)
    for report in private:
        assert report.logical_bytes > baseline.logical_bytes
        BOUNDS.check(report, baseline)


def test_the_file_has_a_bound_for_every_case_of_the_grids() -> None:
    assert list(BOUNDS.cells) == list(CELLS)
    assert {tuple(BOUNDS.trainers)} == {grid.trainer for grid in GRIDS.values()}
    for cases in CELLS.values():
        for case in cases[1:]:
            assert BOUNDS.expected(case)["ratio"] > 1


# --- a check that fails -----------------------------------------------------------------------


def report(trainer: str = "dpsgd", **gigabytes: float) -> CaseReport:
    """A report in which ``clip_mul`` is ``aten.mul`` in the phase ``clip``, half of it read."""
    case = Case(trainer, batch_size=8, seq_len=256)
    counts = tuple(
        OperatorCount(phase, f"aten.{operator}", 1, int(value * 5e8), int(value * 5e8), 0)
        for name, value in gigabytes.items()
        for phase, operator in [name.split("_")]
    )
    rows = [
        Measurement(case, "logical", STEP, f"logical_{what}_bytes", half, "B", 0, "none", "torch")
        for what in ("read", "write")
        for half in [sum(count.total_bytes for count in counts) / 2]
    ]
    return CaseReport(case, CaseReport.of(case, rows).frame, counts)


STANDARD = report("standard", backward_mm=80.0)
DPSGD = report(backward_mm=80.0, clip_mul=240.0)


@pytest.fixture
def bounds(tmp_path: Path) -> Bounds:
    """What is committed when `STANDARD` and `DPSGD` are what was counted."""
    file = tmp_path / "bounds.toml"
    file.write_text(as_toml([STANDARD, DPSGD]), encoding="utf-8")
    return Bounds.read(file)


def refusal(bounds: Bounds, found: CaseReport, baseline: CaseReport = STANDARD) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        bounds.check(found, baseline)
    return str(caught.value).splitlines()


def test_what_was_written_is_within_its_own_bounds(bounds: Bounds) -> None:
    assert bounds.expected(DPSGD.case)["ratio"] == 4
    bounds.check(DPSGD, STANDARD)
    bounds.check(STANDARD, STANDARD)


@pytest.mark.parametrize("change", [-3.1, 3.1])
def test_what_is_within_the_tolerance_passes(bounds: Bounds, change: float) -> None:
    bounds.check(report(backward_mm=80.0, clip_mul=240.0 + change), STANDARD)


def test_an_operator_that_grew_is_named_with_its_phase(bounds: Bounds) -> None:
    grown = report(backward_mm=80.0, clip_mul=246.0)
    assert refusal(bounds, grown) == [
        "dpsgd-bs8-seq256-1b-fp32: 4.075 times the logical bytes of standard training; "
        "4.000 is committed, give or take 1%. What changed most:",
        "  dpsgd clip: aten.mul +6.0 GB",
        "If that is intended, run python -m tests.logical.bounds and commit what it writes.",
    ]


def test_operators_that_came_and_went_are_named_the_largest_first(bounds: Bounds) -> None:
    other = report(backward_bmm=80.0, clip_mul=260.0)
    assert refusal(bounds, other)[1:-1] == [
        "  dpsgd backward: aten.bmm +80.0 GB",
        "  dpsgd backward: aten.mm -80.0 GB",
        "  dpsgd clip: aten.mul +20.0 GB",
    ]


def test_a_ratio_that_fell_is_outside_too(bounds: Bounds) -> None:
    assert "  dpsgd clip: aten.mul -6.0 GB" in refusal(
        bounds, report(backward_mm=80.0, clip_mul=234.0)
    )


def test_a_baseline_that_changed_is_named_as_such(bounds: Bounds) -> None:
    smaller = report("standard", backward_mm=70.0)
    assert "  standard backward: aten.mm -10.0 GB" in refusal(bounds, DPSGD, smaller)
    assert refusal(bounds, smaller, smaller)[:2] == [
        "standard-bs8-seq256-1b-fp32: 70.000 GB of logical bytes; 80.000 is committed, "
        "give or take 1%. What changed most:",
        "  standard backward: aten.mm -10.0 GB",
    ]


def test_small_operators_have_no_line(bounds: Bounds) -> None:
    text = as_toml([STANDARD, report(backward_mm=80.0, clip_mul=240.0, noise_add=0.05)])
    assert "clip aten.mul" in text
    assert "noise" not in text.partition("[dpsgd]")[2]
    assert BASELINE_TRAINER in bounds.trainers
