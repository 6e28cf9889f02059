"""``--dpbench-update`` and ``--dpbench-update-new-only``: committed references."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import recorded_document

FILE = "--dpbench-compare=reference.json"


def values(document: dict[str, Any], trainer: str) -> list[float]:
    return [row["value"] for row in document["rows"] if row["trainer"] == trainer]


def test_update_rewrites_only_what_was_measured(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    path = pytester.path / "reference.json"
    old = recorded_document(lambda row: row.update(value=row["value"] / 2))
    path.write_text(json.dumps(old))
    options = ["--dpbench-update", "--dpbench-compare-fail=l2_total_bytes:1%"]
    result = project("-n2", FILE, *options, "--dpbench-trainer=standard")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["dpbench: reference.json: 1 cases rewritten, 0 added"])
    new = json.loads(path.read_text())
    assert values(new, "standard") == values(recorded_document(), "standard")
    assert values(new, "dpsgd") == values(old, "dpsgd")


def test_update_new_only_adds_what_the_file_lacks_and_still_fails_on_the_rest(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    path = pytester.path / "reference.json"
    old = recorded_document(lambda row: row.update(value=row["value"] / 2))
    old["rows"] = [row for row in old["rows"] if row["trainer"] == "standard"]
    old["cases"] = [case for case in old["cases"] if case["trainer"] == "standard"]
    path.write_text(json.dumps(old))
    options = ["--dpbench-update-new-only", "--dpbench-compare-fail=l2_total_bytes:1%"]
    result = project("-p", "no:xdist", FILE, *options)
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["dpbench: reference.json: 0 cases rewritten, 1 added"])
    new = json.loads(path.read_text())
    assert values(new, "standard") == values(old, "standard")
    assert values(new, "dpsgd") == values(recorded_document(), "dpsgd")
