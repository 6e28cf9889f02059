"""What the gate says of operators, kernels, shares and whole runs; the numbers are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import PHASES, Case
from dpbench.core.metrics import unit
from dpbench.results.gate import Gate
from dpbench.results.kernels import KernelCount, OperatorCount
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.run import Run
from tests.results.test_gate import DP, run, verdict
from tests.results.verdicts import failures


def operator(name: str, moved: int) -> OperatorCount:
    return OperatorCount("clip", name, 1, moved, 0, 0)


def kernel(name: str, moved: float, repeat: int) -> KernelCount:
    return KernelCount(repeat, "clip", name, 1, moved, 0.0, 0.0, 0.0)


KERNELS = [("mul_kernel", 100), ("copy_kernel", 80)]


@pytest.mark.parametrize(
    ("metric", "limit", "before", "after", "name"),
    [
        (
            *("logical_read_bytes", "logical_read_bytes:5%"),
            {"operators": (operator("aten.mul", 100),)},
            {"operators": (operator("aten.mul", 100), operator("aten.clone", 80))},
            "aten.clone",
        ),
        (
            *("dram_read_bytes", "dram_read_bytes@clip:5%"),
            {"kernels": (kernel("mul_kernel", 100, 0),)},
            {"kernels": tuple(kernel(n, m, i) for n, m in KERNELS for i in (0, 1))},
            "copy_kernel",
        ),
    ],
    ids=["operator", "kernel"],
)
def test_operator_or_kernel_that_grew_is_named(
    metric: str, limit: str, before: dict[str, Any], after: dict[str, Any], name: str
) -> None:
    where = {(DP, STEP): 100.0, (DP, "clip"): 100.0}
    more = dict.fromkeys(where, 180.0)
    found = verdict(
        run("b", more, metric, **after), limit, before=run("a", where, metric, **before)
    )
    [regression] = found.regressions
    changed = {"trainer": DP, "phase": "clip", "name": name, "bytes": 80}
    changed |= {"module": "", "line": ""}
    assert regression["largest_changes"] == [changed]
    assert (regression["reference"], regression["before"], regression["after"]) == ("a", 100, 180)


@pytest.mark.parametrize(("steps", "judged"), [(4, True), (3, False), (5, False)])
def test_poisson_batches_are_judged_against_as_many_of_them_alone(steps: int, judged: bool) -> None:
    """Other numbers of steps are other sizes, whose mean differs."""

    def of(name: str, number: int, sampling: str = "poisson") -> Run:
        case = Case("dpsgd", 8, 256, sampling=sampling)
        number_of = (("logical_read_bytes", 100.0, "B", step) for step in range(number))
        rows = [Measurement(case, "logical", STEP, *each, NO_HARDWARE, "") for each in number_of]
        return Run.of(name, [Outcome(case, tuple(rows), instruments=("logical",))])

    limit = Limit.parse("logical_read_bytes:5%")
    found = Gate(of("a", 4), of("b", steps)).compare([limit])
    why = (
        []
        if judged
        else [f"Poisson batches need equally many steps: a has 4 steps, but b has {steps}"]
    )
    assert [each.why for each in found.unjudged] == why
    more = Gate(of("a", 4, "fixed"), of("b", 5, "fixed")).compare([limit])
    assert not failures(more)


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [(0, 0, True), (0, 1, False), (float("nan"), 1, False), (1, float("nan"), False)],
)
def test_nothing_and_no_number(before: float, after: float, passed: bool) -> None:
    one, other = (run(name, {(DP, STEP): v}) for name, v in (("a", before), ("b", after)))
    assert (not failures(verdict(other, "logical_read_bytes:5%", before=one))) is passed


@pytest.mark.parametrize("error", [None, "CaseFailed"])
def test_a_case_without_a_number_in_both_runs_does_not_pass(error: str | None) -> None:
    whole = run("whole", {(DP, STEP): 1.0})
    empty = Outcome(Case("standard", 8, 256), (), error=error, instruments=("logical",))
    before, after = (Run.of(name, [*whole.outcomes, empty]) for name in ("before", "after"))
    for asked in (None, [*whole.outcomes[0].asked, *empty.asked]):
        found = verdict(after, "logical_read_bytes:5%", before=before, asked=asked)
        assert failures(found)
        assert [missing.cases for missing in found.unjudged] == [[empty.case.id]]
    assert not failures(
        verdict(after, "logical_read_bytes:5%", before=before, asked=whole.outcomes[0].asked)
    )
    assert not failures(verdict(after, before=before))  # without a limit


def test_busy_share_of_a_step_is_not_judged_where_none_was_timed() -> None:
    numbers = {"gpu_busy_cycles": 60.0, "gpu_elapsed_cycles": 120.0, "range_time_seconds": 0.12}
    numbers |= {"step_time_seconds": 0.08}
    rows = [
        Measurement(Case(DP, 8, 256), "cupti", STEP, name, value, unit(name), 0, "here", "")
        for name, value in numbers.items()
    ]
    before, after = (
        Run.of(name, [Outcome(Case(DP, 8, 256), tuple(of), 1.0, instruments=("cupti",))])
        for name, of in (("before", rows), ("after", rows[:-1]))
    )
    assert not failures(verdict(before, "gpu_busy_share:±50%", before=before))
    [missing] = verdict(after, "gpu_busy_share:±50%", before=before).unjudged
    assert missing.why == "after has no gpu_busy_share by cupti"


def test_other_devices_are_judged_across_and_nothing_is_lost_there() -> None:
    values = {(trainer, phase): 100.0 for trainer in ("standard", DP) for phase in (STEP, "clip")}
    before = run("there", values, "dram_read_bytes")
    limited = ("dram_read_bytes:5%", "dram_read_ratio:5%", "dram_read_bytes@clip:5%")

    def elsewhere(kept: dict[tuple[str, str], float]) -> Run:
        here = run("elsewhere", kept, "dram_read_bytes")
        return run_of(here, here.frame.assign(device="elsewhere"))

    whole = elsewhere(values)
    assert not failures(verdict(whole, *limited, before=before, across=True))
    assert failures(verdict(whole, *limited, before=before))
    for lost in ((DP, STEP), (DP, "clip"), ("standard", STEP)):
        partly = elsewhere({key: value for key, value in values.items() if key != lost})
        assert failures(verdict(partly, *limited, before=before, across=True))
        assert failures(verdict(before, *limited, before=partly, across=True))
    counted = run("counted", values)
    assert failures(verdict(counted, *limited, before=before, across=True))
    assert failures(verdict(counted, "logical_read_bytes:5%", before=before, across=True))


def run_of(like: Run, frame: pd.DataFrame) -> Run:
    """A run with other rows."""
    return replace(like, document={**like.document, "rows": frame.to_dict("records")})


some_numbers = st.fixed_dictionaries(
    {(t, p): st.floats(1, 1e15) for t in ("standard", DP) for p in (STEP, *PHASES[:2])}
)


@settings(deadline=None, max_examples=3)
@given(values=some_numbers)
def test_run_compared_with_itself_passes(values: dict[tuple[str, str], float]) -> None:
    same = run("same", values)
    found = verdict(same, "logical_read_bytes:±0%", "logical_read_ratio@forward:±0%", before=same)
    assert not failures(found)
    assert len(found.judged) == 3
