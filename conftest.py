"""Fixtures and hooks of dpbench's own tests."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dpbench.core.case import Case
from dpbench.core.gpu import visible_gpus
from dpbench.core.metrics import METRICS
from dpbench.core.registry import NAMED, is_builtin

if TYPE_CHECKING:
    from dpbench.instruments.logical.logical import Logical
    from dpbench.results.outcome import Outcome

pytest_plugins = ["pytester"]

PYTEST_VARIABLES = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
"""Environment variables that change pytest's output or options."""

COLOURS = ("PY_COLORS", "NO_COLOR", "FORCE_COLOR")


@pytest.fixture(autouse=True, scope="session")
def signals_end_what_tests_start() -> None:
    """Restore SIGHUP and SIGINT if nohup or a background job ignores them.

    Child processes would also ignore them.
    """
    for number, handler in (
        (signal.SIGHUP, lambda *_: None),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_frozen(request: pytest.FixtureRequest) -> None:
    """Exclude existing objects from garbage collection at the start of each test module.

    Counting in this process collects garbage in each step, and each collection would scan a million
    objects of torch, pandas and pytest.
    """
    if not (request.config.option.ncu or request.config.option.cupti):
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def as_on_any_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo a test's registrations, and make the output of sessions independent of the machine.

    In a commit hook, Git sets variables with which a test would commit to this repository. Git's
    configuration may require signatures. Bytecode is off, because Python does not notice that a
    module changed twice within a second. Tests marked ``gpu`` keep their environment, which their
    session reads until its end, but not their registrations.
    """
    for registry in NAMED.values():
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the working directory
    monkeypatch.setattr(METRICS, "_known", dict(METRICS._known))
    monkeypatch.setattr(METRICS, "_every", METRICS.every())  # avoids a slow computation
    of_git = [variable for variable in os.environ if variable.startswith("GIT_")]
    for variable in (*PYTEST_VARIABLES, *COLOURS, *of_git, "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)
    # Sessions see one core, because the tests themselves use all cores.
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a test's own trainers and workloads in this process.

    A separate process returns the same count (see `test_apart.py`), but takes seconds.
    """
    from dpbench.instruments.logical.logical import Counting, Logical

    monkeypatch.setattr(Logical, "start", lambda *counted: Counting(*counted))


@pytest.fixture
def alone_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lock the GPU while a test uses it in this process."""
    from dpbench.core.gpu import lock_gpu, visible_gpus

    with lock_gpu(visible_gpus()[0], request.node.name):
        yield
        import torch

        torch.cuda.empty_cache()


COUNTS: dict[Case, Outcome] = {}
"""Counts of built-in cases, which do not change during the tests."""


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each built-in case once, for tests that only use the counts."""
    import torch  # noqa: F401  # built-in cases are counted in a process that has imported torch

    from dpbench.instruments.logical.logical import Logical

    count = Logical.count

    def count_once(self: Logical, case: Case) -> Outcome:
        if not is_builtin(case):
            return count(self, case)
        if case not in COUNTS:
            COUNTS[case] = count(self, case)
        return COUNTS[case]

    monkeypatch.setattr(Logical, "count", count_once)


def pytest_configure(config: pytest.Config) -> None:
    """Save time with a single thread, compiled bytecode, and rarer garbage collection.

    Several threads would mostly wait for each other, because test models are tiny. Garbage
    collection of torch's and pandas's objects takes a tenth of the tests' time. Child processes
    write no bytecode, so each would compile dpbench again. With ``--ncu`` or ``--cupti``, threads
    and garbage collection do not change.
    """
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).with_name("dpbench"), quiet=2)
    if not (config.option.ncu or config.option.cupti):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it on import
        gc.set_threshold(100_000, 20, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose the number of examples of Hypothesis by the variable ``HYPOTHESIS_PROFILE``.

    The controller of xdist does not load Hypothesis, because workers would wait for it.
    """
    if session.config.pluginmanager.hasplugin("dsession"):  # xdist's controller
        return
    from hypothesis import settings

    settings.register_profile("quick", max_examples=20)
    settings.register_profile("thorough", max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_sessionfinish() -> None:
    """Exclude objects from pytest's last garbage collection, which would take seconds."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--slow``."""
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a GPU and tests marked ``slow`` without ``--slow``.

    A test marked ``repeats`` runs with its first parameters only, unless ``--slow`` is set.

    Long tests come first, unless pytest-randomly orders tests: those of a grid's cases, then those
    that run pytest. Workers steal tests from each other, except for the last two tests. So all
    workers end at the same time if these tests are short.
    """
    if not config.pluginmanager.hasplugin("randomly"):
        for fixture in ("pytester", "dpbench_case"):
            items.sort(key=lambda item: fixture not in getattr(item, "fixturenames", ()))
    skipped = {} if visible_gpus() else {"gpu": "needs an NVIDIA GPU"}
    if not config.getoption("--slow"):
        skipped["slow"] = "slow; run it with --slow"
        first = set[str]()
        for item in items:
            name = item.nodeid.partition("[")[0]
            if item.get_closest_marker("repeats") and not item.get_closest_marker("slow"):
                if name in first:
                    item.add_marker(pytest.mark.slow)
                first.add(name)
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
