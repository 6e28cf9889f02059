"""Each option does what it says, and a bad value gets one clear line before anything runs."""

from __future__ import annotations

import json

import pytest

from tests.plugin.conftest import RunSuite


def command_of(pytester: pytest.Pytester, trainer: str = "standard") -> str:
    log = pytester.path / f"ncu_reports/tiny-fp32/report_{trainer}_bs4_seq64.log"
    return log.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dpbench-grid=nope"], "unknown grid 'nope'; choose from grid1, grid2"),
        (["--dpbench-grid=absent.toml"], "grid file absent.toml: No such file"),
        (["--dpbench-trainer=sgd"], "unknown trainer 'sgd'; choose from standard, dpsgd"),
        (["--dpbench-model-size=2b"], "unknown model size '2b'; choose from tiny, small"),
        (["--dpbench-precision=fp8"], "unknown precision 'fp8'; choose from fp32, tf32, bf16"),
        (["--dpbench-attention=flash"], "unknown attention 'flash'; choose from sdpa, dp_mha"),
        (["--dpbench-batch-size=0"], "batch size must be a positive integer, not 0"),
        (["--dpbench-seq-len=-1"], "sequence length must be a positive integer, not -1"),
        (["--ncu-metrics=dram"], "unknown metric 'dram'; choose from dram_read_bytes"),
        (["--ncu-active=0"], "active >= 1"),
        (["--ncu-dir=/dev/null/x"], "directory /dev/null/x cannot be written"),
        (["--dpbench-columns=nope"], "unknown column 'nope'; choose from dram_read_bytes"),
        (["--dpbench-csv=/dev/null/x.csv"], "directory /dev/null cannot be written"),
        (["--dpbench-json=/dev/null/x.json"], "directory /dev/null cannot be written"),
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
    result.stderr.fnmatch_lines(["ERROR: dpbench: no program '/nowhere/ncu'*install*"])


@pytest.mark.parametrize("workers", [["-n0"], ["-n2"]], ids=str)
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


def test_ncu_dir_holds_reports_and_logs(project: RunSuite, pytester: pytest.Pytester) -> None:
    project("--ncu-dir=deep/reports").assert_outcomes(passed=4)
    names = {path.name for path in (pytester.path / "deep/reports/tiny-fp32").iterdir()}
    assert {"report_dpsgd_bs4_seq64.ncu-rep", "report_dpsgd_bs4_seq64.log"} <= names


def test_ncu_metrics_narrow_what_is_counted(project: RunSuite, pytester: pytest.Pytester) -> None:
    project("--ncu-metrics=gld_throughput", "--dpbench-json=run.json")
    rows = json.loads((pytester.path / "run.json").read_text())["rows"]
    assert {row["metric"] for row in rows} == {
        "dram_read_bytes",
        "dram_write_bytes",
        "global_load_bytes",
    }


def test_a_counter_that_is_not_in_the_report_is_an_error(project: RunSuite) -> None:
    result = project("--ncu-metrics=sm__cycles_active.sum")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["*MetricMissing*sm__cycles_active.sum*ncu --query-metrics*"])


def test_steps_reach_the_profiled_process(project: RunSuite, pytester: pytest.Pytester) -> None:
    project("--ncu-warmup=4", "--ncu-active=7")
    assert "--warmup 4 --active 7 --nvtx" in command_of(pytester)


def test_the_time_out_ends_a_case(project: RunSuite, pytester: pytest.Pytester) -> None:
    slow = pytester.path / "ncu"
    slow.write_text(
        slow.read_text().replace(
            "def main() -> int:", "def main():\n    import time; time.sleep(60)", 1
        )
    )
    result = project("--dpbench-timeout=0.5", "--dpbench-trainer=standard")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*CaseTimedOut*did not finish within 0.5 s*raise the time-out*"])


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (
            ["--dpbench-batch-size=2", "--dpbench-batch-size=4"],
            ["bs2-seq64-tiny", "bs4-seq64-tiny"],
        ),
        (["--dpbench-seq-len=8"], ["bs4-seq8-tiny-fp32"]),
        (["--dpbench-model-size=small"], ["bs4-seq64-small-fp32"]),
        (["--dpbench-precision=bf16"], ["bs4-seq64-tiny-bf16"]),
        (["--dpbench-attention=dp_mha"], ["bs4-seq64-tiny-fp32-dp_mha"]),
        (["--dpbench-trainer=DPGhostClippingTrainer"], ["dpsgd_ghost-bs4-seq64"]),
        (["--dpbench-model=my=pkg.mod:Model"], ["bs4-seq64-tiny-fp32-my"]),
        (["--dpbench-grid=grid2"], ["dpsgd_fgc-bs8-seq1024-1b-fp32"]),
    ],
)
def test_axes_choose_the_cases(project: RunSuite, arguments: list[str], ids: list[str]) -> None:
    listed = project("--collect-only", "-q", *arguments, replayed=False).stdout.str()
    for expected in ids:
        assert f"{expected}" in listed


def test_no_timing_leaves_times_out_and_timing_is_on_by_default(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    project()
    folder = pytester.path / "ncu_reports/tiny-fp32"
    assert not list(folder.glob("*.timing.log"))
    ncu = ["--ncu", f"--ncu-path={pytester.path / 'ncu'}", "--dpbench-trainer=standard"]
    result = project(*ncu, replayed=False)
    assert list(folder.glob("*.timing.log"))  # and it fails, for there is no GPU
    result.stdout.fnmatch_lines(["*no CUDA GPU*"])


def test_the_header_says_what_will_be_measured(project: RunSuite) -> None:
    project().stdout.fnmatch_lines(["dpbench: cell, 2 cases, NVIDIA H200 (driver 580.159.03)"])


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


def test_help_lists_the_options(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--help").stdout.str()
    for option in (
        "--ncu",
        "--ncu-path",
        "--ncu-dir",
        "--ncu-metrics",
        "--dpbench-grid",
        "--dpbench-model-size",
        "--dpbench-json",
        "--dpbench-timeout",
    ):
        assert option in text


def test_a_case_that_cannot_fit_is_skipped_unless_asked_for(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("141 * 10**9", "10**6"))
    result = project("-rs", fits=True)
    result.assert_outcomes(skipped=4)
    result.stdout.fnmatch_lines(
        ["*does not fit: needs about * GB of * GB*", "*nothing was measured*"]
    )
    project("--dpbench-try-anyway", fits=True).assert_outcomes(passed=4)
