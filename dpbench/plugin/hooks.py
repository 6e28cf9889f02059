"""Hooks of pytest that a project may implement in its ``conftest.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pytest

    from dpbench.show.layout import Table


def pytest_dpbench_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Change the description of the software and the machine, which is part of a saved run.

    A session calls this hook at most once, when it first needs the description.
    """


def pytest_dpbench_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Change the JSON document of a run. This hook is called before each write of the run."""


def pytest_dpbench_group_stats(
    config: pytest.Config, summary: pd.DataFrame, tables: list[Table]
) -> None:
    """Add or change tables before the session prints them.

    Args:
        config: pytest's configuration.
        summary: one row for each case, instrument, phase and metric, see
            `dpbench.results.summary.summary`.
        tables: the tables to print, in order.
    """
