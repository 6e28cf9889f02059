"""The repository's own suite: what it needs, and when it is skipped."""

from __future__ import annotations

import pytest

from dpbench.gpu import visible_gpus

pytest_plugins = ["pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if not visible_gpus():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
