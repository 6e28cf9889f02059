"""What must not pass: numbers that became ten times worse, and of which something is lost.

Each entry of the table is one way to lose the rows that would show it, or to repeat others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.metrics import unit
from dpbench.core.subject import Script
from dpbench.results.gate import Comparison, Gate
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome, document
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement, checked
from dpbench.results.run import Run
from tests.results.verdicts import failures

Rows = list[dict[str, Any]]
STEPS = 4

RESNET = Case("dpsgd", 8, workload="resnet", set={"depth": 18})
SUBJECTS: dict[str, tuple[Case, str, str]] = {
    "bytes of a workload": (RESNET, "logical", "logical_read_bytes"),
    "times of a case": (Case("dpsgd", 8, 256), "timing", "step_time_seconds"),
    "kernels of a case": (Case("dpsgd", 8, 256), "ncu_kernels", "kernel_dram_read_bytes"),
    "counters of a case": (Case("dpsgd", 8, 256), "cupti", "dram_read_bytes"),
    "operators of a step function": (
        Script("tests/test_own.py::test_own:step"),
        "logical",
        "logical_read_bytes",
    ),
    "times of a script": (Script("train"), "timing", "step_time_seconds"),
}
"""What is measured, by which instrument, and one of its metrics."""


def run(name: str, subject: str, factor: float = 1.0, **session: Any) -> Run:
    """Steps with three phases, of the subject and of the baseline."""
    if not session:
        return complete(name, subject, factor)
    return Run(Path(name), {**made(subject, factor), "session": {"status": "complete", **session}})


@cache
def complete(name: str, subject: str, factor: float) -> Run:
    """A run that nothing is to change, so that its summary is computed once."""
    return Run(Path(name), {**made(subject, factor), "session": {"status": "complete"}})


@cache
def made(subject: str, factor: float) -> dict[str, Any]:
    """The document of a run; made once, because its ratios and throughputs take long."""
    case, by, metric = SUBJECTS[subject]
    device = NO_HARDWARE if by == "logical" else "NVIDIA H200"
    outcomes = [
        Outcome(
            each,
            tuple(
                Measurement(each, by, phase, metric, value * more, unit(metric), n, device, "tool")
                for n in range(STEPS)
                for phase, value in ((STEP, 10.0), ("backward", 6.0), ("clip", 4.0))
            ),
            instruments=(by,),
            tests=({"test": "test_it", "params": {}},),
        )
        for each, more in ((case, factor), (case.with_trainer("standard"), 1.0))
    ]
    return document(outcomes, {})


def of_rows(name: str, document: dict[str, Any], change: Callable[[Rows], Rows]) -> Run:
    return Run(Path(name), {**document, "rows": change([dict(row) for row in document["rows"]])})


def verdict(before: Run, after: Run, limit: str, **how: Any) -> Comparison:
    return Gate(before, after, **how).compare([Limit.parse(limit)])


def is_of_case(row: dict[str, Any]) -> bool:
    return row["trainer"] != "standard"


def without(**lost: Any) -> Callable[[Rows], Rows]:
    """Rows of the case without those of which all this is so."""

    def change(rows: Rows) -> Rows:
        return [
            row
            for row in rows
            if not (is_of_case(row) and all(row[name] in those for name, those in lost.items()))
        ]

    return change


LOSSES: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "steps of a phase": (without(phase=["clip"], repeat=[1, 2, 3]), "clip"),
    "a step of a phase": (without(phase=["clip"], repeat=[0]), "clip"),
    "a phase": (without(phase=["clip"]), "clip"),
    "the whole step": (without(phase=[STEP]), STEP),
    "steps": (without(repeat=[1, 2, 3]), STEP),
    "steps, of a phase's limit": (without(repeat=[3]), "clip"),
    "the last steps as wholes": (without(phase=[STEP], repeat=[2, 3]), STEP),
    "the case": (without(), STEP),
}
"""What was lost, and the phase whose limit must say so."""


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_whole_is_judged(subject: str) -> None:
    before, worse = run("before", subject), run("after", subject, factor=10.0)
    limit = f"{SUBJECTS[subject][2]}@clip:5%"
    assert not failures(verdict(before, before, limit))
    assert len(verdict(before, worse, limit).regressions) == 1


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_ten_times_worse_does_not_pass_because_rows_are_lost(
    subject: str, loss: str
) -> None:
    case, _, metric = SUBJECTS[subject]
    change, phase = LOSSES[loss]
    limit = f"{metric}{'' if phase == STEP else f'@{phase}'}:5%"
    before, worse = run("before", subject), run("after", subject, factor=10.0)
    after = of_rows("after", dict(worse.document), change)
    found = verdict(before, after, limit)
    assert failures(found)
    if isinstance(case, Case):  # whose phases may come and go
        assert [missing.cases for missing in found.unjudged] == [[case.id]]


def test_a_number_that_lacks_steps_says_how_many_there_are() -> None:
    before, change = run("before", "times of a case"), LOSSES["steps of a phase"][0]
    lacking = of_rows("after", dict(before.document), change)
    [missing] = verdict(before, lacking, "step_time_seconds@clip:5%").unjudged
    assert missing.why == "only 1 of 4 steps have step_time_seconds in phase clip in after"
    for how in ({}, {"first_run_ok": True}):
        [missing] = verdict(lacking, before, "step_time_seconds@clip:5%", **how).unjudged
        assert missing.why.endswith("in phase clip in after")


@pytest.mark.parametrize(
    ("there", "here", "passed"),
    [
        ({}, {}, False),
        ({"timing": {"steps": 4}}, {"timing": {"steps": 4}}, False),
        ({}, {"timing": {"steps": 1}}, False),  # what the other was asked for nobody knows
        ({"timing": {"steps": 4}}, {"timing": {"steps": 1}}, True),  # which is named
    ],
)
def test_a_case_with_fewer_steps_than_its_reference_is_unjudged(
    there: dict[str, Any], here: dict[str, Any], *, passed: bool
) -> None:
    before = run("before", "times of a case", settings=there)
    whole = run("after", "times of a case", settings=here)
    after = of_rows("after", dict(whole.document), without(repeat=[1, 2, 3]))
    found = verdict(before, after, "step_time_seconds:5%")
    assert (not failures(found)) is passed
    if passed:
        assert any("timing's steps 4 -> 1" in note for note in found.notes)
    else:
        assert [each.why for each in found.unjudged] == ["before has 4 steps, but after has 1"]


def test_phases_of_a_script_may_come_and_go() -> None:
    before, change = run("before", "times of a script"), LOSSES["steps of a phase"][0]
    after = of_rows("after", dict(before.document), change)
    found = verdict(before, after, "step_time_seconds@clip:5%")
    assert not failures(found)


@pytest.mark.parametrize("phase", [STEP, "clip"])
def test_a_ratio_without_a_baseline_on_either_side_is_unjudged(phase: str) -> None:
    limit = "kernel_dram_read_ratio" + (f"@{phase}" if phase != STEP else "") + ":5%"

    def lonely(rows: Rows) -> Rows:
        return [row for row in rows if is_of_case(row) or row["phase"] not in (STEP, phase)]

    before, after = (
        of_rows(name, dict(run(name, "kernels of a case", factor).document), lonely)
        for name, factor in (("before", 1.0), ("after", 10.0))
    )
    [missing] = verdict(before, after, limit).unjudged
    assert missing.cases == [Case("dpsgd", 8, 256).id]
    assert "of the baseline standard-bs8-seq256-1b-fp32 to divide by" in missing.why
    first = verdict(Run.of("the storage"), after, limit, first_run_ok=True)
    assert failures(first)
    assert failures(verdict(before, after, "kernel_dram_read_ratio:5%"))


def test_a_ratio_is_of_no_more_steps_than_its_baseline() -> None:
    before = run("before", "counters of a case")

    def fewer(rows: Rows) -> Rows:
        return [row for row in rows if is_of_case(row) or row["repeat"] == 0]

    after = of_rows("after", dict(before.document), fewer)
    assert not failures(verdict(before, before, "dram_read_ratio:5%"))
    [missing] = verdict(before, after, "dram_read_ratio:5%").unjudged
    assert missing.why == "before has 4 steps, but after has 1"


def test_a_baseline_that_moved_nothing_is_nothing_to_divide_by() -> None:
    def nothing(rows: Rows) -> Rows:
        return [row | {"value": row["value"] * is_of_case(row)} for row in rows]

    before, after = (
        of_rows(name, dict(run(name, "counters of a case").document), nothing)
        for name in ("before", "after")
    )
    [missing] = verdict(before, after, "dram_read_ratio@clip:5%").unjudged
    assert missing.why.startswith(
        "after has no dram_read_bytes in phase clip of the baseline standard-"
    )


def test_numbers_in_another_unit_are_not_compared() -> None:
    name = "sm__cycles_active.avg"

    def counted(unit: str, value: float) -> Callable[[Rows], Rows]:
        return lambda rows: [r | {"metric": name, "unit": unit, "value": value} for r in rows]

    before = of_rows("before", dict(run("", "counters of a case").document), counted("cycle", 5e3))
    after = of_rows("after", dict(before.document), counted("kcycle", 50.0))
    assert not failures(verdict(before, before, f"{name}:5%"))
    assert failures(verdict(before, after, f"{name}:5%"))


def test_an_operator_that_is_no_longer_counted_leaves_its_case_unjudged() -> None:
    before, after = (run(name, "operators of a step function") for name in ("before", "after"))
    notes = ["NOT COUNTED: aten.add (sparse) (4×)"]
    cases = [{**case, "notes": notes} for case in after.document["cases"]]
    sparse = replace(after, document={**after.document, "cases": cases})
    limit = "logical_read_bytes:5%"
    for missing in verdict(before, sparse, limit).unjudged:
        assert missing.why == "NOT COUNTED: aten.add (sparse) (4×) in after"
    assert failures(verdict(before, sparse, limit))
    assert not failures(verdict(sparse, sparse, limit))
    assert not failures(verdict(sparse, before, limit))


# --- rows that cannot be ----------------------------------------------------------------------


CLIP = Measurement(RESNET, "timing", "clip", "step_time_seconds", 1.0, "s", 0, "cpu", "")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (CLIP, "a second value, 1.0,"),
        (replace(CLIP, value=2.0, unit="ms"), "the unit 'ms'"),
        (replace(CLIP, case=Script("loop")), "a number of loop"),
        (replace(CLIP, value=float("nan")), "the value nan"),
        (replace(CLIP, value=float("-inf")), "the value -inf"),
        (replace(CLIP, value=10**400), "the value 1000"),
        (replace(CLIP, value=-1.0), "the value -1.0"),
        (replace(CLIP, value=True), "the value True"),
        (replace(CLIP, value="1.0"), "the value '1.0'"),
        (replace(CLIP, value=None), "the value None"),
        (replace(CLIP, phase="klip"), "the phase 'klip'"),
        (replace(CLIP, phase=["clip"]), "the phase ['clip']"),
        (replace(CLIP, repeat=-1), "the repeat -1"),
        (replace(CLIP, repeat=0.5), "the repeat 0.5"),
        (replace(CLIP, rank=-1), "the rank -1"),
        (replace(CLIP, device=None), "the device None"),
    ],
    ids=str,
)
def test_what_cannot_be_one_cases_row_is_refused_when_it_is_recorded(
    wrong: Measurement, why: str
) -> None:
    other = replace(CLIP, phase="backward", repeat=1)
    rows, [refused] = checked(RESNET, [CLIP, wrong, other])
    assert rows == [CLIP, other]
    assert refused.startswith(f"timing has recorded {why}")
    assert refused.endswith(f"for step_time_seconds@{wrong.phase} of step {wrong.repeat}")


def test_only_numbers_that_are_signed_may_be_negative() -> None:
    signed = replace(CLIP, metric="memory_growth_bytes", unit="B", value=-1.0)
    assert checked(RESNET, [signed], whole=False) == ([signed], [])


def test_numbers_of_metrics_that_nobody_has_defined_are_refused() -> None:
    of_own = replace(CLIP, metric="of_its_own", unit="1")
    refused = ["timing has recorded an undefined metric for of_its_own@clip of step 0"]
    assert checked(RESNET, [of_own], whole=False) == ([], refused)


def test_a_phase_of_a_case_that_did_nothing_in_a_step_is_recorded_as_zero() -> None:
    rows = [
        replace(CLIP, value=2.0),
        replace(CLIP, phase="backward", repeat=0),
        replace(CLIP, phase="backward", repeat=1),
        replace(CLIP, phase=STEP, repeat=2),
        replace(CLIP, metric="peak_memory_bytes", unit="B"),
    ]
    assert checked(RESNET, rows) == ([*rows, replace(CLIP, value=0.0, repeat=1)], [])
    assert checked(RESNET, rows, whole=False) == (rows, [])
    of_script = [replace(row, case=Script("train")) for row in rows]
    assert checked(Script("train"), of_script) == (of_script, [])
