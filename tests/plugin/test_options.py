"""What a bad value, a missing GPU or ``ncu``, and no ``--ncu`` at all lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite


def test_every_option_is_given_in_some_test(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_inprocess("--help").stdout.str()
    group = text.partition("(dpbench):\n")[2].partition("\n\n")[0]
    declared = set(re.findall(r"^  (--[a-z-]+)", group, re.MULTILINE))
    assert len(declared) > 40
    tests = (path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tried = {option for text in tests for option in re.findall("[\"'](--[a-z-]+)", text)}
    assert declared - tried == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dpbench-grid=nope"], "unknown grid 'nope'; choose from grid1, grid2"),
        (["--dpbench-grid=absent.toml"], "grid file absent.toml: No such file"),
        (["--dpbench-trainer=sgd"], "unknown trainer 'sgd'; choose from standard, dpsgd"),
        (["--dpbench-model-size=2b"], "unknown model size '2b'; choose from tiny, small"),
        (["--dpbench-precision=fp8"], "unknown precision 'fp8'; choose from fp32, tf32, bf16"),
        (["--dpbench-attention=flash"], "unknown attention 'flash'; choose from sdpa, dp_mha"),
        (["--dpbench-compile=max"], "unknown compile 'max'; choose from off, on"),
        (["--dpbench-batch-size=0"], "batch size must be a positive integer, not 0"),
        (["--dpbench-seq-len=-1"], "sequence length must be a positive integer, not -1"),
        (["--ncu-metrics=dram"], "unknown metric 'dram'; choose from dram_read_bytes"),
        (["--ncu-active=0"], "active >= 1"),
        (["--ncu-kernels-phase=cake"], "unknown phase 'cake'; choose from forward"),
        (["--ncu-dir=/dev/null/x"], "directory /dev/null/x cannot be written"),
        (["--dpbench-columns=nope"], "unknown column 'nope'; choose from dram_read_bytes"),
        (["--dpbench-csv=/dev/null/x.csv"], "directory /dev/null cannot be written"),
        (["--dpbench-json=/dev/null/x.json"], "directory /dev/null cannot be written"),
        (
            ["--dpbench-csv=run", "--dpbench-markdown=./run"],
            "--dpbench-markdown and --dpbench-csv name the same file, 'run'",
        ),
        (["--dpbench-parallel=ddp", "--dpbench-gpus=2"], "ncu supports one process only, and s"),
    ],
)
def test_bad_values_are_named_before_anything_runs(
    project: RunSuite, arguments: list[str], words: str
) -> None:
    result = project(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.stderr.lines if line]
    assert len(lines) == 1
    assert lines[0].startswith("ERROR: dpbench: ")
    assert words in lines[0]


def test_without_a_gpu_ncu_is_a_usage_error(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = project("-m", "gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: dpbench: no CUDA GPU is visible here*"])


def test_without_ncu_ncu_is_a_usage_error(project: RunSuite) -> None:
    result = project("--ncu", "--ncu-path=/nowhere/ncu", replayed=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: dpbench: there is no program '/nowhere/ncu'*install*"])


@pytest.mark.parametrize("workers", [["-n0"], ["-n1"]], ids=str)
def test_without_the_option_measuring_tests_are_skipped_and_counted(
    project: RunSuite, pytester: pytest.Pytester, workers: list[str]
) -> None:
    earlier = pytester.makefile(".json", run="what an earlier session measured")
    result = project(*workers, "-m", "gpu", "--dpbench-json=run.json", replayed=False)
    result.assert_outcomes(skipped=4)
    result.stdout.fnmatch_lines(
        [
            "*dpbench: 4 tests measure with --ncu*",
            "*dpbench: no case ran, so run.json was not written*",
        ]
    )
    assert earlier.read_text() == "what an earlier session measured"


def test_a_counter_that_is_not_in_the_report_is_an_error(project: RunSuite) -> None:
    result = project("--ncu-metrics=sm__cycles_active.sum")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["*CounterUnknown*sm__cycles_active.sum*ncu --query-metrics*"])


def test_a_grid_is_chosen_by_its_name(project: RunSuite) -> None:
    listed = project("--collect-only", "-q", "--dpbench-grid=grid2", replayed=False)
    listed.stdout.fnmatch_lines(["*dpsgd_fgc-bs8-seq1024-1b-fp32*"])


def test_axes_replace_those_of_the_grid(project: RunSuite) -> None:
    axes = ["--dpbench-optimizer=adamw", "--dpbench-micro-batches=2", "--dpbench-trainable=lora:8"]
    axes += ["--dpbench-activation-checkpointing=on", "--dpbench-sampling=poisson"]
    listed = project("--collect-only", "-q", *axes, replayed=False)
    words = "optimizer=adamw-micro_batches=2-trainable=lora:8-activation_checkpointing=on*poisson"
    listed.stdout.fnmatch_lines([f"*standard-bs4-seq64-tiny-fp32-{words}*"])


@pytest.mark.parametrize("question", ["--collect-only", "--fixtures"])
def test_what_runs_no_test_needs_no_ncu_and_writes_nothing(
    project: RunSuite, pytester: pytest.Pytester, question: str
) -> None:
    pytester.makeconftest("")
    result = project(question, "--ncu", "--dpbench-json=run.json", replayed=False)
    assert result.ret == 0
    assert not (pytester.path / "run.json").exists()
    assert not (pytester.path / "ncu_reports").exists()


def test_tests_of_one_case_come_one_after_the_other(project: RunSuite) -> None:
    listed = project("--collect-only", "-q").stdout.lines
    cases = [line.partition("[")[2].partition("-")[0] for line in listed if "[" in line]
    assert cases == ["standard", "standard", "dpsgd", "dpsgd"]


def test_a_trainer_whose_module_is_nowhere_is_refused_once(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    result = project("-n1", "--dpbench-trainer=nowhere:Trainer", "--dpbench-save=none")
    result.assert_outcomes(errors=1)
    assert result.ret != 0
    said = [line for line in result.outlines + result.errlines if "dpbench: trainer" in line]
    assert said[0] == (
        "dpbench: trainer 'Trainer': no module named 'nowhere'; "
        "run in the module's directory or add the directory to PYTHONPATH"
    )
    assert "nothing was measured" not in result.stdout.str()
    assert not Storage(pytester.path / ".dpbench").paths()
