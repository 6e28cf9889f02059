"""A session is complete only if every test that asked for a case has come to its end."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import recorded_document, save, saved

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


def test_a_case_that_no_test_measured_has_a_reason(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SUITE.format(last=DPSGD, ending="pytest.skip('too slow')"))
    project("-n0", "--dpbench-save=skips").assert_outcomes(passed=1, skipped=1)
    run = saved(pytester.path, 1)
    assert (run.status, run.cases_asked, len(run.outcomes)) == ("complete", 2, 1)
    [(case, reason)] = run.session["not_measured"].items()
    assert case == "dpsgd-bs4-seq64-tiny-fp32"
    assert reason.endswith(f"[{case}]: Skipped: too slow")


def test_a_case_whose_worker_died_was_asked_for_and_is_not_judged(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    """And the reason why one that a worker skipped was not measured comes from there."""
    save(pytester.path, "good", recorded_document())
    ending = f"os._exit(1) if {DPSGD} else pytest.skip('too slow')"
    pytester.makepyfile(
        test_suite=SUITE.format(last="dpbench_case.trainer != 'standard'", ending=ending)
    )
    trainers = [f"--dpbench-trainer={name}" for name in ("standard", "dpsgd", "dpsgd_ghost")]
    limit = "--dpbench-compare-fail=l2_total_bytes:5%"
    result = project("-n1", "--dpbench-save=died", limit, *trainers, alone=True)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["dpbench: not in this session: dpsgd-bs4-seq64-tiny-fp32"])
    result.stdout.no_fnmatch_line("*not asked for*")
    run = saved(pytester.path, 2)
    assert (run.status, run.regressed) == ("complete", True)
    died, skipped = (f"{name}-bs4-seq64-tiny-fp32" for name in ("dpsgd", "dpsgd_ghost"))
    reasons = run.session["not_measured"]
    assert set(reasons) == {died, skipped}
    assert reasons[skipped].endswith("Skipped: too slow")
