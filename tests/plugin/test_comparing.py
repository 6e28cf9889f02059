"""The marker, and what can't be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import less, recorded_document, save, saved

pytestmark = pytest.mark.usefixtures("counted_once")


def test_marker_replaces_the_thresholds_of_the_command_line(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    save(pytester.path, "regressed", recorded_document(regressed=True))
    newer = save(pytester.path, "newer", {**recorded_document(), "schema": 99})
    pytester.makepyfile(
        test_suite="""
        import pytest
        case = dict(batch_size=4, seq_len=64, model_size="tiny")

        @pytest.mark.dpbench(compare_fail=[])
        def test_may_do_anything(ncu):
            ncu("dpsgd", **case)

        @pytest.mark.dpbench(compare_fail=["global_load_bytes:20%", "global_store_bytes:0.1GB"])
        def test_may_do_a_little(ncu):
            ncu("dpsgd", **case)

        @pytest.mark.dpbench(compare_fail=["global_load_ratio:1%"])
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
    thresholds = "--dpbench-compare-fail=global_load_bytes:±5%"
    result = project("-n0", "-rA", "--dpbench-compare", thresholds)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "dpbench: unknown metric 'l2'; choose from l2_*",
            f"dpbench: skipped: run file {newer} cannot be read: it has schema 99*upgrade dpbench",
            "dpbench: compared with 0001_good",
            "PASSED*test_may_do_anything*",
            "PASSED*test_may_do_a_little*",
            "FAILED*test_needs_a_baseline_that_no_test_asks_for*",
            "FAILED*test_has_a_wrong_marker*",
            "FAILED*test_in_a_fixture*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_session_that_lost_its_measuring_tests_or_their_instrument_has_not_passed(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    versions = {"environment": {"versions": {"torch": "1.0"}}}
    save(pytester.path, "good", {**recorded_document(), **versions})
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    result = project("-n0", limit)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["dpbench: different from 0001_good: torch 1.0 -> *"])
    narrowed = project("-n0", limit, "--dpbench-trainer=standard")
    assert narrowed.ret == 0
    narrowed.stdout.fnmatch_lines(["dpbench: not compared, because not requested: dpsgd-bs4-*"])

    forgotten = project("-n0", limit, replayed=False)  # without --ncu
    assert forgotten.ret == pytest.ExitCode.USAGE_ERROR
    forgotten.stderr.fnmatch_lines(["ERROR: dpbench: no saved run on logical (no hardware) in *"])

    pytester.makepyfile(
        test_suite="""
        import pytest
        def test_loses_one(dpbench_case, ncu):
            if dpbench_case.trainer == "dpsgd":
                pytest.skip("not today")
            ncu(dpbench_case)
        """
    )
    lost = project("-n0", limit)
    assert lost.ret != 0
    lost.stdout.fnmatch_lines(
        ["ERROR: dpbench: global_load_bytes:5% was not checked for dpsgd-bs4-*: not in*"]
    )

    pytester.makepyfile(test_suite="def test_asks_for_nothing(ncu): pass")
    nothing = project("-n0", limit)
    assert nothing.ret != 0
    nothing.stdout.fnmatch_lines(["ERROR: dpbench: global_load_bytes:5% was not checked*"])

    pytester.makepyfile(
        test_suite="""
        import pytest
        def test_ends_the_session(dpbench_case, ncu):
            if dpbench_case.trainer == "dpsgd":
                ncu(dpbench_case)
            pytest.exit("enough", returncode=0)
        """
    )
    for arguments in ([], ["--dpbench-trainer=dpsgd"]):  # before and after it has measured
        ended = project("-n0", limit, *arguments)
        assert ended.ret != 0
        ended.stdout.fnmatch_lines(["ERROR: dpbench: the session ended early, so --dpbench-c*"])


def test_run_of_another_gpu_is_not_compared_with(
    refused: Callable[..., str], pytester: pytest.Pytester
) -> None:
    other = recorded_document(lambda row: row.update(device="NVIDIA A100"))
    path = pytester.path / "elsewhere.json"
    path.write_text(json.dumps(other))
    line = refused(f"--dpbench-compare={path}")
    assert "elsewhere.json has ncu on NVIDIA A100, but this session has ncu on NVIDIA" in line
    assert "--dpbench-compare-across" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--dpbench-compare-fail=dram:5%"],
            "unknown metric 'dram'; choose from dram_",
        ),
        (["--dpbench-compare-fail=dram_bytes"], "write METRIC[@PHASE]:5%"),
        (["--dpbench-compare=7"], "no run number 0007 in"),
        (["--dpbench-compare=absent.json"], "no run file"),
        (["--dpbench-compare=cut.json"], "cut.json cannot be read"),
        (["--dpbench-save=a/b"], "run name 'a/b' must be made of letters"),
        (["--dpbench-save=a", "--dpbench-autosave"], "omit --dpbench-save"),
        (["--dpbench-save=a", "--dpbench-storage=/dev/null/x"], "/dev/null/x"),
        (["--dpbench-resume"], "no interrupted run in"),
    ],
)
def test_bad_values_get_one_line_before_anything_runs(
    refused: Callable[..., str], pytester: pytest.Pytester, arguments: list[str], words: str
) -> None:
    pytester.makefile(".json", cut='{"schema": 2, "rows": [')
    assert words in refused(*arguments)
    assert not (pytester.path / "ncu_reports/tiny-fp32").exists()


@pytest.mark.slow
def test_a_case_that_another_test_measured_is_judged_for_the_test_that_was_skipped(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    pytester.makepyfile(
        test_suite="""
        import pytest

        @pytest.mark.dpbench(compare_fail=[])
        def test_may_do_anything(dpbench_case, ncu):
            ncu(dpbench_case)

        @pytest.mark.skip
        def test_limited(dpbench_case, ncu):
            ncu(dpbench_case)

        def test_has_the_parameter_alone(dpbench_case):
            pass

        def test_of_what_is_as_it_was(ncu):
            ncu("standard", batch_size=4, seq_len=64, model_size="tiny")
        """
    )
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    assert project("-n0", "-k", "not test_limited", limit).ret == 0
    result = project("-n0", "--dpbench-save=worse", limit)
    result.assert_outcomes(passed=5, skipped=2)
    assert saved(pytester.path, 2).regressed
    assert result.ret != 0
    result.stdout.fnmatch_lines(
        ["ERROR: dpbench: global_load_bytes@step of dpsgd-bs4-seq64-tiny-fp32: * +10.00%, limit 5%"]
    )


def test_a_reference_that_cannot_be_looked_for_fails_the_session(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    test = "@pytest.mark.xfail\n@pytest.mark.dpbench(compare_fail=['logical_bytes:1%'])\n"
    test += "def test_marked(logical_io): logical_io('standard', batch_size=2, workload='layer')"
    pytester.makepyfile(test_suite=f"import pytest\n{test}")
    (pytester.path / ".dpbench").touch()
    result = project("-n0", "--dpbench-compare", replayed=False)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: dpbench: storage cannot be read: *"])


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_test_that_got_worse_has_failed_in_every_report(
    project: RunSuite, pytester: pytest.Pytester, workers: str
) -> None:
    save(pytester.path, "good", recorded_document(less))
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    result = project(workers, limit, "--junitxml=report.xml")
    result.assert_outcomes(passed=2, failed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    [suite] = ElementTree.parse(pytester.path / "report.xml").iter("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures")} == {
        "tests": "4",
        "failures": "2",
    }
    cases = [*suite.iter("testcase")]
    assert len({case.get("name") for case in cases}) == len(cases) == 4
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    of_dpsgd = ("test_more_than_standard", "test_dram")
    assert failed == {f"{test}[dpsgd-bs4-seq64-tiny-fp32]" for test in of_dpsgd}


def test_a_limit_that_is_exceeded_is_a_failure_at_which_a_session_stops(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    result = project("-n0", "-x", limit, "--dpbench-save=worse")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*dpbench comparison*", "ERROR: dpbench: the session ended early*", "*stopping after*"]
    )
    run = saved(pytester.path, 2)
    assert (run.regressed, run.verdict) == (True, "interrupted")
