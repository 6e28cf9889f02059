"""Every option does what it says without xdist and with workers.

Few sessions, each with as many options as belong together: `SCENARIOS`. An option that no
scenario gives fails the first test. With ``-n0`` run the sessions of the other files.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import (
    halved,
    less_and_elsewhere,
    recorded_document,
    save,
    saved,
    values,
)
from tests.programs import program

MODES = {"without xdist": ["-p", "no:xdist"], "n2": ["-n2"]}
in_each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
with_a_worker_too = pytest.mark.parametrize("mode", [["-p", "no:xdist"], ["-n1"]], ids=str)
"""Where two workers would tell no more than one: each costs as much as a session without."""

CHOSEN = [
    *("--dpbench-trainer=DPSGDTrainer", "--dpbench-batch-size=2", "--dpbench-batch-size=3"),
    *("--dpbench-seq-len=8", "--dpbench-model-size=small", "--dpbench-precision=bf16"),
    *("--dpbench-attention=dp_mha", "--dpbench-model=mine=outside:Model"),
]
COUNTED = [
    *("--ncu", "--ncu-path=./ncu", "--ncu-dir=deep/reports"),
    *("--ncu-metrics=gld_throughput", "--ncu-metrics=l2_read_bytes"),
    *("--ncu-warmup=4", "--ncu-active=7", "--dpbench-no-timing", "--dpbench-try-anyway"),
    *("--ncu-kernels-phase=clip", "--ncu-kernels-top=2"),
    *("--dpbench-save=clip", "--dpbench-storage=kept"),
]
TIMED = [
    *("--ncu-kernels", "--dpbench-warmup=2", "--dpbench-active=4"),
    *("--dpbench-instrument=torch_profiler", "--dpbench-profile-dir=profiles"),
    *("--dpbench-profile-schedule=wait=1", "--dpbench-profile-threshold=0.12"),
    *("--dpbench-compare=reference.json", "--dpbench-json=renewed.json"),
]
SHOWN = [
    *("--dpbench-grid=cells.toml", "--dpbench-autosave"),
    *("--dpbench-columns=dram_bytes,dram_ratio", "--dpbench-sort=dram_bytes"),
    "--dpbench-expect=none",
    *("--dpbench-group-by=phase", "--dpbench-csv=out/run.csv", "--dpbench-json=out/run.json"),
    *("--dpbench-markdown=out/run.md", "--dpbench-html=out/run.html"),
    "--dpbench-output=out/also.md",
    *("--dpbench-compare=1", "--dpbench-compare-across"),
    "--dpbench-compare-fail=l2_total_bytes:5%",
    *("--dpbench-compare-fail=l2_ratio@backward:3%", "--dpbench-compare-fail=l2_read_bytes:20%"),
    "--dpbench-compare-fail=step_time_seconds:5%",
]
RESUMED = [
    *("--dpbench-resume", "--dpbench-compare=reference.json"),
    *("--dpbench-compare-fail=l2_total_bytes:1%", "--dpbench-compare-first-run-ok"),
]
ENDED = ["--dpbench-trainer=standard", "--dpbench-timeout=0.3"]
SCENARIOS = [CHOSEN, COUNTED, TIMED, SHOWN, RESUMED, ENDED]


def test_every_option_is_tried_in_each_mode(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_inprocess("--help").stdout.str()
    group = text.partition("(dpbench):\n")[2].partition("\n\n")[0]
    declared = set(re.findall(r"^  (--[a-z-]+)", group, re.MULTILINE))
    tried = {option.partition("=")[0] for options in SCENARIOS for option in options}
    assert len(declared) > 40
    elsewhere = ("instrument", "device", "workload", "set", "only", "skip", "disable", "histogram")
    elsewhere += ("optimizer", "micro-batches", "trainable", "activation-checkpointing", "baseline")
    own = {"--cupti", *(f"--dpbench-{name}" for name in elsewhere)}  # files of their own
    assert tried | own == declared


def command_in(log: Path) -> str:
    """The command of a measured process, in its log's first line."""
    return log.read_text().splitlines()[0]


def phases(rows: list[dict[str, Any]], metric: str) -> set[str]:
    return {row["phase"] for row in rows if row["metric"] == metric}


@with_a_worker_too
def test_the_chosen_cases_are_counted_and_saved_as_asked(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    monkeypatch.setenv("REPLAYED_MEMORY", "1000000")  # nothing fits
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # which has no ÷; a table remains a table
    pytester.makepyfile(
        outside="",
        test_suite="""
        def test_kernels(dpbench_case, ncu):
            measured = ncu(dpbench_case)
            assert measured.kernels.loc["clip", "reduce_kernel<NormTwoOps>"].launches == 38
        """,
    )
    result = project(*mode, *CHOSEN, *COUNTED, replayed=False, fits=True)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "dpbench: cell, 2 cases, NVIDIA H200 (driver 580.159.03)",
            "*: bytes by kernel (top 2 of 7)",
            "*: bytes by category",
            "dpbench: saved kept/NVIDIA-H200/0001_clip.json",
        ]
    )
    folder = pytester.path / "deep/reports/small-bf16-dp_mha-mine"
    for size in (2, 3):
        name = f"report_dpsgd_bs{size}_seq8.log"
        ranges = command_in(folder / name)
        assert (
            f"--trainer dpsgd --batch-size {size} --seq-len 8 --model-size small "
            f"--precision bf16 --attention dp_mha --model mine=outside:Model"
        ) in ranges
        assert "--warmup 4 --active 7 --nvtx" in ranges
        assert "--nvtx-include dpbench@0.clip" in command_in(folder / "kernels" / name)
    assert not list(folder.glob("*.timing.log"))

    [path] = Storage(pytester.path / "kept").paths()
    document = json.loads(path.read_text())
    assert {row["metric"] for row in document["rows"] if row["instrument"] == "ncu"} == {
        "dram_read_bytes",
        "dram_write_bytes",
        "global_load_bytes",
        "l2_read_bytes",
    }
    assert phases(document["rows"], "kernel_launches") == {"clip"}, "one phase is not the step"
    assert sum(row["launches"] for row in document["kernels"]) == 2 * 80
    assert "backward" in phases(document["rows"], "dram_read_bytes")
    assert {row["phase"] for row in document["kernels"]} == {"clip"}
    session, environment = document["session"], document["environment"]
    assert (session["status"], session["regressed"]) == ("complete", False)
    assert session["cases_asked"] == 2
    assert session["settings"]["ncu"]["steps"] == {"warmup": 4, "active": 7}
    assert session["workers"] == ("-n1" in mode)
    assert environment["versions"]["ncu"] == "2025.3.1"
    assert environment["versions"]["torch"]
    assert environment["machine"]["cpus"] >= 1
    assert session["seconds"] >= 0
    assert environment["gpu"]["driver"] == "580.159.03"


@with_a_worker_too
def test_a_reference_is_renewed_with_what_was_counted_timed_and_profiled(
    project: RunSuite, pytester: pytest.Pytester, mode: list[str]
) -> None:
    path = pytester.path / "reference.json"
    old = recorded_document(halved, started="2026-01-02") | {"environment": {"python": "3.0"}}
    path.write_text(json.dumps(old))
    old = json.loads(path.read_text())
    measured = ["--ncu", "--ncu-path=./ncu", "--dpbench-trainer=standard"]
    result = project(*mode, *measured, *TIMED, replayed=False)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["standard*l2_total_bytes*+100.00%*"])
    assert json.loads(path.read_text()) == old
    new = json.loads((pytester.path / "renewed.json").read_text())
    assert values(new, "standard", "ncu") == values(recorded_document(), "standard")
    assert new["environment"]["gpu"]["driver"] == "580.159.03"
    by = ["ncu", "ncu_kernels", "timing", "torch_profiler"]
    assert sorted(new["cases"][0]["instruments"]) == by
    rows = [row for row in new["rows"] if row["trainer"] == "standard"]
    assert phases(rows, "kernel_launches") == {"step", "forward", "backward", "optimizer"}
    timed = [r for r in rows if (r["phase"], r["metric"]) == ("step", "step_time_seconds")]
    assert [row["repeat"] for row in timed] == [0, 1, 2, 3]
    assert phases(rows, "memset_bytes") >= {"step", "forward"}

    folder = pytester.path / "ncu_reports/tiny-fp32"
    timing = command_in(folder / "report_standard_bs4_seq64.timing.log")
    assert timing.endswith("--device cuda --warmup 2 --active 4")
    profile = pytester.path / "profiles/standard-bs4-seq64-tiny-fp32"
    report = (profile / "report.txt").read_text(encoding="utf-8")
    assert "schedule: skip_first 1, wait 1, warmup 1, active 1, repeat 1" in report
    slow = report.partition("operators with 0.12 ms")[2].partition("Operators by")[0]
    assert "aten::mm " in slow
    assert "aten::addmm " not in slow, "it takes 0.11 ms"


@in_each_mode
def test_a_session_is_shown_written_and_judged_as_asked(
    project: RunSuite,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    temporary: Path,
    mode: list[str],
) -> None:
    save(pytester.path, "elsewhere", recorded_document(less_and_elsewhere))
    pytester.makefile(
        ".toml",
        cells="trainer = ['standard', 'dpsgd', 'dpsgd_ghost']\n"
        "batch_size = 4\nseq_len = 64\nmodel_size = 'tiny'",
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    result = project(*mode, *SHOWN)

    # Each case once, however many tests ask; one that fails or got worse fails its own tests.
    result.assert_outcomes(passed=2, failed=4)
    log = pytester.path / "ncu_reports/tiny-fp32/measured.txt"
    assert sorted(log.read_text().split()) == [
        "report_dpsgd_bs4_seq64",
        "report_dpsgd_ghost_bs4_seq64",
        "report_standard_bs4_seq64",
    ]
    text = result.stdout.str()
    assert text.count("CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: no recording of") == 3
    assert text.count("2 regressions against 0001_elsewhere") == 2
    assert "Traceback" not in text
    result.stdout.fnmatch_lines(["*--- end of *report_dpsgd_ghost_bs4_seq64.log*"])
    result.stdout.fnmatch_lines(
        [
            "* dpbench comparison *",
            "metric*phase*before*after*change*limit",
            "l2_total_bytes*step*GB*GB*+10.00%*5%",
            "l2_ratio*backward*+10.00%*3%",
            "tiny fp32, phase forward, NVIDIA H200: GB per step",
            "case*DRAM*DRAM",
            "dpsgd bs4 seq64 *",
            "standard bs4 seq64 *",
            "tiny fp32, phase backward, NVIDIA H200: GB per step",
            "standard bs4 seq64 *",
            "dpsgd bs4 seq64 *",
            "Change: tiny-fp32, batch 4, sequence 64, ncu on NVIDIA A100 -> NVIDIA H200,",
            "dpbench: compared with 0001_elsewhere",
            "dpbench: saved .dpbench/NVIDIA-H200/0002_*T*Z.json",
            "ERROR: dpbench: step_time_seconds:5% judged nothing: neither 0001_elsewhere nor*",
        ]
    )
    assert text.count("phase forward, NVIDIA H200: GB per step") == 1
    run = saved(pytester.path, 2)
    assert (run.status, run.regressed) == ("complete", True)
    regressions = run.session["regressions"]
    assert sorted((row["trainer"], row["metric"], row["phase"]) for row in regressions) == [
        ("dpsgd", "l2_ratio", "backward"),
        ("dpsgd", "l2_total_bytes", "step"),
    ]
    check_files(pytester.path)
    assert not list(temporary.glob("dpbench-*"))


def check_files(folder: Path) -> None:
    """Whether the files of `SHOWN` say the same."""
    document = json.loads((folder / "out/run.json").read_text())
    assert {case["trainer"]: case["error"] for case in document["cases"]} == {
        "standard": None,
        "dpsgd": None,
        "dpsgd_ghost": "CaseFailed",
    }
    for trainer in ("standard", "dpsgd"):
        assert values(document, trainer) == values(recorded_document(), trainer)
    with (folder / "out/run.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["value"]) for row in rows] == [row["value"] for row in document["rows"]]
    dram = [
        float(row["value"])
        for row in rows
        if row["phase"] == "step" and row["metric"].startswith("dram_")
    ]
    markdown = (folder / "out/run.md").read_text(encoding="utf-8")
    assert (folder / "out/also.md").read_text(encoding="utf-8") == markdown
    assert "| dpsgd bs4 seq64" in markdown.partition("phase backward")[0]
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith(f"\n{markdown.rstrip()}")
    assert "Change: " in summary
    page = (folder / "out/run.html").read_text(encoding="utf-8")
    assert "2 cases measured on NVIDIA H200. 1 case failed." in page
    assert 'id="plot-phases-0"' in page
    assert all(f"{value:,.0f}" in page for value in dram)


@with_a_worker_too
def test_a_session_goes_on(
    project: RunSuite,
    refused: Callable[..., str],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    mode: list[str],
) -> None:
    path = pytester.path / "reference.json"
    old = recorded_document(halved)
    for part in ("rows", "cases"):
        old[part] = [entry for entry in old[part] if entry["trainer"] == "standard"]
    path.write_text(json.dumps(old))
    pytester.makepyfile(
        test_suite="""
        import pathlib
        case = dict(batch_size=4, seq_len=64, model_size="tiny")
        def test_measures(ncu):
            ncu("standard", **case)
        def test_fails_the_first_time(ncu):
            assert pathlib.Path("failed").exists() or pathlib.Path("failed").touch()
            ncu("dpsgd", **case)
        """
    )
    first = project("-p", "no:xdist", "-x", "--dpbench-save=first", "--dpbench-compare")
    first.assert_outcomes(passed=1, failed=1)
    said = "dpbench: the storage has nothing to compare with yet"
    first.stdout.fnmatch_lines([said])
    assert saved(pytester.path, 1).status == "interrupted"

    line = refused(*mode, *RESUMED, "--ncu-active=2")
    assert "0001_first.json cannot be resumed, for this session differs: " in line
    assert "ncu's steps {'warmup': 1, 'active': 1} -> {'warmup': 1, 'active': 2}" in line

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "absent/summary.md")
    result = project(*mode, *RESUMED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*l2_total_bytes*step*+100.00%*1%*",
            "WARNING: dpbench: GITHUB_STEP_SUMMARY: *absent/summary.md*",
            "dpbench: not in reference: dpsgd-bs4-seq64-tiny-fp32",
        ]
    )
    run = saved(pytester.path, 1)
    assert (run.status, run.regressed) == ("complete", True)
    assert len(Storage(pytester.path / ".dpbench").paths()) == 1
    assert {outcome.case.trainer for outcome in run.outcomes} == {"standard", "dpsgd"}
    measured = pytester.path / "ncu_reports/tiny-fp32/measured.txt"
    assert measured.read_text().split() == ["report_standard_bs4_seq64", "report_dpsgd_bs4_seq64"]


@with_a_worker_too
def test_a_case_that_takes_too_long_is_ended(
    project: RunSuite, pytester: pytest.Pytester, mode: list[str]
) -> None:
    program(pytester.path / "ncu", "import time; time.sleep(60)")
    result = project(*mode, *ENDED)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*CaseTimedOut*did not finish within 0.3 s*raise the time-out*"])


@with_a_worker_too
def test_a_trainer_whose_module_is_nowhere_is_refused_once(
    project: RunSuite, pytester: pytest.Pytester, mode: list[str]
) -> None:
    result = project(*mode, "--dpbench-trainer=nowhere:Trainer", "--dpbench-save=none")
    result.assert_outcomes(errors=1)
    assert result.ret != 0
    said = [line for line in result.outlines + result.errlines if "dpbench: trainer" in line]
    assert said[0] == (
        "dpbench: trainer 'Trainer': no module named 'nowhere'; "
        "run from its directory or put that on PYTHONPATH"
    )
    assert "nothing was measured" not in result.stdout.str()
    assert not Storage(pytester.path / ".dpbench").paths()
