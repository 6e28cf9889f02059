"""Roofs that are measured: here, those of the processor that runs the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.ceilings import main, measure_ceilings
from dpbench import ConfigurationError
from dpbench.core.case import PRECISIONS
from dpbench.results.roofline import read_ceilings

FLOPS = {"fp32": 5e13, "tf32": 4e14, "bf16": 7e14}
H200 = {"device": "NVIDIA H200", "bandwidth": 4.2e12, "flops": FLOPS, "torch": "2"}


def document(tmp_path: Path, ceilings: object) -> Path:
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({"schema": 2, "rows": [], "ceilings": ceilings}))
    return path


def test_a_copy_and_a_product_at_every_precision_are_timed(tmp_path: Path) -> None:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    found = measure_ceilings("cpu", copy_bytes=2**24, matrix=64, seconds=0.01)
    assert (found["device"], found["copy_bytes"], found["matrix"]) == ("cpu", 2**24, 64)
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
    roofs = read_ceilings(document(tmp_path, found))
    assert (roofs.devices, roofs.bandwidth) == (("cpu",), found["bandwidth"])
    assert all(roofs.flops[precision] > 0 for precision in PRECISIONS)


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main() == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert (printed.out, "no CUDA GPU is visible here" in line) == ("", True)


def test_they_are_the_roofs_of_their_device_alone(tmp_path: Path) -> None:
    roofs = read_ceilings(document(tmp_path, H200))
    assert (roofs.devices, roofs.source) == (("NVIDIA H200",), "measured, torch 2")
    assert roofs.ridge("fp32") == pytest.approx(5e13 / 4.2e12)


@pytest.mark.parametrize(
    "ceilings",
    [
        {},
        {**H200, "flops": {"fp32": 1e13}},
        {**H200, "bandwidth": None},
    ],
)
def test_another_document_is_refused_by_name(ceilings: object, tmp_path: Path) -> None:
    path = document(tmp_path, ceilings)
    with pytest.raises(ConfigurationError, match=r"ceilings\.json is no file of measured ceilings"):
        read_ceilings(path)
    with pytest.raises(ConfigurationError, match=r"none\.json: No such file"):
        read_ceilings(tmp_path / "none.json")
