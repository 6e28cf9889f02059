"""Reading traces: those of the tiny model on an NVIDIA H200, and what can be wrong with one."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.cli import main
from dpbench.commands.step import write_report
from dpbench.core.case import MODEL_SIZES, OUTSIDE, Case
from dpbench.instruments.torch_profiler.profile_folder import (
    REPORT,
    DeviceActivityMissing,
    Trace,
    TraceUnreadable,
    copy_metric,
    profile_rows,
    read_trace,
)
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP
from dpbench.results.schema import parsed
from tests.replay_step import write_operators

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
    return read_trace(DATA / trainer / "trace_0.json.gz")


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
        for row in profile_rows(Case("standard", 4, 64, "tiny"), record, [read_trace(path)])
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
    return read_trace(path)


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
        read_trace(path)


def test_a_trace_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    whole = (DATA / "standard" / "trace_0.json.gz").read_bytes()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceUnreadable, match=r"profile the case again"):
        read_trace(path)


CASE = Case("dpsgd", 4, 64, "tiny")
STANDARD = CASE.baseline


def record() -> dict[str, Any]:
    """What the measured process said of the recorded standard step, on an NVIDIA H200."""
    return json.loads((DATA / "standard" / "record.json").read_text())


def test_rows_of_a_gpu_have_time_memory_and_copies_by_phase() -> None:
    traces = [read_trace(DATA / "standard" / "trace_0.json.gz")]
    report = CaseReport.of(STANDARD, profile_rows(STANDARD, record(), traces))
    assert report.value("device_time_seconds") == pytest.approx(466.6e-6, rel=1e-3)
    assert report.value("device_time_seconds", OUTSIDE) == 0
    assert report.value("phase_peak_memory_bytes", "forward") == 73_651_200
    assert report.value("phase_peak_memory_bytes") == 74_675_200
    assert report.value("memset_bytes") == report.value("memset_bytes", "forward") == 1024
    assert report.value("memcpy_device_to_device_bytes") == 0
    assert {row.device for row in profile_rows(STANDARD, record(), traces)} == {"NVIDIA H200"}


def test_copies_of_each_kind_have_a_metric_of_their_own() -> None:
    assert copy_metric("Memcpy DtoH (Device -> Pageable)") == "memcpy_device_to_host_bytes"
    assert copy_metric("Memcpy HtoD (Pinned -> Device)") == "memcpy_host_to_device_bytes"
    assert copy_metric("Memcpy PtoP (Device -> Device)") == "memcpy_other_bytes"
    rows = profile_rows(CASE, record(), [read_trace(DATA / "dpsgd_ghost" / "trace_0.json.gz")])
    report = CaseReport.of(CASE, rows)
    assert report.value("memcpy_device_to_host_bytes", "backward") == 8
    assert report.value("memcpy_host_to_device_bytes", "backward") == 64
    assert report.value("memcpy_device_to_device_bytes", "clip") == 1_174_528


def test_a_trace_without_the_device_is_an_error_on_cuda() -> None:
    empty = read_trace(DATA / "standard" / "trace_0.json.gz")
    empty.launches.clear()
    with pytest.raises(DeviceActivityMissing, match="no GPU activity; end other profilers"):
        list(profile_rows(STANDARD, record(), [empty]))


def test_the_report_of_a_gpu_leads_from_phases_to_operators(tmp_path: Path) -> None:
    shutil.copytree(DATA / "standard", tmp_path, dirs_exist_ok=True)
    lines = json.loads((operators := tmp_path / "operators_0.json").read_text())
    for line in lines:  # as PyTorch gave "Command Buffer Full" the time of kernels on an H200
        line["self_device_seconds"] += line["name"] == "cudaLaunchKernel"
    operators.write_text(json.dumps(lines))
    recorded = read_trace(tmp_path / "trace_0.json.gz")
    rows = list(profile_rows(STANDARD, record(), [recorded]))
    write_operators(tmp_path, recorded.calls, threshold=0.05)
    write_report(tmp_path, rows, record()["schedule"], tmp_path)
    text = (tmp_path / REPORT).read_text(encoding="utf-8")
    sections = [
        "standard, tiny fp32, batch 4, sequence 64, NVIDIA H200: PyTorch profiler, per step",
        "CPU time ÷ GPU time: 13.",
        "Bottlenecks: operators that take 0.05 ms or more per step on the GPU",
        "Sums over 1 recorded steps.",
        "Operators by GPU time",
        "Operators and CUDA calls by CPU time",
        "Operators by GPU memory",
        "Operators and input shapes by GPU time",
    ]
    positions = [text.find(section) for section in sections]
    assert -1 not in positions
    assert positions == sorted(positions)
    by_gpu_time = text[positions[4] : positions[5]].splitlines()[4:]
    assert by_gpu_time[0].split()[0] == "aten::mm"
    assert "Self CUDA time total: 4" in text[positions[4] : positions[5]]
    assert "cudaLaunchKernel" not in text[: positions[5]]
    assert "cudaLaunchKernel" in text[positions[5] : positions[6]]
    slow = [line.split() for line in text[positions[2] : positions[3]].splitlines()[1:] if line]
    assert slow[0][-1] == "aten::mm"
    assert all(float(line[0]) >= 0.05 for line in slow)


def profiled(path: Path, events: list[dict[str, Any]], device: str) -> CaseReport:
    """The report of a step that has phases forward, from 0 to 100 µs, and backward, to 200."""
    said = {"cat": "user_annotation", "ts": 0, "dur": 100, "tid": 1}
    phases = [
        {**said, "name": "ProfilerStep#0", "dur": 200},
        {**said, "name": "dpbench.forward"},
        {**said, "name": "dpbench.backward", "ts": 100.001},
    ]
    with gzip.open(path / "t.json.gz", "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": [*phases, *events]}, stream)
    record = {"device": device, "torch": "2"}
    return CaseReport.of(STANDARD, profile_rows(STANDARD, record, [read_trace(path / "t.json.gz")]))


def microseconds(report: CaseReport, metric: str, phase: str = STEP) -> float:
    return round(report.value(metric, phase) * 1e6, 3)


def test_nccl_is_exposed_where_no_other_kernel_runs(tmp_path: Path) -> None:
    """It belongs to the phase that launched it, and two at once take their time once."""
    launched = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 150, "dur": 1, "tid": 1}
    reduce = {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"}
    events = [
        {**launched, "args": {"correlation": 7}},
        {**reduce, "ts": 210, "dur": 40, "args": {"correlation": 7}},
        {**reduce, "ts": 240, "dur": 20, "args": {"correlation": 7}},
        {"cat": "kernel", "name": "void gemm()", "ts": 200, "dur": 20},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 215, "dur": 10},
        {"cat": "kernel", "name": "void gemm()", "ts": 255, "dur": 50},
    ]
    report = profiled(tmp_path, events, "NVIDIA H200")
    assert microseconds(report, "communication_seconds", "backward") == 50
    assert microseconds(report, "communication_seconds") == 50
    assert microseconds(report, "exposed_communication_seconds", "backward") == 30
    assert report.value("exposed_communication_share") == pytest.approx(0.6)


def test_gloo_is_exposed_where_no_operator_runs_but_its_own(tmp_path: Path) -> None:
    events = [
        {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": 50, "dur": 40, "tid": 2},
        {"cat": "user_annotation", "name": "gloo:all_gather", "ts": 120, "dur": 10, "tid": 3},
        {"cat": "cpu_op", "name": "aten::copy_", "ts": 60, "dur": 20, "tid": 3},
        {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 40, "dur": 60, "tid": 1},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 40, "dur": 30, "tid": 1},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 125, "dur": 30, "tid": 4},
    ]
    report = profiled(tmp_path, events, "cpu")
    assert microseconds(report, "communication_seconds", "forward") == 40
    assert microseconds(report, "exposed_communication_seconds", "forward") == 20
    assert microseconds(report, "communication_seconds", "backward") == 10
    assert microseconds(report, "exposed_communication_seconds") == 25


# --- for real: gloo, on the CPU --------------------------------------------------------------

RUN = ["run", "--instrument=torch_profiler", "--device=cpu", "--seq-len=8", "--batch-size=4"]
RUN += ["--model-size=99x16x1x2", "--parallel=ddp", "--gpus=2"]


LINE = re.compile(r"^([01])" + r" +([\d.]+)" * 4 + "$", re.MULTILINE)
"""Of the table by rank: CPU, in collectives, exposed, waited ms."""


@pytest.mark.slow
def test_a_rank_that_comes_last_has_waited_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = "tests.launch.failing_ranks:ComesLast"
    assert main([*RUN, f"--trainer={trainer}", "--json=run.json"]) == 0
    waited = {rank: float(ms) for rank, *_, ms in LINE.findall(capsys.readouterr().out)}
    assert waited["0"] > waited["1"]
    rows = parsed(Path("run.json").read_bytes())["rows"]
    spent = {
        row["rank"]: row["value"]
        for row in rows
        if (row["metric"], row["phase"]) == ("communication_seconds", STEP)
    }
    assert spent[0] > spent[1]
    [report] = Path("runs").glob("*/report.txt")
    assert "by rank, per step" in report.read_text()
    traces = report.parent.glob("*/trace_0.json.gz")
    assert {path.parent.name for path in traces} == {"rank0", "rank1"}
