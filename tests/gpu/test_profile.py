"""The PyTorch profiler on a GPU: memory snapshot, copies, and peaks by phase."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dpbench import Case
from dpbench.instruments.torch_profiler.profile_folder import SNAPSHOT
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.results.report import CaseReport

pytestmark = pytest.mark.gpu


def test_a_profile_has_copies_peaks_and_a_snapshot(tmp_path: Path) -> None:
    case = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
    report = CaseReport.of(case, TorchProfiler(tmp_path).measure(case).rows)
    copied = report.value("memcpy_device_to_device_bytes", "backward")
    assert copied == report.value("memcpy_device_to_device_bytes") > 4_000_000
    assert report.value("phase_peak_memory_bytes", "clip") > copied
    assert 0 < report.value("device_time_seconds") < report.value("cpu_time_seconds")
    with (tmp_path / case.id / SNAPSHOT).open("rb") as stream:
        snapshot = pickle.load(stream)
    frames = [frame for event in snapshot["device_traces"][0] for frame in event["frames"]]
    assert any(frame["name"] == "train_step" for frame in frames)
