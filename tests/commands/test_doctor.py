"""``dpbench doctor``: its checks of the machine that runs the tests, and its command."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dpbench import ConfigurationError
from dpbench.commands import doctor
from dpbench.commands.cli import main
from dpbench.commands.doctor import FAILED, OK, WARNING, Check, Diagnosis, examine
from dpbench.core.errors import CaseFailed, CaseTimedOut
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
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
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [H200])


def test_packages_are_listed_with_their_versions() -> None:
    found = only(doctor.packages)
    assert found.status == OK
    assert f"python {platform.python_version()}" in found.detail
    for name in ("torch", "opacus", "pytest", "pytest-xdist", "pandas", "ncu-report", "nvtx"):
        assert f"{name} {metadata.version(name)}" in found.detail


def test_what_is_missing_or_too_old_is_named_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = ["torch>=99", "no-such-package>=1", "hypothesis>=99; extra == 'test'", "pytest>=8"]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    *wrong, listed = doctor.packages(Settings())
    assert listed.status == OK
    assert "pytest" in listed.detail
    assert [(f.status, f.remedy) for f in wrong] == [
        (FAILED, "pip install 'torch>=99'"),
        (FAILED, "pip install 'no-such-package>=1'"),
    ]
    assert "torch" in wrong[0].detail
    assert wrong[1].detail == "no-such-package is missing, but no-such-package>=1 is required"


def test_a_report_directory_that_is_missing_is_not_made(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "down"
    found = only(doctor.directories, Settings(ncu_dir=wanted))
    assert found.status == OK
    assert not (tmp_path / "deep").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_check_says_why_and_what_works_anyway() -> None:
    found = only(doctor.gpu)
    assert found.status == WARNING
    assert "CUDA_VISIBLE_DEVICES is ''" in found.detail
    assert "without a GPU, bytes, arithmetic and peak memory are counted" in found.remedy
    assert "with a GPU" in found.remedy


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_named_with_memory_and_driver() -> None:
    found = only(doctor.gpu)
    assert found.detail == "NVIDIA H200, 150.8 GB, driver 580.159.04, GPU-0"


def test_another_process_on_the_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [replace(H200, processes=(17, 42))])
    _, found = doctor.gpu(Settings())
    assert (found.status, found.detail) == (WARNING, "GPU-0 is used by process 17, 42")


@pytest.mark.usefixtures("one_gpu")
def test_torch_that_cannot_use_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = only(doctor.torch)
    assert found.status == FAILED
    assert "cannot use the GPU" in found.detail


@pytest.mark.usefixtures("one_gpu")
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
    found = only(doctor.ncu, Settings(own={"ncu_path": path}))
    assert found.status == status
    assert words in found.detail
    assert path in found.detail


def works(setup: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("works", OK, "fine")


def falls_over(setup: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("falls over", OK, "so far")
    raise ZeroDivisionError("in a driver")


def test_what_breaks_one_check_hides_no_other() -> None:
    found = list(examine(Settings(), [works, falls_over, works]))
    assert [(f.check, f.status) for f in found] == [
        ("works", OK),
        ("falls over", OK),
        ("falls over", FAILED),
        ("works", OK),
    ]
    assert found[2].detail == "ZeroDivisionError: in a driver"


def test_the_finding_of_an_error_keeps_its_remedy_apart() -> None:
    error = CaseTimedOut("ncu did not finish within 9 s", log=Path("dir/x.log"))
    found = Diagnosis.from_error("profiling", error)
    assert found.detail == "ncu did not finish within 9 s (log: dir/x.log)"
    assert found.remedy == CaseTimedOut.remedy


def test_an_error_without_a_remedy_is_told_whole() -> None:
    assert Diagnosis.from_error("x", CaseFailed("it fell over")).detail == "it fell over"
    assert Diagnosis.from_error("x", ConfigurationError("no; not so")).detail == "no; not so"


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_passes_if_counting_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", "--ncu-path", "/nowhere/ncu"]) == 0
    said = json.loads(capsys.readouterr().out)
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    assert said["ok"] is True
    checked = ("packages", "logical counting", "directories", "torch")
    assert status == {**dict.fromkeys(checked, "ok"), "gpu": "warning"}
    assert not list(tmp_path.iterdir())


def test_no_failure_is_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = Diagnosis("gpu", OK, "there"), Diagnosis("ncu", "warning", "new", "upgrade")
    monkeypatch.setattr("dpbench.commands.doctor.examine", lambda _: iter(fine))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      gpu                  there",
        "warning ncu                  new",
        "                           > upgrade",
    ]
