"""Hooks that a project may implement in its ``conftest.py``, as pytest-benchmark has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pytest

    from dpbench.show.layout import Table


def pytest_dpbench_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add to, or change, what a run's document says about software and machine.

    Called once, before anything is measured, if the session writes a document.
    """


def pytest_dpbench_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add to, or change, a run's document each time before it is written."""


def pytest_dpbench_group_stats(
    config: pytest.Config, summary: pd.DataFrame, tables: list[Table]
) -> None:
    """Add tables to those of the session, or change them, before they are shown.

    Args:
        config: of the session.
        summary: one row per case, instrument, phase and metric; see
            `dpbench.results.summary.summary`.
        tables: what is shown, in order.
    """
