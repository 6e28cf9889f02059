"""``--dpbench-resume`` goes on with an interrupted run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import halved, recorded_document, saved

RESUMED = [
    *("--dpbench-resume", "--dpbench-compare=reference.json"),
    *("--dpbench-compare-fail=global_load_bytes:1%", "--dpbench-compare-first-run-ok"),
]


def test_a_session_goes_on(
    project: RunSuite,
    refused: Callable[..., str],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
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

    line = refused("-n0", *RESUMED, "--ncu-active=2")
    assert "0001_first.json cannot be resumed, because this session differs: " in line
    assert "ncu's steps {'warmup': 1, 'active': 1} -> {'warmup': 1, 'active': 2}" in line

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "absent/summary.md")
    result = project("-n1", *RESUMED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*global_load_bytes*step*+100.00%*1%*",
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


@pytest.mark.slow
def test_a_run_that_was_resumed_for_some_of_its_cases_is_still_interrupted(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        import pathlib
        def test_measures(dpbench_case, ncu, logical_io):
            logical_io("standard", batch_size=1, seq_len=1, model_size="tiny")  # not of the grid
            ncu(dpbench_case)
            assert pathlib.Path("failed").exists() or pathlib.Path("failed").touch()
        """
    )
    seen = []
    for arguments in (
        ["-x", "--dpbench-save=first"],
        ["--dpbench-resume", "-k", "standard"],
        ["--dpbench-resume", "no_such_file.py"],
        ["--dpbench-resume", "-k", "neither"],
        ["--dpbench-resume", "-k", "dpsgd"],  # the rest of them
    ):
        project("-n0", *arguments)
        session = saved(pytester.path, 1).session
        seen.append((session["status"], session["cases_asked"]))
    assert seen == [*[("interrupted", 2)] * 4, ("complete", 2)]
