"""Busy time, gaps and launches of a timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.instruments.nsys.sqlite import read_timeline
from dpbench.results.rows import STEP
from dpbench.results.timeline import THE_END, Activity, Range, Timeline, Usage, unversioned
from tests.instruments.nsys.recording import case_recording


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return read_timeline(case_recording().write(tmp_path_factory.mktemp("nsys") / "a.sqlite"))


def test_a_phase_is_as_busy_as_something_ran_inside_its_range(timeline: Timeline) -> None:
    by_phase = {usage.phase: usage for usage in timeline.usages() if usage.step == 0}
    assert by_phase == {
        "outside": Usage(0, "outside", 10e-6, 0, 0),
        "forward": Usage(0, "forward", 200e-6, 150e-6, 2),  # two kernels at the same time
        "clip": Usage(0, "clip", 100e-6, 10e-6, 1),
    }


def test_a_whole_step_has_no_phases_of_its_own(timeline: Timeline) -> None:
    assert [usage for usage in timeline.usages() if usage.step] == [
        Usage(1, STEP, 300e-6, 160e-6, 2),
        Usage(2, STEP, 320e-6, 160e-6, 2),
    ]


def test_a_phase_that_is_entered_twice_adds_up() -> None:
    ranges = [Range(0, "clip", 0, 10), Range(0, "noise", 10, 20), Range(0, "clip", 20, 40)]
    work = [Activity(5, 8, "kernel", "k"), Activity(30, 34, "kernel", "k", 0, 21)]
    clip, noise = Timeline("", "", ranges, work, []).usages()
    assert clip == Usage(0, "clip", 30e-9, 7e-9, 2)
    assert noise == Usage(0, "noise", 10e-9, 0, 0)


def test_a_gap_says_what_the_gpu_waited_for_and_what_the_cpu_called(timeline: Timeline) -> None:
    first, middle, last = [gap for gap in timeline.gaps() if gap.step == 1]
    assert (first.seconds, first.phase) == (20e-6, "forward")
    assert first.calls == {"cudaLaunchKernel": 5000}
    assert (middle.seconds, middle.phase) == (90e-6, "clip")
    assert middle.waited_for == "memcpy Device-to-Device"
    assert middle.calls == {"cudaMemcpyAsync": 5000}
    assert (last.seconds, last.waited_for) == (30e-6, THE_END)
    assert last.calls == {"cudaDeviceSynchronize": 29_000}
    assert last.call_seconds == 29e-6


def test_calls_count_where_they_overlap_a_gap(tmp_path: Path) -> None:
    made = case_recording()
    made.call("cudaMalloc", 1100, 1200)  # the gap begins at 1170
    made.call("cudaFree", 1180, 2180)  # and the next step's at 2170
    gaps = read_timeline(made.write(tmp_path / "a.sqlite")).gaps()
    assert gaps[1].calls == {"cudaMalloc": 30_000, "cudaFree": 80_000, "cudaMemcpyAsync": 5000}
    assert gaps[1].call_seconds == gaps[1].seconds == 90e-6
    assert gaps[4].calls["cudaFree"] == 10_000


def test_without_ranges_everything_is_one_step() -> None:
    work = [Activity(5, 8, "kernel", "k"), Activity(10, 20, "kernel", "k")]
    timeline = Timeline("", "", [], work, [])
    assert timeline.usages() == [Usage(0, STEP, 15e-9, 13e-9, 2)]
    assert [(gap.start, gap.end, gap.phase) for gap in timeline.gaps()] == [(8, 10, "outside")]


def test_what_was_launched_in_a_range_is_found_wherever_it_ran(timeline: Timeline) -> None:
    names = [each.kind for each in timeline.during(timeline.whole_steps)]
    assert names == ["kernel", "memcpy"] * 2
    assert timeline.phase_at(999_000_000) == "outside"


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1), st.integers(0, 60))
def test_busy_time_and_gaps_add_up_to_the_step(work: list[tuple[int, int]], start: int) -> None:
    step = Range(0, STEP, start, start + 50)
    activities = [Activity(at, at + size, "kernel", "k") for at, size in sorted(work)]
    timeline = Timeline("", "", [step], activities, [])
    [usage] = timeline.usages()
    busy = round(usage.busy_seconds * 1e9)
    ran = {when for at, size in work for when in range(at, at + size)}
    assert busy == len(ran & {*range(step.start, step.end)})
    assert sum(gap.end - gap.start for gap in timeline.gaps()) == 50 - busy


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync_ptsz"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx"),
    ],
)
def test_a_call_is_named_without_its_version(name: str, plain: str) -> None:
    assert unversioned(name) == plain
