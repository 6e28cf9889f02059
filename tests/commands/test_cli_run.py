"""``dpbench run``, as a person types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.gpu import Gpu
from dpbench.results.schema import parsed
from tests.commands import test_cli
from tests.commands.test_cli import PATIENCE, REPLAYED, TINY

elsewhere = test_cli.elsewhere  # a fixture
ON_CPU = ["run", "--instrument", "timing", "--device", "cpu", "--warmup", "0", "--active", "2"]

WITH_A_GPU = """
import sys
import dpbench.core.gpu
from dpbench.commands.cli import main

def one_gpu():
    return [dpbench.core.gpu.Gpu("GPU-0", "NVIDIA H200", None, "580.159.03")]

dpbench.core.gpu.visible_gpus = one_gpu
sys.exit(main())
"""


def cases_of(path: Path) -> dict[str, str | None]:
    return {case["trainer"]: case["error"] for case in parsed(path.read_bytes())["cases"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer = [", "grid file bad.toml: "),
        ("trainer = 'dpsgd'\nbatch = 4", "unknown key 'batch'; choose from trainer, batch_size"),
        ("trainer = 'dpsgd'", "missing batch_size, seq_len"),
    ],
)
def test_a_malformed_grid_file_is_named_with_its_key(
    elsewhere: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text(text)
    assert main(["run", "--grid", "bad.toml"]) == 2
    shown = capsys.readouterr().err
    assert "grid file bad.toml: " in shown
    assert words in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer=dpsgd:max_grad_norm=-1"], "max_grad_norm is -1, and must be finite and above"),
        (["--trainer=dpsgd", "--optimizer=adamw:weight_decay=-1"], "Invalid weight_decay value"),
        (
            ["--trainer=outside:Doubling:learning_rate=x"],
            "parameter learning_rate of trainer Doubling must be a number, not 'x'",
        ),
        (
            ["--trainer=standard", "--workload=layer", "--set=width=0"],
            "width must be a positive integer, not 0",
        ),
    ],
)
def test_wrong_value_of_a_parameter_is_refused_before_anything_runs(
    elsewhere: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--instrument=logical", "--batch-size=4", *options, "--json=run.json"]
    assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert not Path("run.json").exists()


def test_run_measures_a_grid_file_and_writes_what_it_shows(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With an outside trainer and model, on the CPU."""
    Path("mine.toml").write_text(
        "trainer = 'mine=outside:Doubling'\n"
        "model = 'narrow=outside:NarrowModel'\n"
        "batch_size = 4\nseq_len = 16\nmodel_size = 'tiny'\n"
    )
    outputs = ["--json=out/run.json", "--markdown=out/run.md"]
    assert main([*ON_CPU, "--grid=mine.toml", *outputs]) == 0
    rows = parsed(Path("out/run.json").read_bytes())["rows"]
    assert {row["metric"] for row in rows} == {"step_time_seconds", "samples_per_second"}
    assert {row["device"] for row in rows} == {"cpu"}
    assert {row["repeat"] for row in rows} == {0, 1}
    assert {"forward", "backward", "optimizer"} < {row["phase"] for row in rows}
    assert {(row["trainer"], row["model"]) for row in rows} == {("mine", "narrow")}
    assert cases_of(Path("out/run.json")) == {"mine": None}
    shown = capfd.readouterr()
    assert "tiny fp32, narrow, batch 4, sequence 16, cpu" in shown.out
    assert "### tiny fp32, narrow, batch 4, sequence 16, cpu" in Path("out/run.md").read_text()
    assert shown.err.count("$ env ") == 1  # its process, as a command to paste


def test_without_trainers_a_run_counts_all_methods_and_leaves_no_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = ["--batch-size=2", "--seq-len=8", "--model-size=50x16x1x2"]
    assert main(["run", *small, "--json=run.json"]) == 0
    methods = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc", "fused")
    assert cases_of(Path("run.json")) == dict.fromkeys(methods)
    assert not Path("ncu_reports").exists()


def test_without_a_gpu_a_run_counts_logical_bytes_and_says_so(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    trainers = ["--trainer=standard", "--trainer=dpsgd"]
    assert main(["run", *TINY, *trainers, "--json=run.json"]) == 0
    shown = capsys.readouterr()
    assert "this machine has no CUDA GPU, so logical bytes are counted" in shown.err
    assert "tiny fp32, batch 4, sequence 16, logical (no hardware): MB per step" in shown.out
    assert "DRAM" not in shown.out
    rows = parsed(Path("run.json").read_bytes())["rows"]
    assert {row["instrument"] for row in rows} == {"logical"}
    assert {row["device"] for row in rows} == {"logical (no hardware)"}


def test_failures_of_every_kind_leave_the_other_cases_running(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu("GPU-0", "NVIDIA H200", None, "580.159.03")]
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: gpus)
    names = ["Crashing", "Greedy"]
    trainers = [f"--trainer=outside:{name}" for name in names]
    assert main([*REPLAYED, *trainers, "--trainer=standard"]) == 1
    assert cases_of(Path("run.json")) == {
        "Crashing": "CaseFailed",
        "Greedy": "CaseOutOfMemory",
        "standard": None,
    }
    summary = parsed(Path("run.json").read_bytes())["summary"]
    assert {line["trainer"]: line["success_rate"] for line in summary} == {
        **dict.fromkeys(names, 0.0),
        "standard": 1.0,
    }
    trainers = [f"--trainer=outside:{name}" for name in ("Hanging", "Crashing")]
    assert main([*REPLAYED, *trainers, "--timeout=0.5"]) == 1
    assert cases_of(Path("run.json")).keys() == {"Hanging", "Crashing"}
    assert "did not finish within 0.5 s" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_told_to_end_keeps_what_it_has_and_leaves_no_process(
    elsewhere: Path,
) -> None:
    """Of Ctrl-C, see `test_endings.py`."""
    command = [sys.executable, "-c", WITH_A_GPU, *REPLAYED]
    command += ["--trainer", "standard", "--trainer", "outside:Hanging"]
    with Path("err").open("w") as stream:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream)
    log = Path("ncu_reports/tiny-fp32/report_Hanging_bs4_seq64.log")
    deadline = time.monotonic() + PATIENCE
    while not (log.exists() and "dpbench: measuring" in log.read_text()):
        assert process.poll() is None, Path("err").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 130
    assert cases_of(Path("run.json")) == {"standard": None}
    assert "dpbench run: interrupted" in Path("err").read_text()
    others = {*Path("/proc").glob("[0-9]*")} - {Path("/proc", str(os.getpid()))}
    assert elsewhere not in map(_directory_of, others)


def _directory_of(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None


def test_the_same_case_twice_is_measured_once(elsewhere: Path) -> None:
    twice = ["--trainer=standard", "--trainer=dpbench.training.standard:StandardTrainer"]
    assert main(["run", *TINY, *twice, "--instrument=logical", "--json=run.json"]) == 0
    assert len(parsed(Path("run.json").read_bytes())["cases"]) == 1
