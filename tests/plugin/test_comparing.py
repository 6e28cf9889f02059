"""The marker, and what can't be compared."""

from __future__ import annotations

import json
from collections.abc import Callable

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
            "dpbench: unknown metric 'l2'; choose from l2_*",
            f"dpbench: skipped: run file {newer} cannot be read: schema 99*upgrade dpbench",
            "dpbench: compared with 0001_good",
            "PASSED*test_may_do_anything*",
            "PASSED*test_may_do_a_little*",
            "FAILED*test_needs_a_baseline_that_no_test_asks_for*",
            "FAILED*test_has_a_wrong_marker*",
            "FAILED*test_in_a_fixture*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


SUITE = """
import pytest
from dpbench import Case
case = Case("dpsgd", batch_size=2, seq_len=8, model_size="99x16x1x2")

@pytest.fixture
def larger():
    return Case("dpsgd", batch_size=4, seq_len=8, model_size="99x16x1x2")

def test_general(logical_io):
    logical_io(case)
    logical_io(case.baseline)

@pytest.mark.dpbench(compare_fail=["logical_ratio:1%"])
def test_marked(logical_io):
    logical_io(case)
"""

LOST = """
@pytest.mark.dpbench(compare_fail=["dram_ratio:1%"])
def test_only_counts(logical_io):
    logical_io(case)

@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])
def test_has_no_reference(logical_io, larger):
    logical_io(larger)

@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])
def test_measures_nothing():
    pass

@pytest.mark.dpbench(compare_fail=["logical_bytes@noise:1%"])
def test_asks_for_nothing(logical_io):
    pass
"""
LIMIT = "--dpbench-compare-fail=logical_bytes:1%"


def test_limit_that_judges_nothing_fails_whoever_gave_it(
    project: RunSuite, refused: Callable[..., str], pytester: pytest.Pytester
) -> None:
    def counted(*arguments: str) -> pytest.RunResult:
        return project("-n0", *arguments, replayed=False)

    pytester.makepyfile(test_suite=SUITE)
    first = "--dpbench-compare-first-run-ok"
    line = refused("-n0", LIMIT)
    assert line.endswith(f".dpbench to judge by; if this is the first, say {first}")
    nothing = counted("--dpbench-save=refused")
    nothing.assert_outcomes(passed=1, failed=1)  # a marker's limit is no less
    nothing.stdout.fnmatch_lines([f"*logical_ratio:1% judged nothing of dpsgd*say {first})"])
    counted(LIMIT, first, "--dpbench-save=first").assert_outcomes(passed=2)
    assert counted(LIMIT).ret == 0
    assert saved(pytester.path, 1).regressed
    assert not saved(pytester.path, 2).regressed

    pytester.makepyfile(test_suite=SUITE + LOST)
    result = counted(LIMIT, "--dpbench-compare-fail=dram_bytes:5%", "--dpbench-save=worse")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "dpbench: dram_ratio:1% judged nothing: 0002_first has no dram_ratio of the*",
            "dpbench: logical_bytes:1% judged nothing of dpsgd-bs4-*: nothing to compare with in *",
            "dpbench: logical_bytes:1% judged nothing: 0002_first has no logical_bytes of the*",
            "dpbench: logical_bytes@noise:1% judged nothing: 0002_first has no *in phase noise of*",
            "dpbench: compared with 0002_first",
            "ERROR: dpbench: dram_bytes:5% judged nothing: 0002_first has no dram_bytes of*",
        ]
    )
    assert saved(pytester.path, 3).regressed


def test_session_that_lost_its_measuring_tests_or_their_instrument_has_not_passed(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    versions = {"environment": {"versions": {"torch": "1.0"}}}
    save(pytester.path, "good", {**recorded_document(), **versions})
    limit = "--dpbench-compare-fail=l2_total_bytes:5%"
    result = project("-n0", limit)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["dpbench: different from 0001_good: torch 1.0 -> *"])
    narrowed = project("-n0", limit, "--dpbench-trainer=standard")
    assert narrowed.ret == 0
    narrowed.stdout.fnmatch_lines(["dpbench: not asked for*: dpsgd-bs4-seq64-tiny-fp32"])

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
        ["ERROR: dpbench: l2_total_bytes:5% judged nothing of dpsgd-bs4-*: not in this session"]
    )

    pytester.makepyfile(test_suite="def test_asks_for_nothing(ncu): pass")
    nothing = project("-n0", limit)
    assert nothing.ret != 0
    nothing.stdout.fnmatch_lines(["ERROR: dpbench: l2_total_bytes:5% judged nothing*"])

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
    assert "elsewhere.json holds ncu on NVIDIA A100, this session measures ncu on NVIDIA" in line
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


ELSEWHERE = """
import pytest

@pytest.fixture
def skips(logical_io):
    logical_io(case)
    pytest.skip("has measured")

@pytest.fixture
def after(logical_io):
    yield
    logical_io(case)

def test_in_a_fixture_that_skips(skips):
    pass

@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])
def test_marked_in_a_fixture_that_skips(skips):
    pass

def test_in_a_fixture_after_the_test(after):
    pass

def test_by_name(request):
    request.getfixturevalue("logical_io")(case)

@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])
class TestMarked:
    def test_by_name(self, request):
        request.getfixturevalue("logical_io")(case)

    def test_after_a_subtest(self, subtests, logical_io):
        with subtests.test():  # which ends before anything is measured
            pass
        logical_io(case)
        logical_io(case)
"""


def test_what_a_test_measures_is_judged_wherever_it_does(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SUITE + ELSEWHERE)
    limit = [LIMIT, "--dpbench-compare"]
    project("-n0", "-k", "test_general", "--dpbench-save=good", replayed=False)
    path = next((pytester.path / ".dpbench").rglob("*_good.json"))
    good = json.loads(path.read_text())
    for row in good["rows"]:
        row["value"] /= 2
    path.write_text(json.dumps(good))
    for test, outcome in {
        "test_in_a_fixture_that_skips": {"errors": 1},
        "test_marked_in_a_fixture_that_skips": {"errors": 1},
        "test_in_a_fixture_after_the_test": {"passed": 1, "errors": 1},
        "not TestMarked and test_by_name": {"failed": 1},
        "TestMarked": {"failed": 2},
    }.items():
        result = project("-n0", "-k", test, *limit, "--dpbench-save=worse", replayed=False)
        result.assert_outcomes(**outcome, deselected=None)
        result.stdout.no_fnmatch_line("What changed most:")  # the operators are the same
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        path = next((pytester.path / ".dpbench").rglob("*_worse.json"))
        document = json.loads(path.read_text())
        assert document["session"]["regressed"]
        noted = [by["test"] for case in document["cases"] for by in case["tests"]]
        assert any(test.removeprefix("not TestMarked and ") in name for name in noted)
        path.unlink()


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
    limit = "--dpbench-compare-fail=l2_total_bytes:5%"
    assert project("-n0", "-k", "not test_limited", limit).ret == 0
    result = project("-n0", "--dpbench-save=worse", limit)
    result.assert_outcomes(passed=5, skipped=2)
    assert saved(pytester.path, 2).regressed
    assert result.ret != 0
    result.stdout.fnmatch_lines(["ERROR: dpbench: dpsgd-bs4-seq64-tiny-fp32 got worse by more *"])


FORGIVEN = """
import unittest

@pytest.mark.dpbench(compare_fail=["dram_bytes:1%"])
@pytest.mark.xfail
def test_takes_no_fixture():
    pass

@pytest.mark.dpbench(compare_fail=["l2_total_bytes:1%"])
@pytest.mark.xfail
def test_fails_as_expected(logical_io):
    logical_io(case)
    assert False

@pytest.mark.dpbench(compare_fail=["l2_read_bytes:1%"])
def test_of_a_plugin(logical_io):
    logical_io(case)

@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])
class TestSkips(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def counts(self, logical_io):
        pass

    def test_before_it_measures(self):
        self.skipTest("not today")
"""

FORGIVES = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if item.name == "test_of_a_plugin":
        report.outcome, report.longrepr = "passed", None
    return report

@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    result = yield
    session.testsfailed = 0
    return result
"""


def test_nobody_forgives_what_a_limit_did_not_judge(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(FORGIVES)
    pytester.makepyfile(test_suite=SUITE + FORGIVEN)
    project("-n0", "-k", "test_general", "--dpbench-save=good", replayed=False)
    result = project("-n0", "--junitxml=report.xml", "--dpbench-save=worse", replayed=False)
    result.assert_outcomes(passed=2, failed=3, skipped=1)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = "dpbench: {} judged nothing: 0001_good has no*"
    metrics = ["dram_bytes:1%", "l2_total_bytes:1%", "l2_read_bytes:1%"]
    result.stdout.fnmatch_lines([f"ERROR: {told.format(metric)}" for metric in metrics])
    result.stdout.fnmatch_lines([told.format(metric) for metric in metrics])
    result.stdout.fnmatch_lines(["FAILED*test_fails_as_expected - Failed: dpbench: l2_total*"])
    assert len(saved(pytester.path, 2).session["unjudged"]) == 3


def test_an_error_while_judging_is_no_failure_that_a_test_expects(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    test = "@pytest.mark.xfail\n@pytest.mark.dpbench(compare_fail=['logical_bytes:1%'])\n"
    test += "def test_marked(logical_io): logical_io('standard', batch_size=2, workload='layer')"
    pytester.makepyfile(test_suite=f"import pytest\n{test}")
    (pytester.path / ".dpbench").touch()
    result = project("-n0", replayed=False)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ConfigurationError: storage cannot be read: *"])
