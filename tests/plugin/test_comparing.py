"""``--dpbench-compare``, ``--dpbench-compare-fail`` and the marker."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import less, recorded_document, save, saved


@pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n0"], ["-n2"]], ids=str)
def test_regression_fails_the_tests_that_measured_it_and_marks_the_run(
    project: RunSuite, pytester: pytest.Pytester, workers: list[str]
) -> None:
    save(pytester.path, "good", recorded_document(less))
    save(pytester.path, "regressed", recorded_document(regressed=True))
    result = project(
        *workers,
        "--dpbench-autosave",
        "--dpbench-compare",
        "--dpbench-compare-fail=l2_total_bytes:5%",
        "--dpbench-compare-fail=l2_ratio@backward:3%",
        "--dpbench-compare-fail=l2_read_bytes:20%",
        "--dpbench-compare-fail=step_time_seconds:5%",
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*2 regressions against 0001_good*",
            "* dpbench comparison *",
            "metric*phase*before*after*change*limit",
            "l2_total_bytes*step*GB*GB*+10.00%*5%",
            "l2_ratio*backward*+10.00%*3%",
            "Change: tiny-fp32, batch 4, sequence 64, ncu on NVIDIA H200",
            "dpbench: compared with 0001_good",
            "ERROR: dpbench: *step_time_seconds:5%: nothing that was measured has this*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    run = saved(pytester.path, 3)
    assert (run.status, run.regressed) == ("complete", True)
    found = run.session["regressions"]
    assert {(row["trainer"], row["metric"], row["phase"]) for row in found} == {
        ("dpsgd", "l2_total_bytes", "step"),
        ("dpsgd", "l2_ratio", "backward"),
    }
    assert {outcome.case.trainer for outcome in run.outcomes} == {"standard", "dpsgd"}


def test_marker_replaces_the_thresholds_of_the_command_line(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    pytester.makepyfile(
        test_suite="""
        import pytest
        case = dict(batch_size=4, seq_len=64, model_size="tiny")

        @pytest.mark.dpbench(compare_fail=[])
        def test_may_do_anything(ncu):
            ncu("dpsgd", **case)

        @pytest.mark.dpbench(compare_fail=["l2_total_bytes:20%", "l2_read_bytes:0.1GB"])
        def test_may_do_a_little(ncu):
            ncu("dpsgd", **case)

        @pytest.mark.dpbench(compare_fail=["l2_ratio:1%"])
        def test_needs_a_baseline_that_no_test_asks_for(ncu):
            ncu("dpsgd", **case)

        @pytest.mark.dpbench(compare_fail=["l2:1%"])
        def test_has_a_wrong_marker(ncu):
            ncu("dpsgd", **case)

        def test_in_a_fixture(measured):
            pass

        @pytest.fixture
        def measured(ncu):
            return ncu("dpsgd", **case)
        """
    )
    thresholds = "--dpbench-compare-fail=l2_total_bytes:±5%"
    result = project("-n0", "-rA", "--dpbench-compare=1", thresholds)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "dpbench: unknown metric 'l2'; choose from dram_bytes*",
            "PASSED*test_may_do_anything*",
            "PASSED*test_may_do_a_little*",
            "FAILED*test_needs_a_baseline_that_no_test_asks_for*",
            "FAILED*test_has_a_wrong_marker*",
            "FAILED*test_in_a_fixture*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize("options", [["--dpbench-update"], []], ids=str)
def test_run_of_another_gpu_is_neither_compared_with_nor_updated(
    refused: Callable[..., str], pytester: pytest.Pytester, options: list[str]
) -> None:
    other = recorded_document(lambda row: row.update(device="NVIDIA A100"))
    path = pytester.path / "elsewhere.json"
    path.write_text(json.dumps(other))
    line = refused(f"--dpbench-compare={path}", *options)
    assert "elsewhere.json holds ncu on NVIDIA A100, this session measures ncu on NVIDIA" in line
    assert ("not updated" if options else "--dpbench-compare-across") in line
    assert json.loads(path.read_text()) == other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dpbench-compare-fail=dram:5%"], "unknown metric 'dram'; choose from dram_bytes"),
        (["--dpbench-compare-fail=dram_bytes"], "write METRIC[@PHASE]:5%"),
        (["--dpbench-compare=7"], "no run number 0007 in"),
        (["--dpbench-compare=absent.json"], "no run file"),
        (["--dpbench-compare", "test_suite.py"], "took 'test_suite.py' for a run"),
        (["--dpbench-compare=cut.json"], "cut.json is damaged"),
        (["--dpbench-save=a/b"], "run name 'a/b' must be made of letters"),
        (["--dpbench-save=a", "--dpbench-autosave"], "drop --dpbench-save"),
        (["--dpbench-save=a", "--dpbench-storage=/dev/null/x"], "/dev/null/x"),
        (["--dpbench-resume"], "no interrupted run in"),
        (["--dpbench-update"], "--dpbench-update needs the file"),
        (["--dpbench-update-new-only", "--dpbench-compare=1"], "--dpbench-compare=FILE"),
        (["--dpbench-update", "--dpbench-update-new-only"], "choose one of"),
    ],
)
def test_bad_values_get_one_line_before_anything_runs(
    refused: Callable[..., str], pytester: pytest.Pytester, arguments: list[str], words: str
) -> None:
    pytester.makefile(".json", cut='{"schema": 1, "rows": [')
    assert words in refused(*arguments)
    assert not (pytester.path / "ncu_reports/tiny-fp32").exists()
