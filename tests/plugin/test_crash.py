"""What was measured is kept: of a session that is killed, and where the disk is full.

For a worker that is killed, see `test_workers.py`.
"""

from __future__ import annotations

import pytest

from dpbench.results.schema import parsed
from tests.plugin.conftest import CONFTEST, RunSuite
from tests.plugin.saved_runs import saved


@pytest.mark.slow
def test_a_killed_session_keeps_what_it_had_measured(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        import os
        def test_measures(ncu):
            ncu("standard", batch_size=4, seq_len=64, model_size="tiny")
        def test_kills_the_session():
            os._exit(1)
        """
    )
    files = ["--dpbench-json=run.json", "--dpbench-save=run"]
    project("-p", "no:xdist", "-p", "no:randomly", *files, alone=True)
    document = parsed((pytester.path / "run.json").read_bytes())
    assert {row["trainer"] for row in document["rows"]} == {"standard"}
    run = saved(pytester.path, 1)
    assert run.status == "interrupted"
    assert run.devices == ("NVIDIA H200",)


FULL_DISK_OF_WORKERS = """
import dpbench.results.outcome

def cannot_write(path, text):
    raise OSError(28, "No space left on device", str(path))

if "PYTEST_XDIST_WORKER" in os.environ:
    dpbench.results.outcome.write_text = cannot_write
"""


def test_what_a_worker_cannot_write_the_controller_does(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(CONFTEST + FULL_DISK_OF_WORKERS)
    result = project("-n1", "--dpbench-json=run.json", "--dpbench-save=run")
    result.assert_outcomes(passed=4)
    assert result.ret == 0
    document = parsed((pytester.path / "run.json").read_bytes())
    assert {row["trainer"] for row in document["rows"]} == {"standard", "dpsgd"}
    run = saved(pytester.path, 1)
    assert (run.status, len(run.outcomes)) == ("complete", 2)
    measured = pytester.path / "ncu_reports/tiny-fp32/measured.txt"
    assert len(measured.read_text().split()) == 2, "each once"
