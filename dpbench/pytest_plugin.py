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
from dpbench.plugin.asked import NEEDS, case_of, measuring_fixtures, takes, takes_any
from dpbench.plugin.each_test import MARKER
from dpbench.plugin.whole_session import NAME, WholeSession, read_settings
from dpbench.plugin.workers import Workers, in_order, useful_workers
from dpbench.settings import declare

if TYPE_CHECKING:
    from dpbench.results.report import CaseReport


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
    config.pluginmanager.register(whole, NAME)
    config.pluginmanager.register(whole.each_test, f"{NAME}-tests")
    if whole.settings.measures:
        config.pluginmanager.register(Workers(whole.session.grid))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What ``-n auto`` means where cases are measured; None leaves it to xdist."""
    if not read_settings(config).measures or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        return useful_workers(read_settings(config).chosen_grid()) or None
    except DpbenchError:  # asked before `pytest_configure`, which will say what is wrong
        return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``dpbench_case`` once for each case of the grid."""
    if "dpbench_case" in metafunc.fixturenames:
        whole: WholeSession = metafunc.config.pluginmanager.getplugin(NAME)
        cases = list(whole.session.grid.cases())
        metafunc.parametrize("dpbench_case", cases, ids=[case.id for case in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what measures unless ``--ncu`` or ``--cupti`` was given: it takes minutes of a GPU.

    Tests of one case come one after the other: xdist workers then measure different cases,
    instead of waiting for each other's. In which order they measure, `in_order` says.
    """
    whole: WholeSession = config.pluginmanager.getplugin(NAME)
    cases = list(whole.session.grid.cases())
    if whole.is_worker:
        cases = in_order(cases)
    position = {case: place for place, case in enumerate(cases)}

    def place(item: pytest.Item) -> int:
        case = case_of(item)
        return position.get(case, len(position)) if case else len(position)

    items.sort(key=place)
    only, skips = whole.settings.only, whole.settings.skip
    for item in items if only or skips else ():
        if takes_any(item) is not only:
            option = "--dpbench-only" if only else "--dpbench-skip"
            item.add_marker(pytest.mark.skip(reason=f"skipped by {option}"))
    for fixture in NEEDS.keys() - measuring_fixtures(whole.settings):
        for item in items:
            if takes(item, fixture):
                item.add_marker(pytest.mark.skip(reason=f"needs {NEEDS[fixture]}"))


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
    whole: WholeSession = pytestconfig.pluginmanager.getplugin(NAME)
    return whole.measure


@pytest.fixture
def counters(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Measure a case by hardware counters, whichever reads them: the same as ``ncu`` otherwise.

    With ``--cupti`` the report is CUPTI's, with ``--ncu`` ncu's. With both it has the rows of
    both; where they have the same number its values are ncu's, the reference, while time, peak
    memory and busy shares are CUPTI's.
    """
    whole: WholeSession = pytestconfig.pluginmanager.getplugin(NAME)
    return whole.measure


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
    whole: WholeSession = pytestconfig.pluginmanager.getplugin(NAME)
    return whole.count
