"""The marker, and what can't be compared; what the options do is in `test_modes.py`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import less, recorded_document, save


def test_marker_replaces_the_thresholds_of_the_command_line(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    save(pytester.path, "regressed", recorded_document(regressed=True))
    newer = save(pytester.path, "newer", {**recorded_document(), "schema": 2})
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
    result = project("-n0", "-rA", "--dpbench-compare", thresholds)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "dpbench: unknown metric 'l2'; choose from dram_read_bytes*",
            f"dpbench: skipped: run file {newer} has schema 2*upgrade dpbench",
            "dpbench: compared with 0001_good",
            "PASSED*test_may_do_anything*",
            "PASSED*test_may_do_a_little*",
            "FAILED*test_needs_a_baseline_that_no_test_asks_for*",
            "FAILED*test_has_a_wrong_marker*",
            "FAILED*test_in_a_fixture*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_run_of_another_gpu_is_not_compared_with(
    refused: Callable[..., str], pytester: pytest.Pytester
) -> None:
    other = recorded_document(lambda row: row.update(device="NVIDIA A100"))
    path = pytester.path / "elsewhere.json"
    path.write_text(json.dumps(other))
    line = refused(f"--dpbench-compare={path}")
    assert "elsewhere.json holds ncu on NVIDIA A100, this session measures ncu on NVIDIA" in line
    assert "--dpbench-compare-across" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dpbench-compare-fail=dram:5%"], "unknown metric 'dram'; choose from dram_read_bytes"),
        (["--dpbench-compare-fail=dram_bytes"], "write METRIC[@PHASE]:5%"),
        (["--dpbench-compare=7"], "no run number 0007 in"),
        (["--dpbench-compare=absent.json"], "no run file"),
        (["--dpbench-compare", "test_suite.py"], "took 'test_suite.py' for a run"),
        (["--dpbench-compare=cut.json"], "cut.json is damaged"),
        (["--dpbench-save=a/b"], "run name 'a/b' must be made of letters"),
        (["--dpbench-save=a", "--dpbench-autosave"], "drop --dpbench-save"),
        (["--dpbench-save=a", "--dpbench-storage=/dev/null/x"], "/dev/null/x"),
        (["--dpbench-resume"], "no interrupted run in"),
    ],
)
def test_bad_values_get_one_line_before_anything_runs(
    refused: Callable[..., str], pytester: pytest.Pytester, arguments: list[str], words: str
) -> None:
    pytester.makefile(".json", cut='{"schema": 1, "rows": [')
    assert words in refused(*arguments)
    assert not (pytester.path / "ncu_reports/tiny-fp32").exists()
