"""A session is complete only if every test that asked for a case has come to its end."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import less, recorded_document, save, saved

ENDS_BEFORE = {
    "exit": "pytest.exit('enough', returncode=1)",
    "ctrl-c": "raise KeyboardInterrupt",
}
DPSGD = "dpbench_case.trainer == 'dpsgd'"
SUITE = """
import os, pytest

def test_measures(dpbench_case, ncu):
    if {last}:
        {ending}
    ncu(dpbench_case)
"""


@pytest.mark.parametrize("ending", ENDS_BEFORE.values(), ids=ENDS_BEFORE)
def test_a_session_that_was_ended_is_interrupted(
    project: RunSuite, pytester: pytest.Pytester, ending: str
) -> None:
    pytester.makepyfile(test_suite=SUITE.format(last=DPSGD, ending=ending))
    project("-n0", "--dpbench-save=ended")
    run = saved(pytester.path, 1)
    assert (run.status, run.cases_asked, len(run.outcomes)) == ("interrupted", 2, 1)


def test_a_session_whose_worker_may_not_restart_is_interrupted(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite=SUITE.format(last="dpbench_case.seq_len == 32", ending="os._exit(1)")
    )
    workers = ["-n1", "--max-worker-restart=0"]
    project(*workers, "--dpbench-save=ended", "--dpbench-seq-len=32", "--dpbench-seq-len=64")
    run = saved(pytester.path, 1)
    assert (run.status, run.cases_asked, len(run.outcomes)) == ("interrupted", 4, 2)


AFTER = """
import pytest

@pytest.fixture
def ends():
    yield
    {teardown}

def test_measures(ncu, subtests, ends):
    with subtests.test():  # whose report says "call", too
        pass
    ncu("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
    {call}
"""


@pytest.mark.parametrize("when", ["call", "teardown"])
def test_a_test_has_not_ended_before_all_of_it_has(
    project: RunSuite, pytester: pytest.Pytester, when: str
) -> None:
    save(pytester.path, "good", recorded_document())
    endings = {"call": "", "teardown": "", when: "pytest.exit('enough', returncode=0)"}
    pytester.makepyfile(test_suite=AFTER.format(**endings))
    result = project("-n0", "--dpbench-save=ended", "--dpbench-compare-fail=global_load_bytes:5%")
    assert result.ret != 0
    run = saved(pytester.path, 2)
    assert (run.status, len(run.outcomes)) == ("interrupted", 1)


def test_a_case_whose_test_was_skipped_was_asked_for(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SUITE.format(last=DPSGD, ending="pytest.skip('too slow')"))
    project("-n0", "--dpbench-save=skips").assert_outcomes(passed=1, skipped=1)
    run = saved(pytester.path, 1)
    assert (run.status, run.cases_asked, len(run.outcomes)) == ("complete", 2, 1)


@pytest.mark.slow
def test_a_case_whose_worker_died_was_asked_for_and_is_not_judged(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document())
    ending = f"os._exit(1) if {DPSGD} else pytest.skip('too slow')"
    pytester.makepyfile(
        test_suite=SUITE.format(last="dpbench_case.trainer != 'standard'", ending=ending)
    )
    trainers = [f"--dpbench-trainer={name}" for name in ("standard", "dpsgd", "dpsgd_ghost")]
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    result = project("-n1", "--dpbench-save=died", limit, *trainers, alone=True)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["dpbench: not in this session: dpsgd-bs4-seq64-tiny-fp32"])
    result.stdout.no_fnmatch_line("*because not requested*")
    run = saved(pytester.path, 2)
    assert (run.status, run.verdict) == ("complete", "unjudged")


def test_what_a_worker_measured_before_it_died_is_judged(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "good", recorded_document(less))
    pytester.makepyfile(
        test_suite="""
        import os

        def test_dies(ncu):
            ncu("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
            os._exit(1)
        """
    )
    limit = "--dpbench-compare-fail=global_load_bytes:5%"
    project("-n1", "--max-worker-restart=0", "--dpbench-save=died", limit)
    assert saved(pytester.path, 2).regressed
