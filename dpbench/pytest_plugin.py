"""The pytest plugin: options, fixtures that measure and count, one table at the end.

Everything heavy is imported inside functions: ``pytest --help`` loads no torch and no pandas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from dpbench.errors import DpbenchError
from dpbench.plugin import hooks
from dpbench.plugin.each_test import MARKER, EachTest
from dpbench.plugin.whole_session import WholeSession, read_settings, useful_workers
from dpbench.settings import declare

if TYPE_CHECKING:
    from dpbench.results.report import CaseReport

NAME = "dpbench-tests"
"""What pytest calls the plugin that the fixtures belong to."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that projects may implement."""
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; those that name no instrument begin with ``--dpbench-``."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    declare(group.addoption, of_pytest=True)


def pytest_configure(config: pytest.Config) -> None:
    """Check what was asked for before anything runs, and say so in one line if it can't."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", MARKER)
    try:
        whole = WholeSession(config)
    except DpbenchError as error:
        raise pytest.UsageError(f"dpbench: {error}") from error
    config.pluginmanager.register(whole, "dpbench-session")
    config.pluginmanager.register(whole.each_test, NAME)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What ``-n auto`` means where cases are measured; None leaves it to xdist."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        settings = read_settings(config)
        return useful_workers(settings.chosen_grid()) or None if settings.measures else None
    except DpbenchError:  # asked before `pytest_configure`, which will say what is wrong
        return None


@pytest.fixture
def ncu(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Measure a case: re-executes it under Nsight Compute, and unprofiled for its time.

    With ``--cupti`` as well, time and peak memory are those of the process that CUPTI counts in.

    ``--dpbench-instrument`` adds other instruments, or without ``--ncu`` replaces these.

    Called with a `Case` or with a case's fields; returns a `CaseReport`. However many tests,
    fixtures or xdist workers ask for a case, it is measured once a session::

        def test_ghost_clipping_saves_bytes(ncu):
            cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
            standard = ncu("standard", **cell)
            assert ncu("dpsgd_ghost", **cell).ratio_to(standard) < 3
    """
    each_test: EachTest = pytestconfig.pluginmanager.getplugin(NAME)
    return each_test.measure


@pytest.fixture
def counters(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Measure a case by hardware counters, whichever reads them: the same as ``ncu`` otherwise.

    With ``--cupti`` the report is CUPTI's, with ``--ncu`` ncu's. With both it has the rows of
    both; where they have the same number its values are ncu's, the reference, while time, peak
    memory and busy shares are CUPTI's.
    """
    each_test: EachTest = pytestconfig.pluginmanager.getplugin(NAME)
    return each_test.measure


@pytest.fixture
def logical_io(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Count the logical bytes of a case; needs neither a GPU nor the case's memory.

    Called with a `Case`, with a case's fields, or with a function that does one step of the test's
    own; returns a `CaseReport`. However many tests, fixtures or xdist workers ask for a case, it is
    counted once a session::

        def test_ghost_clipping_saves_bytes(logical_io):
            cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
            standard = logical_io("standard", **cell)
            assert logical_io("dpsgd_ghost", **cell).ratio_to(standard) < 3
    """
    each_test: EachTest = pytestconfig.pluginmanager.getplugin(NAME)
    return each_test.count
