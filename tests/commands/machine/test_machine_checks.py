"""Checks of what is installed and attached, on the machine that runs the tests."""

from __future__ import annotations

import os
import platform
import select
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dpbench.commands.machine import checks
from dpbench.commands.machine.calibration import FAILED, OK, WARNING, Diagnosis
from dpbench.commands.machine.checks import Check
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments.ncu.ncu import NcuNotFound
from dpbench.launch import processes
from tests.programs import program

H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04")


def only(check: Check, setup: Settings | None = None) -> Diagnosis:
    [finding] = check(setup or Settings())
    return finding


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: [H200])


def test_packages_are_listed_with_their_versions() -> None:
    found = only(checks.packages)
    assert found.status == OK
    assert f"python {platform.python_version()}" in found.detail
    for name in ("torch", "opacus", "pytest", "pytest-xdist", "pandas", "ncu-report", "nvtx"):
        assert f"{name} {metadata.version(name)}" in found.detail


def test_what_is_missing_or_too_old_is_named_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = ["torch>=99", "no-such-package>=1", "hypothesis>=99; extra == 'test'", "pytest>=8"]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    *wrong, listed = checks.packages(Settings())
    assert listed.status == OK
    assert "pytest" in listed.detail
    assert [(f.status, f.remedy) for f in wrong] == [
        (FAILED, "pip install 'torch>=99'"),
        (FAILED, "pip install 'no-such-package>=1'"),
    ]
    assert "torch" in wrong[0].detail
    assert wrong[1].detail == "no-such-package is missing, but no-such-package>=1 is required"


def test_logical_counting_really_counts() -> None:
    found = only(checks.logical_counting)
    assert found.status == OK
    assert "dpsgd" in found.detail


def test_a_report_directory_that_is_missing_is_not_made(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "down"
    found = only(checks.directories, Settings(ncu_dir=wanted))
    assert found.status == OK
    assert not (tmp_path / "deep").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(Exception, match="cannot be written"):
        only(checks.directories, Settings(ncu_dir=tmp_path))


def test_a_file_in_the_place_of_the_report_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="file"):
        only(checks.directories, Settings(ncu_dir=tmp_path / "file"))


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_check_says_why_and_what_works_anyway() -> None:
    found = only(checks.gpu)
    assert found.status == FAILED
    assert "CUDA_VISIBLE_DEVICES is ''" in found.detail
    assert "logical bytes can be counted" in found.remedy


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_named_with_memory_and_driver() -> None:
    found = only(checks.gpu)
    assert found.detail == "NVIDIA H200, 150.8 GB, driver 580.159.04, GPU-0"


def test_another_process_on_the_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: [replace(H200, processes=(17, 42))])
    _, found = checks.gpu(Settings())
    assert (found.status, found.detail) == (WARNING, "GPU-0 is used by process 17, 42")


@pytest.mark.usefixtures("no_gpu")
def test_torch_without_cuda_is_right_where_there_is_no_gpu() -> None:
    found = only(checks.torch)
    assert found.status == OK
    assert torch.__version__ in found.detail


@pytest.mark.usefixtures("one_gpu")
def test_torch_that_cannot_use_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = only(checks.torch)
    assert found.status == FAILED
    assert "cannot use the GPU" in found.detail


def test_a_missing_ncu_fails() -> None:
    with pytest.raises(NcuNotFound):
        only(checks.ncu, Settings(own={"ncu_path": "/nowhere/ncu"}))


@pytest.mark.parametrize(
    ("says", "status", "words"),
    [
        ("Version 2025.3.1.0 (build 1)", OK, "2025.3.1, "),
        ("Version 2999.1.0.0 (build 1)", WARNING, "is older"),
        ("some other program", FAILED, "is unknown"),
    ],
)
def test_ncu_is_named_with_its_version(says: str, status: str, words: str, tmp_path: Path) -> None:
    path = str(program(tmp_path / "ncu", f"print({says!r})"))
    found = only(checks.ncu, Settings(own={"ncu_path": path}))
    assert found.status == status
    assert words in found.detail
    assert path in found.detail


def test_a_hung_ncu_is_ended_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVIDIA's own, this ncu is a script that starts another program."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\nexec 9>'{tmp_path}/alive'\nsleep 100\n")
    path.chmod(0o755)
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.3)
    assert only(checks.ncu, Settings(own={"ncu_path": str(path)})).status == FAILED
    readable, _, _ = select.select([alive], [], [], 30)
    assert readable, "a process still holds the pipe open"
    assert os.read(alive, 1) == b""
    os.close(alive)
