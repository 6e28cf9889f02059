"""Hooks that decide how many workers pytest-xdist has, and the GPU and the tests of each worker.

This module is imported only if xdist starts workers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from dpbench.core.gpu import SESSION_GPUS, visible_gpus
from dpbench.core.grid import Grid
from dpbench.plugin.whole_session import SHARED
from dpbench.session import Session
from dpbench.session_store import SessionStore

WORKERS_PER_GPU = 2
"""With two workers on a GPU, one prepares a case while the other measures."""


class Workers:
    """Hooks in the controller of pytest-xdist.

    Args:
        session: the session that workers join.
        measures: True if the session measures cases, so that each worker needs a GPU.
    """

    def __init__(self, session: Session, *, measures: bool) -> None:
        self.session = session
        self.measures = measures

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass to a worker the values with which it joins the session."""
        node.workerinput[SHARED] = self.session.shared()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Assign a GPU to each worker on this machine, if the session measures.

        A worker that replaces a crashed worker has the GPU of the crashed worker. Several workers
        can have the same GPU. A case of several GPUs also uses GPUs of other workers.
        """
        names = visible_names() if self.measures else []
        for number, spec in enumerate(spec for spec in specs if names and spec.popen):
            spec.env["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
            spec.env[SESSION_GPUS] = ",".join(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give all tests of a case to one worker if the session measures.

        If ``--dist`` is neither ``load`` nor ``worksteal``, xdist schedules tests as usual.
        """
        if not (self.measures and config.getvalue("dist") in ("load", "worksteal")):
            return None
        return CaseScheduling(config, log, self.session.store)


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Schedules tests like ``--dist=loadscope`` of xdist: tests of a scope run in one worker.

    A scope here is a case, or a test that requests no case. If two workers had tests of one case,
    one worker would wait, with an idle GPU, while the other measures. A test that requests several
    cases belongs to the first requested case.
    """

    def __init__(self, config: pytest.Config, log: Any, store: SessionStore) -> None:
        super().__init__(config, log)
        self.store = store
        self.scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if nodeid not in self.scopes:
            asked = (r.case.id for r in self.store.requests if r.test == nodeid and r.case)
            self.scopes[nodeid] = next(asked, nodeid)
        return self.scopes[nodeid]

    def _reschedule(self, node: Any) -> None:
        """Give scopes to a worker until it has two pending tests or no scope is left.

        A worker of xdist begins a test only if it has a second test or is told to shut down. xdist
        gives one scope at a time. So the worker that replaces a dead worker could wait for ever: it
        may get a single test, or a scope whose tests the dead worker has finished.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Remove a dead worker. No other worker runs the test during which the worker died."""
        for tests in self.assigned_work[node].values():
            for test, done in tests.items():
                if not done:
                    tests[test] = True
                    super().remove_node(node)
                    return str(test)
        super().remove_node(node)
        return None


def useful_workers(grid: Grid) -> int:
    """Return the number of workers for ``-n auto``.

    This is `WORKERS_PER_GPU` for each GPU, but at most one for each case.
    """
    return min(WORKERS_PER_GPU * len(visible_gpus()), len(grid.cases()))


def visible_names() -> list[str]:
    """Return a name for each GPU of this process that ``CUDA_VISIBLE_DEVICES`` accepts.

    If this variable is set, returns its entries, because they may name MIG slices. Otherwise
    returns UUIDs, because they do not depend on the numbers that CUDA gives to GPUs.
    """
    gpus = visible_gpus()
    entries = os.environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return [gpu.uuid for gpu in gpus]
    return [entry.strip() for entry in entries.split(",")][: len(gpus)]
