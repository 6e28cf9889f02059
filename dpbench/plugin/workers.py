"""Hooks that decide how many workers pytest-xdist has, and the GPU and the tests of each worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.core.gpu import SESSION_GPUS, visible_gpus
from dpbench.session import Session

if TYPE_CHECKING:
    from dpbench.core.grid import Grid

SHARED = "dpbench"
"""The key in ``workerinput`` of the values that the controller passes to a worker."""

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
        from dpbench.plugin.scheduling import CaseScheduling

        return CaseScheduling(config, log, self.session.store)


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
