"""``--ncu``: what is measured, how often, and what is left behind; with and without xdist."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugin.conftest import RunSuite

FILES = {"json": "json", "markdown": "md", "html": "html"}
WORKERS = {"one process": ["-p", "no:xdist"], "two workers": ["-n2"]}


@dataclass(frozen=True)
class Session:
    """A session that has ended: the recorded trainers, and one that fails."""

    result: pytest.RunResult
    folder: Path
    temporary: Path


@pytest.fixture(scope="module")
def ended() -> dict[str, Session]:
    """Sessions that tests of this module share."""
    return {}


@pytest.fixture(params=WORKERS)
def session(
    request: pytest.FixtureRequest,
    ended: dict[str, Session],
    project: RunSuite,
    pytester: pytest.Pytester,
    temporary: Path,
) -> Session:
    if request.param not in ended:
        trainers = [f"--dpbench-trainer={name}" for name in ("standard", "dpsgd", "dpsgd_ghost")]
        files = [f"--dpbench-{kind}=out/run.{end}" for kind, end in FILES.items()]
        base = f"--basetemp={pytester.path / 'base'}"
        result = project(*WORKERS[request.param], *trainers, *files, base)
        ended[request.param] = Session(result, pytester.path, temporary)
    return ended[request.param]


def test_each_case_is_measured_once_however_many_tests_ask(session: Session) -> None:
    session.result.assert_outcomes(passed=4, failed=2)
    measured = (session.folder / "ncu_reports/tiny-fp32/measured.txt").read_text().split()
    assert sorted(measured) == [
        "report_dpsgd_bs4_seq64",
        "report_dpsgd_ghost_bs4_seq64",
        "report_standard_bs4_seq64",
    ]


def test_there_is_one_table_and_one_file_of_each_kind(session: Session) -> None:
    text = session.result.stdout.str()
    assert text.count("tiny fp32, batch 4, sequence 64, NVIDIA H200: GB per step") == 1
    assert text.count("DRAM GB by phase") == 1
    document = json.loads((session.folder / "out/run.json").read_text())
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
    assert "| dpsgd" in (session.folder / "out/run.md").read_text()
    page = (session.folder / "out/run.html").read_text()
    assert "2 cases measured on NVIDIA H200. 1 case failed." in page
    assert 'id="plot-phases-0"' in page


def test_nothing_is_left_in_the_temporary_directory(session: Session) -> None:
    assert session.temporary.is_dir()
    assert not list(session.temporary.glob("dpbench-*"))


def test_a_case_that_fails_fails_its_own_tests_and_shows_the_end_of_its_log(
    session: Session,
) -> None:
    session.result.stdout.fnmatch_lines(
        [
            "*CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: no recording of dpsgd_ghost*",
            "*--- end of *report_dpsgd_ghost_bs4_seq64.log*",
        ]
    )
    assert "Traceback" not in session.result.stdout.str()


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
