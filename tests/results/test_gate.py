"""With a limit given, a run passes only if the limit judged all that the reference has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dpbench.core.case import AXES, Case
from dpbench.core.subject import Script
from dpbench.results.gate import Comparison, Gate
from dpbench.results.limits import RENEW, Limit
from dpbench.results.outcome import Outcome
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.run import Run
from tests.results.figures import timed_run
from tests.results.verdicts import failures

RUNS = Path(__file__).parents[1] / "data/saved"
GRID1 = Run.load(RUNS / "grid1.json")
DP = "dpsgd"
LAST = "dpsgd_fgc-bs16-seq1024-1b-fp32"
"""One of the twelve DP cases of Grid 1."""

LIMITS = {
    "plain": "dram_bytes:5%",
    "either way": "dram_bytes:±5%",
    "ratio": "dram_ratio:5%",
    "phase": "dram_bytes@clip:5%",
    "time": "step_time_seconds:5%",
}
ASKED = [(o.case, name) for o in GRID1.outcomes for name in ("ncu", "timing")]


def limits(*texts: str) -> list[Limit]:
    return [Limit.parse(text) for text in texts]


def verdict(after: Run, *texts: str, before: Run = GRID1, **how: Any) -> Comparison:
    return Gate(before, after, **how).compare(limits(*texts))


def changed(
    keep: Callable[[pd.DataFrame], Any] = lambda frame: frame.value.notna(),
    edit: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame,
    name: str = "after",
    **session: Any,
) -> Run:
    """Grid 1 as another session may leave it: some of its rows, edited."""
    frame = edit(GRID1.frame[keep(GRID1.frame)].copy())
    there = {tuple(axes) for axes in frame[list(AXES)].itertuples(index=False)}
    document = {
        **GRID1.document,
        "session": {**GRID1.session, **session},
        "rows": frame.to_dict("records"),
        "cases": [c for c in GRID1.document["cases"] if tuple(c[a] for a in AXES) in there],
    }
    return replace(GRID1, path=Path(name), document=document)


def set_values(run: pd.DataFrame, chosen: pd.Series, factor: float) -> pd.DataFrame:
    run.loc[chosen, "value"] *= factor
    return run


def renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """The trainer has another name, and reads three times as much."""
    frame = set_values(frame, (frame.trainer == DP) & (frame.metric == "dram_read_bytes"), 3)
    return frame.replace({"trainer": {DP: "dpsgd_v2"}})


def failing(error: str) -> Run:
    """Each case of a trainer ended with an error."""
    run = changed(lambda frame: frame.trainer != DP)
    gone = [
        {**case, "error": error, "message": "why"}
        for case in GRID1.document["cases"]
        if case["trainer"] == DP
    ]
    return replace(run, document={**run.document, "cases": [*run.document["cases"], *gone]})


LOSSES: dict[str, tuple[Callable[[], Run], set[str], str]] = {
    "the rows of an instrument, of one trainer": (
        partial(changed, lambda f: (f.trainer != DP) | (f.instrument != "ncu")),
        {"plain", "either way", "ratio", "phase"},
        "dpsgd-bs8-seq256-1b-fp32, *: not in after",
    ),
    "the times of one trainer": (
        partial(changed, lambda f: (f.trainer != DP) | (f.instrument != "timing")),
        {"time"},
        "not in after",
    ),
    "one case": (
        partial(
            changed,
            lambda f: (f.trainer != "dpsgd_fgc") | (f.batch_size != 16) | (f.seq_len != 1024),
        ),
        set(LIMITS),
        f"was not checked for {LAST}: not in after",
    ),
    "all DP cases but one": (
        partial(
            changed, lambda f: (f.trainer == "standard") | ((f.trainer == DP) & (f.seq_len < 1024))
        ),
        set(LIMITS),
        "dpsgd_fgc-bs8-seq256-1b-fp32, *: not in after",
    ),
    "the baseline": (
        partial(changed, lambda f: f.trainer != "standard"),
        {"plain", "either way", "ratio", "time"},
        "standard-bs8-seq256-1b-fp32",
    ),
    "the baseline in one cell": (
        partial(
            changed, lambda f: (f.trainer != "standard") | (f.batch_size != 8) | (f.seq_len != 256)
        ),
        {"plain", "either way", "ratio", "time"},
        "after has no dram_bytes of the baseline standard-bs8-seq256-1b-fp32 to divide by",
    ),
    "a metric": (
        partial(changed, lambda f: f.metric != "dram_read_bytes"),
        {"plain", "either way", "ratio", "phase"},
        "after has no dram_*by ncu",
    ),
    "a phase": (
        partial(changed, lambda f: f.phase != "clip"),
        {"phase"},
        "after has no dram_bytes in phase clip by ncu",
    ),
    "a phase of one case": (
        partial(changed, lambda f: (f.phase != "clip") | (f.trainer != DP) | (f.seq_len != 256)),
        {"phase"},
        "dpsgd-bs8-seq256-1b-fp32, dpsgd-bs16-seq256-1b-fp32: after has no dram_bytes in phase*",
    ),
    "a name": (
        partial(changed, edit=renamed),
        set(LIMITS),
        "was not checked for dpsgd-bs8-seq256-1b-fp32, *: not in after",
    ),
    "the numbers": (
        partial(changed, edit=lambda f: set_values(f, f.trainer == DP, float("nan"))),
        set(LIMITS),
        "after",
    ),
    "the GPU, in some cases": (
        partial(
            changed, edit=lambda f: f.assign(device=f.device.where(f.trainer != DP, "NVIDIA A100"))
        ),
        set(LIMITS),
        "after measured it on NVIDIA A100, not on NVIDIA H200",
    ),
    "cases that failed": (
        partial(failing, "CaseOutOfMemory"),
        set(LIMITS),
        "failed in after: CaseOutOfMe",
    ),
    "everything": (partial(changed, lambda f: f.value < 0), set(LIMITS), "not in after"),
}


@cache
def lost(loss: str) -> Run:
    """The run of a loss, made by the first test that has it."""
    return LOSSES[loss][0]()


@pytest.mark.parametrize("asked", [None, ASKED], ids=["compare", "session"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_fails_each_limit_that_should_have_judged_it(
    loss: str, asked: list[tuple[Case, str]] | None
) -> None:
    _, limited, why = LOSSES[loss]
    found = verdict(lost(loss), *LIMITS.values(), asked=asked)
    assert failures(found)
    assert found.regressions == []
    assert {missing.limit for missing in found.unjudged} == {LIMITS[name] for name in limited}
    lines = "\n".join(map(str, found.unjudged))
    assert all(part in lines for part in why.split("*"))


def test_what_is_whole_passes_and_judges_everything() -> None:
    again = Run.load(RUNS / "first_version.json")
    found = verdict(again, "dram_bytes:±1%", "dram_ratio:±1%", "dram_bytes@clip:5%")
    assert not failures(found)
    assert len(found.judged) == 16 + 12 + 12
    assert len([row for row in found.judged if row["threshold"] == "dram_ratio:±1%"]) == 12


def test_interrupted_run_has_not_passed() -> None:
    after = changed(status="interrupted", cases_asked=20)
    assert failures(verdict(after, "dram_bytes:5%"))
    [missing] = verdict(after, "dram_bytes:5%").unjudged
    assert str(missing).endswith("after was interrupted after 16 of 20 cases")
    assert not failures(verdict(after))
    was = changed(name="before", status="interrupted")
    assert verdict(GRID1, before=was).notes == [
        "before was interrupted, so it has only the cases finished until then"
    ]


# --- what was asked ----------------------------------------------------------------------------

SMALL = [(case, name) for case, name in ASKED if case.seq_len == 256]
SMALLER = changed(lambda f: f.seq_len == 256)


def test_what_was_not_asked_for_is_named_and_is_no_failure() -> None:
    found = verdict(SMALLER, *LIMITS.values(), asked=SMALL)
    assert not failures(found)
    [note] = found.notes
    assert note.startswith("not compared, because not requested: ")
    assert "-seq1024-" in note
    assert "-seq256-" not in note
    without_times = [(case, name) for case, name in ASKED if name == "ncu"]
    after = changed(lambda f: f.instrument == "ncu")
    found = verdict(after, LIMITS["plain"], asked=without_times)
    assert not failures(found)
    assert "-1b-fp32 (timing)" in found.notes[0]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("logical_bytes:5%", "grid1 has no logical_bytes of the step for any requested case"),
        ("dram_bytes@clip:5%", "grid1 has no dram_bytes in phase clip for any requested case"),
        ("dram_ratio:5%", "grid1 has no dram_ratio of the step for any requested case"),
    ],
)
def test_limit_that_judges_nothing_has_not_passed(limit: str, words: str) -> None:
    baselines = [(case, name) for case, name in ASKED if case.trainer == "standard"]
    after = changed(lambda f: f.trainer == "standard")
    found = verdict(after, "dram_bytes:5%", limit, asked=baselines)
    [missing] = found.unjudged
    assert str(missing).startswith(f"{limit} was not checked: ")
    assert words in str(missing)


EMPTY = Run.of("the storage")


def test_first_run_passes_only_if_the_user_says_so() -> None:
    for before in (EMPTY, SMALLER):
        found = verdict(GRID1, "dram_bytes:5%", before=before, asked=ASKED)
        [missing] = found.unjudged
        assert "-seq1024-" in ", ".join(missing.cases)
        remedy = "" if before is EMPTY else f"; {RENEW}"
        assert missing.why == f"{before.name} has no number to compare with{remedy}"
        first = verdict(GRID1, "dram_bytes:5%", before=before, asked=ASKED, first_run_ok=True)
        assert not failures(first)
        assert failures(
            verdict(GRID1, "logical_bytes:5%", before=before, asked=ASKED, first_run_ok=True)
        )
        assert failures(
            verdict(SMALLER, "dram_bytes:5%", before=GRID1, asked=ASKED, first_run_ok=True)
        )
    extra = verdict(GRID1, "dram_bytes:5%", before=SMALLER)  # compared without a session
    assert not failures(extra)
    assert extra.notes[0].startswith("not in after: ")


def test_number_that_only_the_new_run_has_is_not_judged() -> None:
    before = changed(lambda f: (f.phase != "clip") | (f.trainer != DP), name="before")
    [missing] = verdict(GRID1, LIMITS["phase"], before=before).unjudged
    assert missing.why == "before has no dram_bytes in phase clip by ncu"
    assert len(missing.cases) == 4
    before = lost("the baseline in one cell")
    found = verdict(GRID1, LIMITS["ratio"], before=before)
    assert "of the baseline standard-bs8-seq256-1b-fp32 to divide by" in found.unjudged[0].why


# --- what is said beside it ----------------------------------------------------------------------


def test_missing_baseline_is_said_without_a_limit() -> None:
    found = verdict(lost("the baseline"))
    assert not found.changes.metric.str.endswith("_ratio").any()
    assert found.notes[0].startswith("not in after: standard-")


def of_script(name: str, asked: int, counted: int) -> Run:
    """A run of a script of which some of the steps that were asked for were counted."""
    where = ("logical", STEP, "logical_read_bytes", 8.0, "B")
    rows = [Measurement(Script("train"), *where, n, "no hardware", "") for n in range(counted)]
    session = {"status": "complete", "settings": {"logical": {"steps": asked}}}
    outcomes = [Outcome(Script("train"), tuple(rows), 1.0)]
    document = {"session": session, "rows": [row.as_row() for row in rows]}
    document["cases"] = [{**o.as_saved(0)[0], "instruments": ["logical"]} for o in outcomes]
    return replace(GRID1, path=Path(name), document=document)


@pytest.mark.parametrize(
    ("there", "asked", "here", "why"),
    [
        (5, 5, 1, "before has 5 steps, but after has 1"),
        (2, 5, 2, None),  # the reference came to its end early, too
        (2, 5, 5, None),
        (5, 1, 1, None),  # that is another setting, and named as one
    ],
)
def test_script_that_ends_earlier_than_its_reference_is_not_judged(
    there: int, asked: int, here: int, why: str | None
) -> None:
    before, after = of_script("before", 5, there), of_script("after", asked, here)
    found = verdict(after, "logical_read_bytes:5%", before=before)
    assert [each.why for each in found.unjudged] == ([why] if why else [])


def test_other_versions_are_named() -> None:
    environment = {**GRID1.environment, "versions": {**GRID1.environment["versions"]}}
    environment["versions"]["torch"] = "9.9"
    after = replace(
        GRID1, path=Path("after"), document={**GRID1.document, "environment": environment}
    )
    [note] = verdict(after).notes
    assert note.startswith("different from grid1: torch ")
    assert note.endswith(" -> 9.9")


def test_reference_that_did_not_pass_is_said_to_be_one() -> None:
    before = changed(name="before", regressed=True)
    assert verdict(GRID1, before=before).notes == [
        "before did not pass its own comparison: its verdict is regressed"
    ]


def test_times_at_lowered_or_other_clocks_are_not_compared_silently() -> None:
    usual, lowered = timed_run(1.98e9, 0, 0x4), timed_run(1.9e9, 0, 0x8)
    assert verdict(usual, before=usual).notes == []
    assert verdict(lowered, before=usual).notes == [
        "fused-bs8-seq256-1b-fp32: lowered clocks: no -> hardware slowdown in 1 of 2 steps"
    ]
    assert verdict(usual, before=timed_run(1.41e9, 0, 0)).notes == [
        "fused-bs8-seq256-1b-fp32: SM clock 1.41 -> 1.98 GHz"
    ]


def test_a_run_without_clocks_is_compared_with_one_at_lowered_clocks() -> None:
    lowered = timed_run(1.9e9, 0x8, 0x8)
    rows = lowered.frame[lowered.frame.metric == "step_time_seconds"].to_dict("records")
    old = replace(lowered, document={**lowered.document, "rows": rows})
    assert verdict(lowered, before=old).notes == [
        "fused-bs8-seq256-1b-fp32: lowered clocks: no -> hardware slowdown in 2 of 2 steps"
    ]


# --- numbers that are made up --------------------------------------------------------------------


def run(
    name: str,
    values: dict[tuple[str, str], float],
    metric: str = "logical_read_bytes",
    **parts: Any,
) -> Run:
    """A run of {(trainer, phase): value}."""
    counted = metric.startswith("logical")
    by, device = ("logical", NO_HARDWARE) if counted else ("ncu", "here")
    rows: dict[Case, list[Measurement]] = {}
    for (trainer, phase), value in values.items():
        case = Case(trainer, 8, 256)
        row = Measurement(case, by, phase, metric, value, "B", 0, device, "")
        rows.setdefault(case, []).append(row)
    made = [Outcome(case, tuple(of), 1.0, instruments=(by,)) for case, of in rows.items()]
    return Run.of(name, [replace(outcome, **parts) for outcome in made])
