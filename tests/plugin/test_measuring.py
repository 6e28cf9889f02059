"""``--ncu``: what is measured, how often, and what is left behind; with and without xdist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.conftest import RunSuite

FILES = {"json": "json", "markdown": "md", "html": "html"}
WORKERS = {"one process": ["-p", "no:xdist"], "two workers": ["-n2"]}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_session_measures_each_case_once_and_writes_everything_once(
    project: RunSuite, pytester: pytest.Pytester, temporary: Path, workers: str
) -> None:
    trainers = [f"--dpbench-trainer={name}" for name in ("standard", "dpsgd", "dpsgd_ghost")]
    files = [f"--dpbench-{kind}=out/run.{end}" for kind, end in FILES.items()]
    base = f"--basetemp={pytester.path / 'base'}"
    result = project(*WORKERS[workers], *trainers, *files, base)

    # Each case once, however many tests ask; one that fails fails its own tests.
    result.assert_outcomes(passed=4, failed=2)
    measured = (pytester.path / "ncu_reports/tiny-fp32/measured.txt").read_text().split()
    assert sorted(measured) == [
        "report_dpsgd_bs4_seq64",
        "report_dpsgd_ghost_bs4_seq64",
        "report_standard_bs4_seq64",
    ]
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "*CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: no recording of dpsgd_ghost*",
            "*--- end of *report_dpsgd_ghost_bs4_seq64.log*",
        ]
    )
    assert "Traceback" not in text

    # One table, and one file of each kind.
    assert text.count("tiny fp32, batch 4, sequence 64, NVIDIA H200: GB per step") == 1
    assert text.count("DRAM GB by phase") == 1
    document = json.loads((pytester.path / "out/run.json").read_text())
    assert document["schema"] == 1
    assert {(row["trainer"], row["phase"]) for row in document["rows"]} >= {
        ("standard", "forward"),
        ("dpsgd", "clip"),
        ("dpsgd", "step"),
    }
    assert {case["trainer"]: case["error"] for case in document["cases"]} == {
        "standard": None,
        "dpsgd": None,
        "dpsgd_ghost": "CaseFailed",
    }
    assert "| dpsgd" in (pytester.path / "out/run.md").read_text()
    page = (pytester.path / "out/run.html").read_text()
    assert "2 cases measured on NVIDIA H200. 1 case failed." in page
    assert 'id="plot-phases-0"' in page

    # Nothing is left behind.
    assert temporary.is_dir()
    assert not list(temporary.glob("dpbench-*"))


@pytest.mark.parametrize(
    ("workers", "selection"),
    [
        ("one process", ["-k", "no_such_test"]),
        ("one process", ["-m", "not gpu"]),
        ("two workers", ["-m", "not gpu"]),
    ],
)
def test_a_run_that_measured_nothing_is_not_green(
    project: RunSuite, workers: str, selection: list[str]
) -> None:
    result = project(*WORKERS[workers], *selection)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*nothing was measured*-m gpu*"])
