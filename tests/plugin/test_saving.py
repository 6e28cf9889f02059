"""``--dpbench-save``, ``--dpbench-autosave``, ``--dpbench-storage``, ``--dpbench-resume``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import recorded_document, save, saved


def test_saved_run_says_what_was_measured_with_what_and_where(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    newer = save(pytester.path, "newer", {**recorded_document(), "schema": 2})
    result = project("-n0", "--dpbench-save=first", "--dpbench-compare")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            f"dpbench: skipped: run file {newer} has schema 2*upgrade dpbench",
            "dpbench: nothing to compare with: *.dpbench has no complete run*",
            "dpbench: saved .dpbench/NVIDIA-H200/0002_first.json",
        ]
    )
    run = saved(pytester.path, 2)
    assert run.sources == (("NVIDIA H200", "ncu"),)
    assert run.environment["gpu"]["driver"] == "580.159.03"
    assert run.environment["versions"]["ncu"] == "2025.3.1"
    assert run.environment["versions"]["torch"]
    assert run.environment["machine"]["cpus"] >= 1
    assert run.session["grid"]["name"] == "cell"
    assert run.session["settings"]["ncu"]["steps"] == {"warmup": 1, "active": 1}
    assert run.status == "complete"
    assert run.seconds is not None
    assert not run.regressed


def test_runs_of_counted_cases_lie_in_a_folder_of_their_own(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_counts(logical_io):
            logical_io("standard", batch_size=2, seq_len=8, model_size="tiny")
        """
    )
    project("-n0", "--dpbench-autosave", "--dpbench-storage=kept", replayed=False)
    [path] = Storage(pytester.path / "kept").paths()
    assert path.parent.name == "cpu-logical"


def test_session_that_stopped_is_resumed_where_it_did_if_nothing_has_changed(
    project: RunSuite, refused: Callable[..., str], pytester: pytest.Pytester
) -> None:
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
    project("-p", "no:xdist", "-x", "--dpbench-save=first").assert_outcomes(passed=1, failed=1)
    assert saved(pytester.path, 1).status == "interrupted"

    line = refused("--dpbench-resume", "--ncu-active=2")
    assert "0001_first.json cannot be resumed, for this session differs: " in line
    assert "ncu's steps {'warmup': 1, 'active': 1} -> {'warmup': 1, 'active': 2}" in line

    project("-n2", "--dpbench-resume").assert_outcomes(passed=2)
    run = saved(pytester.path, 1)
    assert (run.status, len(Storage(pytester.path / ".dpbench").paths())) == ("complete", 1)
    assert {outcome.case.trainer for outcome in run.outcomes} == {"standard", "dpsgd"}
    measured = pytester.path / "ncu_reports/tiny-fp32/measured.txt"
    assert measured.read_text().split() == ["report_standard_bs4_seq64", "report_dpsgd_bs4_seq64"]


def test_storage_that_breaks_down_is_one_error_and_leaves_earlier_runs(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    earlier = save(pytester.path, "earlier", recorded_document())
    text = earlier.read_text()
    pytester.makepyfile(
        test_suite="""
        import pathlib, shutil
        case = dict(batch_size=4, seq_len=64, model_size="tiny")
        def test_measures(ncu):
            ncu("standard", **case)
        def test_takes_the_folder_away(ncu):
            folder = pathlib.Path(".dpbench/NVIDIA-H200")
            folder.rename("moved")
            folder.touch()
            ncu("dpsgd", **case)
        """
    )
    result = project("-n0", "--dpbench-save=first", "--dpbench-json=run.json")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stdout.str().count("ERROR: dpbench: ") == 1
    result.stdout.fnmatch_lines(["ERROR: dpbench: *NVIDIA-H200*"])
    assert (pytester.path / "moved/0001_earlier.json").read_text() == text
    kept = json.loads((pytester.path / "moved/0002_first.json").read_text())
    assert {row["trainer"] for row in kept["rows"]} == {"standard"}
    assert len(json.loads((pytester.path / "run.json").read_text())["cases"]) == 2
