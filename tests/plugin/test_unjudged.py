"""Limits that judge nothing, or whose verdict somebody overrules, fail the session."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dpbench.commands.cli import main
from dpbench.results.schema import parsed
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import saved

pytestmark = pytest.mark.usefixtures("counted_once")


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
    assert line.endswith(f".dpbench, so limits cannot be checked; add {first} to the first run")
    nothing = counted("--dpbench-compare", "--dpbench-save=refused")
    nothing.assert_outcomes(passed=1, failed=1)  # a marker's limit is no less
    nothing.stdout.fnmatch_lines([f"*logical_ratio:1% was not checked for dpsgd*add {first})"])
    counted(LIMIT, first, "--dpbench-save=first").assert_outcomes(passed=2)
    assert counted(LIMIT).ret == 0
    assert saved(pytester.path, 1).verdict == "unjudged"
    assert saved(pytester.path, 2).verdict == "complete"

    pytester.makepyfile(test_suite=SUITE + LOST)
    result = counted(LIMIT, "--dpbench-compare-fail=dram_bytes:5%", "--dpbench-save=worse")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "dpbench: dram_ratio:1% was not checked: 0002_first has no dram_ratio of the*",
            f"dpbench: logical_bytes:1% was not checked for dpsgd-bs4-*: the storage has*{first})",
            "dpbench: logical_bytes:1% was not checked: 0002_first has no logical_bytes of the*",
            "dpbench: logical_bytes@noise:1% was not checked: 0002_first has no *phase noise for*",
            "dpbench: compared with 0002_first",
            "ERROR: dpbench: dram_bytes:5% was not checked: 0002_first has no dram_bytes of*",
        ]
    )
    assert saved(pytester.path, 3).verdict == "unjudged"


def test_a_run_without_a_reference_is_unjudged_and_one_if_it_is_named(
    project: RunSuite, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    assert project("-n0", "--dpbench-compare", "--dpbench-save=ref", replayed=False).ret == 1
    capsys.readouterr()
    assert main(["list", "--storage", str(pytester.path / ".dpbench")]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "0001" in line]
    assert line.rstrip().endswith("unjudged")
    unnamed = project("-n0", "--dpbench-compare", replayed=False)
    unnamed.stdout.fnmatch_lines(
        ["dpbench: 0001_ref is not compared, because it is unjudged; name*"]
    )
    assert project("-n0", "--dpbench-compare=1", LIMIT, replayed=False).ret == 0


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
    good = parsed(path.read_bytes())
    for row in good["rows"]:
        row["value"] /= 2
    path.write_text(json.dumps(good))
    for test, outcome in {
        "test_in_a_fixture_that_skips": {"skipped": 1},
        "test_marked_in_a_fixture_that_skips": {"skipped": 1},
        "test_in_a_fixture_after_the_test": {"passed": 1},
        "not TestMarked and test_by_name": {"failed": 1},
        "TestMarked": {"failed": 2},
    }.items():
        result = project("-n0", "-k", test, *limit, "--dpbench-save=worse", replayed=False)
        result.assert_outcomes(**outcome, deselected=None)
        result.stdout.no_fnmatch_line("What changed most:")  # the operators are the same
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["*logical_bytes@step of dpsgd-bs2-*, limit 1%"])
        path = next((pytester.path / ".dpbench").rglob("*_worse.json"))
        document = parsed(path.read_bytes())
        assert document["session"]["regressed"]
        noted = [by["test"] for case in document["cases"] for by in case["tests"]]
        assert any(test.removeprefix("not TestMarked and ") in name for name in noted)
        path.unlink()


FORGIVEN = """
import unittest

@pytest.mark.dpbench(compare_fail=["dram_bytes:1%"])
@pytest.mark.xfail
def test_takes_no_fixture():
    pass

@pytest.mark.dpbench(compare_fail=["global_load_bytes:1%"])
@pytest.mark.xfail
def test_fails_as_expected(logical_io):
    logical_io(case)
    assert False

@pytest.mark.dpbench(compare_fail=["global_store_bytes:1%"])
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
    result = project("-n0", "--dpbench-compare", "--dpbench-save=worse", replayed=False)
    result.assert_outcomes(passed=3, xfailed=2, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = "dpbench: {} was not checked: 0001_good has no*"
    metrics = ["dram_bytes:1%", "global_load_bytes:1%", "global_store_bytes:1%"]
    result.stdout.fnmatch_lines_random([f"ERROR: {told.format(metric)}" for metric in metrics])
    assert len(saved(pytester.path, 2).session["unjudged"]) == 3


def test_a_case_that_only_an_older_run_has_is_judged_by_it(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    def counted(*arguments: str) -> pytest.RunResult:
        return project("-n0", *arguments, replayed=False)

    suite = SUITE.replace('@pytest.mark.dpbench(compare_fail=["logical_ratio:1%"])\n', "")
    pytester.makepyfile(
        test_suite=suite + "\n\ndef test_larger(logical_io, larger):\n    logical_io(larger)\n"
    )
    assert counted("--dpbench-save=all").ret == 0
    [path] = pytester.path.glob(".dpbench/*/0001_all.json")
    document = parsed(path.read_bytes())
    for row in document["rows"]:
        row["value"] *= 0.5 if row["batch_size"] == 4 else 1
    document["session"]["regressed"] = True  # in another case, so it is no reference for that
    path.write_text(json.dumps(document))
    assert counted("-k", "not larger", "--dpbench-save=some").ret == 0
    first = (LIMIT, "--dpbench-compare-first-run-ok")
    result = counted(*first)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "dpbench: 1 regression against 0001_all; see the section*",
            "dpbench: compared with 0001_all, which is regressed: dpsgd-bs4-seq8-99x16x1x2-fp32",
            "dpbench: compared with 0002_some",
        ]
    )
    assert counted(*first, "-k", "not larger").ret == 0
    path.unlink()
    assert counted(*first).ret == 0  # now it is the first run of this case


@pytest.mark.slow
def test_a_ratio_that_the_latest_run_lacks_is_judged_by_an_older_run(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    limited = ("--dpbench-compare-fail=logical_ratio:1%", "--dpbench-compare-first-run-ok")

    def counted(*arguments: str) -> pytest.RunResult:
        return project("-n0", "-k", "test_general", *arguments, replayed=False)

    pytester.makepyfile(test_suite=SUITE)
    assert counted("--dpbench-save=all").ret == 0
    [path] = pytester.path.glob(".dpbench/*/0001_all.json")
    document = parsed(path.read_bytes())
    for row in document["rows"]:
        row["value"] *= 2 if row["trainer"] == "standard" else 1
    path.write_text(json.dumps(document))
    for part in ("rows", "cases"):
        document[part] = [row for row in document[part] if row["trainer"] != "standard"]
    document["operators"] = []
    path.with_name("0002_some.json").write_text(json.dumps(document))
    result = counted(*limited)
    result.stdout.fnmatch_lines(["dpbench: 1 regression against 0001_all; see the section*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    path.write_text("{")
    result = counted(*limited)
    result.stdout.fnmatch_lines(
        ["*dpsgd-bs2* may be in a run that was skipped: run file*0001_all*; remove*"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    path.unlink()
    assert counted(*limited).ret == 0


STEPS = """
import os
import torch

def step():
    torch.ones(10).clone()

def test_one(logical_io):
    if "LESS" not in os.environ:
        logical_io(step)

def test_other(logical_io):
    logical_io(step)
"""


MARK = 'import pytest\n@pytest.mark.dpbench(compare_fail=["logical_bytes:1%"])\n'


def test_limit_fails_a_test_that_passes_and_no_longer_measures_its_step(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_suite=STEPS)
    project("--dpbench-json=one.json", replayed=False).assert_outcomes(passed=2)
    compare = "--dpbench-compare=one.json"
    project(compare, LIMIT, replayed=False).assert_outcomes(passed=2)
    monkeypatch.setenv("LESS", "1")
    less = project(compare, LIMIT, replayed=False)
    less.assert_outcomes(passed=1, failed=1)
    lost = "test_suite.py::test_one:step"
    said = "the test does not measure it now; if this is meant, write the reference anew"
    told = f"dpbench: logical_bytes:1% was not checked for {lost}: {said}"
    assert [line for line in less.stdout.lines if "was not checked" in line] == [told]
    brief = project(compare, LIMIT, "--tb=line", replayed=False)
    brief.stdout.fnmatch_lines([f"ERROR: {told}"])
    project(compare, replayed=False).assert_outcomes(passed=2)
    project(compare, LIMIT, "-k", "other", replayed=False).assert_outcomes(passed=1)
    renamed = STEPS.replace("test_other", "test_another")
    pytester.makepyfile(
        test_suite=renamed.replace("def test_one(logical_io", f"{MARK}def test_one(")
    )
    both = project(compare, LIMIT, replayed=False)
    both.assert_outcomes(failed=2)
    assert [line for line in both.stdout.lines if "was not checked" in line] == [
        told,
        "dpbench: logical_bytes:1% was not checked for test_suite.py::test_another:step: one has "
        "no number to compare with; if this is meant, write the reference anew",
    ]


OWN = """
import pytest
import torch

def step():
    torch.ones(10).clone()

@pytest.mark.dpbench(compare_fail=["peak_memory_bytes:900%"])
def test_marked(logical_io):
    logical_io(step)

@pytest.mark.dpbench(compare_fail=[])
def test_free(logical_io):
    logical_io(step)
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_limit_of_the_command_line_fails_if_each_test_has_its_own(
    project: RunSuite, pytester: pytest.Pytester, workers: str
) -> None:
    def compared(*arguments: str) -> pytest.RunResult:
        limit = ("--dpbench-compare=own.json", LIMIT)
        return project(workers, *limit, *arguments, replayed=False)

    pytester.makepyfile(test_suite=OWN)
    assert project("--dpbench-json=own.json", replayed=False).ret == 0
    first = "--dpbench-compare-first-run-ok"
    for arguments in ((), ("-k", "free"), (first,)):
        result = compared(*arguments)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        why = "logical_bytes:1% was not checked: each test that measures it has its own limits"
        assert [line for line in result.stdout.lines if "not checked" in line] == [
            f"ERROR: dpbench: {why}"
        ]
    pytester.makepyfile(test_suite=OWN + "\ndef test_new(logical_io):\n    logical_io(step)\n")
    assert compared(first).ret == 0  # the first number that the limit is for
    assert compared().ret == pytest.ExitCode.TESTS_FAILED
    assert project("--dpbench-json=own.json", replayed=False).ret == 0
    assert compared().ret == 0


def test_limits_of_markers_are_checked_only_by_a_session_that_compares(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_suite=OWN.replace("peak_memory_bytes:900%", "logical_bytes:1%"))
    for arguments in (("--dpbench-save=good",), ("-n2", "--dpbench-save=again"), ()):
        result = project(*arguments, replayed=False)
        result.assert_outcomes(passed=2)
        line = "limits of 1 test were not checked, because nothing was compared: "
        assert f"dpbench: {line}add --dpbench-compare" in result.stdout.lines
    assert [saved(pytester.path, number).verdict for number in (1, 2)] == ["complete"] * 2
    kept = project("--dpbench-compare", replayed=False)
    kept.assert_outcomes(passed=2)
    kept.stdout.no_fnmatch_line("*not checked*")
    pytester.makepyfile(test_suite=OWN.replace("peak_memory_bytes:900%", "dram_bytes:1%"))
    project("--dpbench-compare", replayed=False).assert_outcomes(passed=1, failed=1)
