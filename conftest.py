"""The repository's own suite: what it needs, and when it is skipped."""

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

READ_BY_PYTEST = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
"""With the first two, pytest prints the last lines of a session uncut."""

COLOURS = ("PY_COLORS", "NO_COLOR", "FORCE_COLOR")


@pytest.fixture(autouse=True, scope="session")
def signals_end_what_tests_start() -> None:
    """A suite that ignores signals, under nohup or in the background, hands that on otherwise."""
    for number, handler in (
        (signal.SIGHUP, lambda *_: None),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def as_on_any_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it, and its sessions print the same everywhere.

    Git's variables, which are set while the hook of a commit runs, would have a test's commit go
    to that repository; its own configuration may want a signature. Python takes a module that is
    written again within a second for the one whose bytecode it has kept. Not for tests that
    measure: the session that they belong to reads all of these to its end.
    """
    if request.node.get_closest_marker("gpu"):
        return
    for registry in NAMED.values():
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds the directory that it is in
    monkeypatch.setattr(METRICS, "_known", dict(METRICS._known))
    monkeypatch.setattr(METRICS, "_every", METRICS.every())  # which takes a while to make
    of_git = [variable for variable in os.environ if variable.startswith("GIT_")]
    for variable in (*READ_BY_PYTEST, *COLOURS, *of_git, "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # the suite itself uses all
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count trainers and workloads from outside in this process, too.

    In one of their own the count is the same and takes seconds: see `test_apart.py`.
    """
    from dpbench.instruments.logical.logical import Counting, Logical

    monkeypatch.setattr(Logical, "start", lambda *counted: Counting(*counted))


@pytest.fixture
def alone_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep measured processes from a GPU that this one uses, and wait for theirs."""
    from dpbench.core.gpu import exclusive, visible_gpus

    with exclusive(visible_gpus()[0], request.node.name):
        yield
        import torch

        torch.cuda.empty_cache()


COUNTS: dict[Case, Outcome] = {}
"""Of cases that came with dpbench, which always count the same."""


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a case that came with dpbench once for all tests that are about what follows."""
    import torch  # noqa: F401  # where it is imported, such a case is counted in this process

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
    """Compute with one thread, here and in child processes: the models of the tests are tiny.

    More threads spend ten times as long waiting for each other. And look for garbage less often:
    each time Python looks at all objects of torch and pandas, a tenth of the suite's time. Left
    alone with ``--ncu`` and ``--cupti``, where a measured process shall be as its user would
    start it. And compile dpbench once: the tests' processes are told not to keep bytecode, and
    would each compile it anew. What pytest makes of the test modules is kept for the next session.
    """
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).with_name("dpbench"), quiet=2)
    if not (config.option.ncu or config.option.cupti):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
        gc.set_threshold(100_000, 20, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose how many examples Hypothesis tries; ``HYPOTHESIS_PROFILE=thorough`` for many.

    Only where tests run: the process that hands them out would be loading Hypothesis while its
    workers wait to be started.
    """
    if session.config.pluginmanager.hasplugin("dsession"):  # xdist's, in that process
        return
    from hypothesis import settings

    settings.register_profile("quick", max_examples=20)
    settings.register_profile("thorough", max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_sessionfinish() -> None:
    """Leave out what was imported when pytest looks for garbage at the end: that takes seconds."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none; begin with what takes longest.

    Tests that run pytest themselves take seconds each. Workers steal each other's last tests but
    not the last two: if those are short, all workers end together. With pytest-randomly the order
    stays random.
    """
    if not config.pluginmanager.hasplugin("randomly"):
        items.sort(key=lambda item: "pytester" not in getattr(item, "fixturenames", ()))
    if not visible_gpus():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
