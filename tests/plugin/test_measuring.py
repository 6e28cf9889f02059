"""``--ncu``: what is measured, how often, and what is left behind; with and without xdist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.conftest import RunSuite

pytestmark = pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n2"]], ids=str)


def measured(folder: Path) -> list[str]:
    return sorted((folder / "ncu_reports/tiny-fp32/measured.txt").read_text().split())


def test_each_case_is_measured_once_however_many_tests_ask(
    project: RunSuite, pytester: pytest.Pytester, workers: list[str]
) -> None:
    result = project(*workers)
    result.assert_outcomes(passed=4)
    assert measured(pytester.path) == ["report_dpsgd_bs4_seq64", "report_standard_bs4_seq64"]


def test_there_is_one_table_and_one_json_file(
    project: RunSuite, pytester: pytest.Pytester, workers: list[str]
) -> None:
    result = project(*workers, "--dpbench-json=out/run.json", "--dpbench-markdown=out/run.md")
    text = result.stdout.str()
    assert text.count("tiny fp32, batch 4, sequence 64, NVIDIA H200: GB per step") == 1
    assert text.count("DRAM GB by phase") == 1
    document = json.loads((pytester.path / "out/run.json").read_text())
    assert document["schema"] == 1
    assert {(row["trainer"], row["phase"]) for row in document["rows"]} >= {
        ("standard", "forward"),
        ("dpsgd", "clip"),
        ("dpsgd", "step"),
    }
    assert {case["error"] for case in document["cases"]} == {None}
    assert "| dpsgd" in (pytester.path / "out/run.md").read_text()


def test_nothing_is_left_in_the_temporary_directory(
    project: RunSuite,
    pytester: pytest.Pytester,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    project(*workers, f"--basetemp={pytester.path / 'base'}").assert_outcomes(passed=4)
    assert not list(temporary.glob("dpbench-*"))


def test_a_case_that_fails_fails_its_own_tests_and_shows_the_end_of_its_log(
    project: RunSuite, pytester: pytest.Pytester, workers: list[str]
) -> None:
    result = project(*workers, "--dpbench-trainer=standard", "--dpbench-trainer=dpsgd_ghost")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: no recording of dpsgd_ghost*",
            "*--- end of *report_dpsgd_ghost_bs4_seq64.log*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert measured(pytester.path).count("report_dpsgd_ghost_bs4_seq64") == 1


def test_a_run_that_measured_nothing_is_not_green(project: RunSuite, workers: list[str]) -> None:
    for selection in (["-k", "no_such_test"], ["-m", "not gpu"]):
        result = project(*workers, *selection)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stdout.fnmatch_lines(["*nothing was measured*-m gpu*"])
