"""Busy time, gaps and launches of a timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.instruments.nsys.sqlite import read_timeline
from dpbench.results.rows import STEP
from dpbench.results.timeline import THE_END, Activity, Range, Timeline
from tests.instruments.nsys.recording import case_recording


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return read_timeline(case_recording().write(tmp_path_factory.mktemp("nsys") / "a.sqlite"))


def used(timeline: Timeline) -> dict[tuple[int, str], list[float]]:
    """Seconds, busy seconds and launches by step and phase."""
    usages = timeline.usages().set_index(["step", "phase"])
    assert list(usages) == ["timeline_seconds", "timeline_busy_seconds", "timeline_launches"]
    return dict(zip(usages.index, usages.to_numpy().tolist(), strict=True))


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
    work = [Activity(5, 8, "kernel", "k", 5), Activity(30, 34, "kernel", "k", 21)]
    assert used(Timeline("", "", ranges, work, [])) == {
        (0, "clip"): [30e-9, 7e-9, 2],
        (0, "noise"): [10e-9, 0, 0],
    }


def test_a_gap_says_what_the_gpu_waited_for_and_what_the_cpu_called(timeline: Timeline) -> None:
    first, middle, last = [gap for gap in timeline.gaps().itertuples() if gap.step == 1]
    assert (first.seconds, first.phase) == (20e-6, "forward")
    assert first.calls == {"cudaLaunchKernel": 5000}
    assert (middle.seconds, middle.phase) == (90e-6, "clip")
    assert middle.waited_for == "memcpy Device-to-Device"
    assert middle.calls == {"cudaMemcpyAsync": 5000}
    assert (last.seconds, last.waited_for) == (30e-6, THE_END)
    assert last.calls == {"cudaDeviceSynchronize": 29_000}
    assert last.called == 29e-6


def test_calls_count_where_they_overlap_a_gap(tmp_path: Path) -> None:
    made = case_recording()
    made.call("cudaMalloc", 1100, 1200)  # the gap begins at 1170
    made.call("cudaFree", 1180, 2180)  # and the next step's at 2170
    gaps = read_timeline(made.write(tmp_path / "a.sqlite")).gaps()
    assert gaps.calls[1] == {"cudaMalloc": 30_000, "cudaFree": 80_000, "cudaMemcpyAsync": 5000}
    assert gaps.called[1] == gaps.seconds[1] == 90e-6
    assert gaps.calls[4]["cudaFree"] == 10_000


def test_without_ranges_everything_is_one_step() -> None:
    work = [Activity(5, 8, "kernel", "k", 5), Activity(10, 20, "kernel", "k", 10)]
    timeline = Timeline("", "", [], work, [])
    assert used(timeline) == {(0, STEP): [15e-9, 13e-9, 2]}
    gaps = timeline.gaps()[["start", "end", "phase"]]
    assert gaps.to_numpy().tolist() == [[8, 10, "outside"]]


def test_after_the_last_range_the_cpu_is_in_no_phase(timeline: Timeline) -> None:
    assert timeline.phase_at(999_000_000) == "outside"


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1), st.integers(0, 60))
def test_busy_time_and_gaps_add_up_to_the_step(work: list[tuple[int, int]], start: int) -> None:
    step = Range(0, STEP, start, start + 50)
    activities = [Activity(at, at + size, "kernel", "k", at) for at, size in sorted(work)]
    timeline = Timeline("", "", [step], activities, [])
    [(_, busy_seconds, _)] = used(timeline).values()
    busy = round(busy_seconds * 1e9)
    ran = {when for at, size in work for when in range(at, at + size)}
    assert busy == len(ran & {*range(step.start, step.end)})
    gaps = timeline.gaps()
    assert sum(gaps.end - gaps.start) == 50 - busy
