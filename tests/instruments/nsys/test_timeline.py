"""Busy time and launches of a timeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.instruments.nsys.timeline import Activity, Range, Timeline, read_timeline
from dpbench.results.rows import STEP
from tests.instruments.nsys.recording import case_recording


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return read_timeline(case_recording().write(tmp_path_factory.mktemp("nsys") / "a.sqlite"))


def used(timeline: Timeline) -> dict[tuple[int, str], list[float]]:
    """Seconds, busy seconds and launches by step and phase."""
    names = ["timeline_seconds", "timeline_busy_seconds", "timeline_launches"]
    return {(u["step"], u["phase"]): [u[name] for name in names] for u in timeline.usages()}


def test_a_phase_is_as_busy_as_something_ran_inside_its_range(timeline: Timeline) -> None:
    assert {phase: usage for (step, phase), usage in used(timeline).items() if step == 0} == {
        "outside": [10e-6, 0, 0],
        "forward": [200e-6, 150e-6, 2],  # two kernels at the same time
        "clip": [100e-6, 10e-6, 1],
    }


def test_a_whole_step_has_no_phases_of_its_own(timeline: Timeline) -> None:
    assert {place: usage for place, usage in used(timeline).items() if place[0]} == {
        (1, STEP): [300e-6, 160e-6, 2],
        (2, STEP): [320e-6, 160e-6, 2],
    }


def test_a_phase_that_is_entered_twice_adds_up() -> None:
    ranges = [Range(0, "clip", 0, 10), Range(0, "noise", 10, 20), Range(0, "clip", 20, 40)]
    work = [Activity(5, 8, 5), Activity(30, 34, 21)]
    assert used(Timeline("", "", ranges, work)) == {
        (0, "clip"): [30e-9, 7e-9, 2],
        (0, "noise"): [10e-9, 0, 0],
    }


def test_without_ranges_everything_is_one_step() -> None:
    work = [Activity(5, 8, 5), Activity(10, 20, 10)]
    assert used(Timeline("", "", [], work)) == {(0, STEP): [15e-9, 13e-9, 2]}


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1), st.integers(0, 60))
def test_busy_is_when_anything_ran_in_the_step(work: list[tuple[int, int]], start: int) -> None:
    step = Range(0, STEP, start, start + 50)
    activities = [Activity(at, at + size, at) for at, size in sorted(work)]
    timeline = Timeline("", "", [step], activities)
    [(_, busy_seconds, _)] = used(timeline).values()
    busy = round(busy_seconds * 1e9)
    ran = {when for at, size in work for when in range(at, at + size)}
    assert busy == len(ran & {*range(step.start, step.end)})
