"""Hooks that a project may implement in its ``conftest.py``, similar to pytest-benchmark's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pytest

    from dpbench.show.layout import Table


def pytest_dpbench_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Change the description of software and machine in a run's document.

    A session calls this hook at most once, when it first needs the description.
    """


def pytest_dpbench_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Change a run's document each time before it is written."""


def pytest_dpbench_group_stats(
    config: pytest.Config, summary: pd.DataFrame, tables: list[Table]
) -> None:
    """Add or change tables before the session prints them.

    Args:
        config: pytest's configuration.
        summary: one row per case, instrument, phase and metric; see
            `dpbench.results.summary.summary`.
        tables: the tables to print, in order.
    """
