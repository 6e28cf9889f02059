"""Reading the SQLite files of Nsight Systems."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.instruments.nsys.timeline import (
    NothingTraced,
    Range,
    Timeline,
    TimelineUnreadable,
    read_timeline,
)
from dpbench.results.rows import STEP
from tests.instruments.nsys.recording import Recording, case_recording


def test_ranges_and_activities_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    made = Recording()
    made.range("dpbench:0.forward", 10, 20)
    made.range("unused", 0, 10, textId=None, text="dpbench:0.outside")
    made.memset(17, 18, 64, launched=14)
    made.kernel(12, 15, launched=11)
    timeline = read_timeline(made.write(tmp_path / "a.sqlite"))
    assert (timeline.device, timeline.tool) == ("NVIDIA H200", "nsys 2022.4.2.1")
    assert timeline.ranges == [
        Range(0, "outside", 0, 10_000),
        Range(0, "forward", 10_000, 20_000),
    ]
    assert timeline.activities.to_numpy().tolist() == [
        [12_000, 15_000, 11_000],
        [17_000, 18_000, 14_000],
    ]


def test_ranges_of_others_or_without_an_end_are_left_out(tmp_path: Path) -> None:
    made = case_recording()
    made.range("dpbench:3.forward", 10, 20, eventType=59)  # push/pop
    ranges = read_timeline(made.write(tmp_path / "a.sqlite")).ranges
    assert {each.step for each in ranges} == {0, 1, 2}


def test_tables_are_read_whatever_their_version(tmp_path: Path) -> None:
    plain = read_timeline(case_recording().write(tmp_path / "plain.sqlite"))
    path = case_recording().write(tmp_path / "versions.sqlite")
    with closing(sqlite3.connect(path)) as database:
        for name, version in (("NVTX_EVENTS", 10), ("CUPTI_ACTIVITY_KIND_KERNEL", 3)):
            database.execute(f"ALTER TABLE {name} RENAME TO {name}_V{version}")
        database.execute("CREATE TABLE NVTX_EVENTS_V2 (start, end)")
        database.commit()
    read = read_timeline(path)
    assert {each.phase for each in read.ranges} == {"step", "outside", "forward", "clip"}
    assert read.ranges == plain.ranges
    assert read.activities.equals(plain.activities)


def test_what_no_call_launched_was_launched_when_it_began(tmp_path: Path) -> None:
    made = Recording()
    made.copy(3, 4, 10)
    timeline = read_timeline(made.write(tmp_path / "a.sqlite"))
    assert timeline.activities.to_numpy().tolist() == [[3000, 4000, 3000]]


def test_correlation_numbers_belong_to_a_process(tmp_path: Path) -> None:
    made = Recording()
    other = made.call("cudaLaunchKernel_v7000", 1, 2, thread=(99 << 24) + 1)
    made.kernel(5, 6, correlationId=other)
    assert read_timeline(made.write(tmp_path / "a.sqlite")).activities.launched[0] == 5000


def test_of_several_gpus_the_busiest_is_read(tmp_path: Path) -> None:
    made = Recording()
    made.kernel(0, 9, deviceId=1)
    made.kernel(2, 3)
    made.kernel(4, 5)
    made.add("TARGET_INFO_GPU", id=1, name="NVIDIA H100")
    timeline = read_timeline(made.write(tmp_path / "a.sqlite"))
    assert timeline.activities.start.tolist() == [2000, 4000]
    assert timeline.device == "a GPU"


def test_a_timeline_without_work_says_what_nsys_noticed(tmp_path: Path) -> None:
    made = Recording()
    made.range("dpbench:0.forward", 0, 10)
    made.add("DIAGNOSTIC_EVENT", severity=3, text="CUDA profiling might have not been started")
    with pytest.raises(NothingTraced, match=r"no kernel.*profiling might have not"):
        read_timeline(made.write(tmp_path / "a.sqlite"))


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough " * 40])
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a #%20 b.sqlite"
    path.write_bytes(content)
    with pytest.raises(TimelineUnreadable, match=r"a #%20 b.sqlite is not an SQLite file that Ns"):
        read_timeline(path)


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TimelineUnreadable, match="unable to open"):
        read_timeline(tmp_path / "none.sqlite")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return read_timeline(case_recording().write(tmp_path_factory.mktemp("nsys") / "a.sqlite"))


def activities(*times: tuple[int, int, int]) -> pd.DataFrame:
    """Start, end and launch of each activity."""
    return pd.DataFrame(times, columns=["start", "end", "launched"])


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
    work = activities((5, 8, 5), (30, 34, 21))
    assert used(Timeline("", "", ranges, work)) == {
        (0, "clip"): [30e-9, 7e-9, 2],
        (0, "noise"): [10e-9, 0, 0],
    }


def test_without_ranges_everything_is_one_step() -> None:
    work = activities((5, 8, 5), (10, 20, 10))
    assert used(Timeline("", "", [], work)) == {(0, STEP): [15e-9, 13e-9, 2]}


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1), st.integers(0, 60))
def test_busy_is_when_anything_ran_in_the_step(work: list[tuple[int, int]], start: int) -> None:
    step = Range(0, STEP, start, start + 50)
    times = [(at, at + size, at) for at, size in sorted(work)]
    timeline = Timeline("", "", [step], activities(*times))
    [(_, busy_seconds, _)] = used(timeline).values()
    busy = round(busy_seconds * 1e9)
    ran = {when for at, size in work for when in range(at, at + size)}
    assert busy == len(ran & {*range(step.start, step.end)})
