"""A profile's files, from what was recorded on an NVIDIA H200."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpbench import Case
from dpbench.commands.step import write_report
from dpbench.core.case import OUTSIDE
from dpbench.instruments.torch_profiler.profile_folder import (
    REPORT,
    DeviceActivityMissing,
    copy_metric,
    profile_rows,
)
from dpbench.instruments.torch_profiler.trace import read
from dpbench.results.report import CaseReport
from tests.replay_step import write_operators

DATA = Path(__file__).parents[2] / "data" / "profile"
CASE = Case("dpsgd", 4, 64, "tiny")
STANDARD = CASE.baseline


def record() -> dict[str, Any]:
    """What the measured process said of the recorded standard step, on an NVIDIA H200."""
    return json.loads((DATA / "standard" / "record.json").read_text())


def test_rows_of_a_gpu_have_time_memory_and_copies_by_phase() -> None:
    traces = [read(DATA / "standard" / "trace_0.json.gz")]
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
    rows = profile_rows(CASE, record(), [read(DATA / "dpsgd_ghost" / "trace_0.json.gz")])
    report = CaseReport.of(CASE, rows)
    assert report.value("memcpy_device_to_host_bytes", "backward") == 8
    assert report.value("memcpy_host_to_device_bytes", "backward") == 64
    assert report.value("memcpy_device_to_device_bytes", "clip") == 1_174_528


def test_a_trace_without_the_device_is_an_error_on_cuda() -> None:
    empty = read(DATA / "standard" / "trace_0.json.gz")
    empty.launches.clear()
    with pytest.raises(DeviceActivityMissing, match="no GPU activity; end other profilers"):
        list(profile_rows(STANDARD, record(), [empty]))


def test_the_report_of_a_gpu_leads_from_phases_to_operators(tmp_path: Path) -> None:
    shutil.copytree(DATA / "standard", tmp_path, dirs_exist_ok=True)
    lines = json.loads((operators := tmp_path / "operators_0.json").read_text())
    for line in lines:  # as PyTorch gave "Command Buffer Full" the time of kernels on an H200
        line["self_device_seconds"] += line["name"] == "cudaLaunchKernel"
    operators.write_text(json.dumps(lines))
    recorded = read(tmp_path / "trace_0.json.gz")
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
