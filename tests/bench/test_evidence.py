"""Which code the published measurements are of."""

from __future__ import annotations

import pytest

from bench.evidence import RESULTS, commit, status

INTERRUPTED = {
    "account-fused-1024": "its last case, fused at bf16, was not measured any more",
}
"""Runs that were interrupted, and what they lack."""

NO_RUN = {"ceilings": "bench/ceilings.py printed it: it has no cases and names no commit"}
"""Files that are no run, and why."""

FILES = sorted(path.stem.removeprefix("h200-") for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("file", [file for file in FILES if file not in NO_RUN])
def test_a_published_run_is_of_a_clean_commit_and_complete(file: str) -> None:
    assert len(commit(file)) == 40
    assert status(file) == ("interrupted" if file in INTERRUPTED else "complete")


def test_each_exception_is_there() -> None:
    assert {*INTERRUPTED, *NO_RUN} <= {*FILES}
