"""Fixtures and hooks of the repository's own suite."""

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
    """Restore SIGHUP and SIGINT if ignored (nohup, background): child processes inherit that."""
    for number, handler in (
        (signal.SIGHUP, lambda *_: None),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_frozen(request: pytest.FixtureRequest) -> None:
    """Let garbage collection skip what was imported and what earlier modules left.

    Counting in this process collects in each step, and would look at a million objects of torch,
    pandas and pytest each time.
    """
    if not (request.config.option.ncu or request.config.option.cupti):
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def as_on_any_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test registers, and make its sessions print the same on any machine.

    Git sets variables while a commit hook runs; with them a test would commit to that repository.
    Git's configuration may demand a signature. Bytecode is off, because Python would mistake a
    module rewritten within a second for the old one. Tests that measure keep the environment, which
    their session reads to its end.
    """
    if request.node.get_closest_marker("gpu"):
        return
    for registry in NAMED.values():
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds its working directory
    monkeypatch.setattr(METRICS, "_known", dict(METRICS._known))
    monkeypatch.setattr(METRICS, "_every", METRICS.every())  # slow to compute
    of_git = [variable for variable in os.environ if variable.startswith("GIT_")]
    for variable in (*PYTEST_VARIABLES, *COLOURS, *of_git, "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # the suite itself uses all
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count outside trainers and workloads in this process.

    A process of their own gives the same count (see `test_apart.py`), but takes seconds.
    """
    from dpbench.instruments.logical.logical import Counting, Logical

    monkeypatch.setattr(Logical, "start", lambda *counted: Counting(*counted))


@pytest.fixture
def alone_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the GPU's lock while this process uses the GPU."""
    from dpbench.core.gpu import lock_gpu, visible_gpus

    with lock_gpu(visible_gpus()[0], request.node.name):
        yield
        import torch

        torch.cuda.empty_cache()


COUNTS: dict[Case, Outcome] = {}
"""Counts of built-in cases, which never change."""


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each built-in case once, for tests of what is done with counts."""
    import torch  # noqa: F401  # a process with torch counts built-in cases itself

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
    """Save time: one thread, compiled bytecode, less garbage collection.

    Test models are tiny, so several threads would mostly wait for each other. Garbage collection
    scans all objects of torch and pandas, a tenth of the suite's time. Child processes write no
    bytecode, and would each compile dpbench again. With ``--ncu`` or ``--cupti`` threads and
    collection stay as a user has them.
    """
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).with_name("dpbench"), quiet=2)
    if not (config.option.ncu or config.option.cupti):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
        gc.set_threshold(100_000, 20, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose how many examples Hypothesis tries; ``HYPOTHESIS_PROFILE=thorough`` for many.

    xdist's controller does not load Hypothesis: its workers would wait meanwhile.
    """
    if session.config.pluginmanager.hasplugin("dsession"):  # xdist's controller
        return
    from hypothesis import settings

    settings.register_profile("quick", max_examples=20)
    settings.register_profile("thorough", max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_sessionfinish() -> None:
    """Spare imported objects from pytest's last garbage collection, which takes seconds."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--slow``."""
    parser.addoption("--slow", action="store_true", help="run tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a GPU and ``slow`` without ``--slow``; longest tests first.

    Of a test marked ``repeats`` the first of its parameters runs without ``--slow``.

    Tests that run pytest take seconds. Workers steal tests from each other, except the last two: if
    these are short, all workers end together. pytest-randomly keeps its order.
    """
    if not config.pluginmanager.hasplugin("randomly"):
        items.sort(key=lambda item: "pytester" not in getattr(item, "fixturenames", ()))
    skipped = {} if visible_gpus() else {"gpu": "needs an NVIDIA GPU"}
    if not config.getoption("--slow"):
        skipped["slow"] = "takes long: --slow runs it"
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
