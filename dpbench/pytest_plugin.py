"""The pytest plugin: options, fixtures that measure and count, one table at the end.

Everything heavy is imported inside functions: ``pytest --help`` loads no torch and no pandas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from dpbench.errors import DpbenchError
from dpbench.plugin import comparing
from dpbench.plugin.manager import NAME, NEEDS_NCU, Manager, asked_grid
from dpbench.plugin.options import pytest_addoption
from dpbench.plugin.workers import Workers, expected_cost, useful_workers

if TYPE_CHECKING:
    from dpbench.results.report import CaseReport

__all__ = [
    "logical_io",
    "ncu",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_xdist_auto_num_workers",
]


def pytest_configure(config: pytest.Config) -> None:
    """Check what was asked for before anything runs, and say so in one line if it can't."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    try:
        manager = Manager(config)
    except DpbenchError as error:
        raise pytest.UsageError(f"dpbench: {error}") from error
    config.pluginmanager.register(manager, NAME)
    if config.option.ncu:
        config.pluginmanager.register(Workers(manager.grid))
    config.addinivalue_line("markers", comparing.MARKER)
    config.pluginmanager.register(manager.comparing, f"{NAME}-comparing")  # markers have limits too


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What ``-n auto`` means with ``--ncu``; None leaves it to xdist."""
    if not config.option.ncu or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        return useful_workers(asked_grid(config.option)) or None
    except DpbenchError:  # asked before `pytest_configure`, which will say what is wrong
        return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``dpbench_case`` once for each case of the grid."""
    if "dpbench_case" in metafunc.fixturenames:
        manager: Manager = metafunc.config.pluginmanager.getplugin(NAME)
        cases = list(manager.grid.cases())
        metafunc.parametrize("dpbench_case", cases, ids=[case.id for case in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what measures under ncu unless ``--ncu`` was given: it takes minutes of a GPU.

    Tests of one case come one after the other: xdist workers then measure different cases,
    instead of waiting for each other's. They begin with the cases that take longest, so that no
    GPU is left with one of those while the others have nothing to do.
    """
    manager: Manager = config.pluginmanager.getplugin(NAME)
    cases = list(manager.grid.cases())
    if manager.is_worker:
        cases.sort(key=expected_cost, reverse=True)
    position = {case.id: place for place, case in enumerate(cases)}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("dpbench_case") if callspec else None
        return position.get(case.id, len(position)) if case else len(position)

    items.sort(key=place)
    if not config.option.ncu:
        for item in items:
            if "ncu" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=NEEDS_NCU))


@pytest.fixture
def ncu(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Measure a case: re-executes it under Nsight Compute, and unprofiled for its time.

    Called with a `Case` or with a case's fields; returns a `CaseReport`. However many tests,
    fixtures or xdist workers ask for a case, it is measured once a session::

        def test_ghost_clipping_saves_bytes(ncu):
            cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
            standard = ncu("standard", **cell)
            assert ncu("dpsgd_ghost", **cell).ratio_to(standard) < 3
    """
    manager: Manager = pytestconfig.pluginmanager.getplugin(NAME)
    return manager.measure


@pytest.fixture
def logical_io(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Count the logical bytes of a case; needs neither a GPU nor the case's memory.

    Called with a `Case` or with a case's fields; returns a `CaseReport`. However many tests,
    fixtures or xdist workers ask for a case, it is counted once a session::

        def test_ghost_clipping_saves_bytes(logical_io):
            cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
            standard = logical_io("standard", **cell)
            assert logical_io("dpsgd_ghost", **cell).ratio_to(standard) < 3
    """
    manager: Manager = pytestconfig.pluginmanager.getplugin(NAME)
    return manager.count
