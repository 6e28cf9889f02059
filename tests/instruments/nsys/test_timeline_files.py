"""Reading the SQLite files of Nsight Systems."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.instruments.nsys.timeline import (
    Activity,
    NothingTraced,
    Range,
    TimelineUnreadable,
    read_timeline,
)
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
    assert timeline.activities == [
        Activity(12_000, 15_000, 11_000),
        Activity(17_000, 18_000, 14_000),
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
    assert read.activities == plain.activities


def test_a_table_of_ranges_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = case_recording().write(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE NVTX_EVENTS_V2 (begin, end, eventType)")
        database.commit()
    with pytest.raises(TimelineUnreadable, match="NVTX_EVENTS_V2 has no start"):
        read_timeline(path)


def test_what_no_call_launched_was_launched_when_it_began(tmp_path: Path) -> None:
    made = Recording()
    made.copy(3, 4, 10)
    assert read_timeline(made.write(tmp_path / "a.sqlite")).activities == [
        Activity(3000, 4000, 3000)
    ]


def test_correlation_numbers_belong_to_a_process(tmp_path: Path) -> None:
    made = Recording()
    other = made.call("cudaLaunchKernel_v7000", 1, 2, thread=(99 << 24) + 1)
    made.kernel(5, 6, correlationId=other)
    assert read_timeline(made.write(tmp_path / "a.sqlite")).activities[0].launched == 5000


def test_of_several_gpus_the_busiest_is_read(tmp_path: Path) -> None:
    made = Recording()
    made.kernel(0, 9, deviceId=1)
    made.kernel(2, 3)
    made.kernel(4, 5)
    made.add("TARGET_INFO_GPU", id=1, name="NVIDIA H100")
    timeline = read_timeline(made.write(tmp_path / "a.sqlite"))
    assert [each.start for each in timeline.activities] == [2000, 4000]
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
