"""What a session had measured is kept when it is killed; for a worker see `test_workers.py`."""

from __future__ import annotations

import json

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import saved


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
    document = json.loads((pytester.path / "run.json").read_text())
    assert {row["trainer"] for row in document["rows"]} == {"standard"}
    run = saved(pytester.path, 1)
    assert run.status == "interrupted"
    assert run.devices == ("NVIDIA H200",)
