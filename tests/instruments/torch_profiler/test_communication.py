"""How long ranks are in collectives, and what runs beside: by gloo's spans, NCCL's kernels."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.instruments.torch_profiler.profile_folder import profile_rows
from dpbench.instruments.torch_profiler.trace import read
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP

CASE = Case("standard", 4, 64, "tiny")


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
    return CaseReport.of(CASE, profile_rows(CASE, record, [read(path / "t.json.gz")]))


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
    rows = json.loads(Path("run.json").read_bytes())["rows"]
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
