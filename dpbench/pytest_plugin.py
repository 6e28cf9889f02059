"""The pytest plugin: its options and hooks, and the hook of xdist that chooses ``-n auto``.

Everything heavy is imported inside functions: ``pytest --help`` loads no torch and no pandas.
"""

from __future__ import annotations

import os

import pytest

from dpbench.core.errors import DpbenchError
from dpbench.core.files import printable
from dpbench.core.settings import declare
from dpbench.instruments import declare_built_in, declare_outside
from dpbench.plugin import hooks
from dpbench.plugin.fixtures import MARKER, verify  # noqa: F401 (pytest finds the fixture here)
from dpbench.plugin.whole_session import WholeSession, read_settings, useful_workers


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that projects may implement."""
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; those that name no instrument begin with ``--dpbench-``."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    declare(group.addoption, of_pytest=True)
    declare_built_in(group.addoption, of_pytest=True)


@pytest.hookimpl(trylast=True)  # after conftest.py, which may extend sys.path
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Declare the options of instruments from outside."""
    group = parser.getgroup
    try:
        declare_outside(lambda *title: group(*title).addoption, args, "--dpbench-instrument")
    except DpbenchError as error:
        raise pytest.UsageError(printable(f"dpbench: {error}")) from error


def pytest_configure(config: pytest.Config) -> None:
    """Check the settings before anything runs; an error is one line."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", MARKER)
    try:
        whole = WholeSession(config)
    except DpbenchError as error:
        raise pytest.UsageError(printable(f"dpbench: {error}")) from error
    config.pluginmanager.register(whole, "dpbench-session")
    config.pluginmanager.register(whole.each_test, "dpbench-tests")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The number of workers of ``-n auto`` where cases are measured; None leaves it to xdist."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        settings = read_settings(config)
        return useful_workers(settings.chosen_grid()) or None if settings.measures else None
    except DpbenchError:  # `pytest_configure`, which comes later, reports it
        return None
