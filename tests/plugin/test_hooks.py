"""What a project adds to the document and to the tables of its sessions."""

from __future__ import annotations

import pytest

from dpbench.results.schema import parsed
from tests.plugin.conftest import CONFTEST, RunSuite

HOOKS = """
from dpbench.show.layout import Table

def pytest_dpbench_update_machine_info(config, machine_info):
    machine_info["rack"] = "B7"

def pytest_dpbench_update_json(config, output_json):
    output_json["budget"] = {"epsilon": 8}

def pytest_dpbench_group_stats(config, summary, tables):
    largest = summary[summary.metric == "global_load_bytes"].value.max()
    tables.append(Table("Largest", ["bytes"], [[f"{largest:.0f}"]]))
"""


def test_a_project_adds_to_document_and_tables(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    """For what a worker's test adds see `test_group_by.py`."""
    pytester.makeconftest(CONFTEST + HOOKS)
    pytester.makepyfile(
        test_suite="""
        def test_measures(ncu):
            report = ncu("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
            report.extra_info["epsilon"] = 8
            report.extra_info["where"] = __import__("pathlib").Path("here")
        """
    )
    result = project("-n0", "--dpbench-json=run.json")
    result.stdout.fnmatch_lines(["Largest"])
    document = parsed((pytester.path / "run.json").read_bytes())
    assert document["environment"]["rack"] == "B7"
    assert document["budget"] == {"epsilon": 8}
    assert document["cases"][0]["extra_info"] == {"epsilon": 8, "where": "here"}
