"""Reading traces: those of the tiny model on an NVIDIA H200, and what can be wrong with one."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import MODEL_SIZES, OUTSIDE, Case
from dpbench.instruments.torch_profiler.profile_folder import profile_rows
from dpbench.instruments.torch_profiler.trace import Trace, TraceUnreadable, read

DATA = Path(__file__).parents[2] / "data" / "profile"
FLOAT = 4
KERNELS = {
    "standard": {"forward": 51, "backward": 82, "optimizer": 1},
    "dpsgd": {"forward": 51, "backward": 188, "clip": 80, "noise": 148, "optimizer": 1},
    "dpsgd_ghost": {"forward": 58, "backward": 474, "noise": 148, "optimizer": 2},
}
"""What Nsight Compute counted in the same phases of the same case, in another process."""


@cache
def recorded(trainer: str) -> Trace:
    return read(DATA / trainer / "trace_0.json.gz")


def parameters() -> int:
    """Of the tiny model, with a position table for 1 024 positions."""
    size = MODEL_SIZES["tiny"]
    block = 12 * size.hidden**2 + 13 * size.hidden
    return 2 * size.vocabulary * size.hidden + 1024 * size.hidden + 2 * block + 2 * size.hidden


@pytest.mark.parametrize("trainer", KERNELS)
def test_kernels_belong_to_the_phase_that_launched_them(trainer: str) -> None:
    launches = recorded(trainer).launches
    kernels = Counter(launch.phase for launch in launches if launch.kind == "kernel")
    assert kernels == KERNELS[trainer]


def test_memory_grows_to_the_peaks_that_the_allocator_saw() -> None:
    record = json.loads((DATA / "standard" / "record.json").read_text())
    (growth,) = recorded("standard").memory_growth
    (before,) = recorded("standard").memory_before
    (peaks,) = record["phase_peaks"]
    assert {phase: before + grown for phase, grown in growth.items()} == peaks
    assert before > FLOAT * parameters()


STEPS = (
    [("forward", 70), ("backward", -20)],
    [(OUTSIDE, -60), ("forward", 10), ("backward", 20), ("forward", -5), ("backward", 8)],
)
"""Phases of two steps, and by how much the memory in use changes in the middle of each."""


def test_peaks_are_right_of_steps_that_free_before_they_take(tmp_path: Path) -> None:
    """Scripts free the last step's gradients first; micro-batches come to a phase twice."""
    events = [{"cat": "kernel", "name": "void sum()", "ts": 1, "dur": 1}]
    now, level = 0, 100
    for step, phases in enumerate(STEPS):
        mark = {"cat": "user_annotation", "dur": 9}
        events.append({**mark, "name": f"ProfilerStep#{step}", "ts": now})
        for phase, change in phases:
            level += change
            args = {"Device Type": 1, "Bytes": change, "Total Allocated": level}
            events.append({**mark, "name": f"dpbench.{phase}", "ts": now})
            memory = {"cat": "cpu_instant_event", "name": "[memory]", "ts": now + 5, "args": args}
            events.append(memory)
            now += 10
    path = tmp_path / "trace_0.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": events}, stream)
    record = {"device": "a GPU", "torch": "2"}
    value = {
        (row.repeat, row.metric, row.phase): row.value
        for row in profile_rows(Case("standard", 4, 64, "tiny"), record, [read(path)])
        if "memory" in row.metric
    }
    peak, growth = "phase_peak_memory_bytes", "memory_growth_bytes"
    assert value == {
        **{(0, peak, phase): 170 for phase in ("forward", "backward", "step")},
        **{(0, growth, phase): 70 for phase in ("forward", "backward", "step")},
        **{(1, peak, phase): 150 for phase in (OUTSIDE, "step")},
        (1, peak, "forward"): 120,
        (1, peak, "backward"): 123,
        **{(1, growth, phase): 0 for phase in (OUTSIDE, "forward", "backward", "step")},
    }


def test_phases_take_the_time_of_the_training_thread() -> None:
    (seconds,) = recorded("standard").cpu_seconds
    assert set(seconds) == {"forward", "backward", "optimizer", OUTSIDE}
    assert seconds["backward"] == pytest.approx(3.854e-3, rel=1e-3)


@cache
def events() -> list[dict[str, Any]]:
    with gzip.open(DATA / "dpsgd" / "trace_0.json.gz", "rb") as stream:
        return json.load(stream)["traceEvents"]


def rewritten(path: Path, keep: Callable[[dict[str, Any]], bool]) -> Trace:
    """A recorded trace without some of its events."""
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": [event for event in events() if keep(event)]}, stream)
    return read(path)


def test_what_was_launched_outside_every_phase_is_not_dropped(tmp_path: Path) -> None:
    found = rewritten(tmp_path / "t.json.gz", lambda e: e["name"] != "dpbench.clip")
    phases = Counter(launch.phase for launch in found.launches if launch.kind == "kernel")
    assert phases[OUTSIDE] == KERNELS["dpsgd"]["clip"]
    assert phases.total() == sum(KERNELS["dpsgd"].values())


def test_the_trace_of_another_program_is_outside_every_phase(tmp_path: Path) -> None:
    found = rewritten(tmp_path / "t.json.gz", lambda e: e.get("cat") != "user_annotation")
    assert {(launch.repeat, launch.phase) for launch in found.launches} == {(0, OUTSIDE)}
    assert len(found.launches) == len(recorded("dpsgd").launches)


def test_a_kernel_whose_launch_was_not_recorded_is_not_dropped(tmp_path: Path) -> None:
    found = rewritten(tmp_path / "t.json.gz", lambda e: e.get("cat") != "cuda_runtime")
    assert len(found.launches) == len(recorded("dpsgd").launches)


DAMAGED = [
    b'{"traceEvents": 5}',
    b'{"traceEvents": [1, 2]}',
    b'{"traceEvents": [{"cat": "kernel"}]}',
]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', *DAMAGED])
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace_0.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(TraceUnreadable, match=r"trace_0.json.gz cannot be read as a trace"):
        read(path)


def test_a_trace_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    whole = (DATA / "standard" / "trace_0.json.gz").read_bytes()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceUnreadable, match=r"profile the case again"):
        read(path)
