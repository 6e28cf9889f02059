"""The pytest plugin of dpbench, which declares options and registers hooks and fixtures.

Nothing here imports torch or pandas before a test needs them, so that ``pytest --help`` is fast.
"""

from __future__ import annotations

import os

import pytest

from dpbench.core.errors import DpbenchError
from dpbench.core.files import printable
from dpbench.core.settings import declare
from dpbench.instruments import declare_built_in, declare_outside
from dpbench.plugin import whole_session
from dpbench.plugin.fixtures import MARKER, verify  # noqa: F401 (pytest finds the fixture here)
from dpbench.plugin.whole_session import WholeSession, read_settings


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that a project may implement."""
    pluginmanager.add_hookspecs(whole_session)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of dpbench and of its built-in instruments."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    declare(group.addoption, of_pytest=True)
    declare_built_in(group.addoption, of_pytest=True)


@pytest.hookimpl(trylast=True)  # a conftest.py may extend sys.path first
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Declare the options of instruments that are not built in."""
    group = parser.getgroup
    try:
        declare_outside(lambda *title: group(*title).addoption, args, "--dpbench-instrument")
    except DpbenchError as error:
        raise pytest.UsageError(printable(f"dpbench: {error}")) from error


def pytest_configure(config: pytest.Config) -> None:
    """Begin the session and register its hooks.

    pytest reports a `DpbenchError` as a usage error, without a traceback.
    """
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", MARKER)
    try:
        whole = WholeSession(config)
    except DpbenchError as error:
        raise pytest.UsageError(printable(f"dpbench: {error}")) from error
    config.pluginmanager.register(whole, "dpbench-session")
    config.pluginmanager.register(whole.each_test, "dpbench-tests")
    if config.getoption("dist", "no") != "no":
        from dpbench.plugin.workers import Workers

        workers = Workers(whole.session, measures=whole.measures)
        config.pluginmanager.register(workers, "dpbench-workers")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto``, or None if xdist must choose the number."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    from dpbench.plugin.workers import useful_workers

    try:
        settings = read_settings(config)
        return useful_workers(settings.chosen_grid()) or None if settings.measures else None
    except DpbenchError:  # `pytest_configure` will report the error
        return None
