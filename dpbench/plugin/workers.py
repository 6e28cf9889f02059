"""Hooks for the workers of pytest-xdist: their number, their GPUs, and the tests of each."""

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
"""The key of the values that the controller passes to workers."""

WORKERS_PER_GPU = 2
"""One worker prepares a case while the other measures. A third worker would only wait."""


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
        """Pass the values with which a worker joins the session."""
        node.workerinput[SHARED] = self.session.shared()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Assign a GPU to each worker on this machine, if the session measures.

        The replacement of a crashed worker has the same GPU. Several workers can have the same GPU.
        Cases of several GPUs also use the next GPUs in the session's list.
        """
        names = visible_names() if self.measures else []
        for number, spec in enumerate(spec for spec in specs if names and spec.popen):
            spec.env["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
            spec.env[SESSION_GPUS] = ",".join(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give all tests of a case to one worker if the session measures.

        A distribution of xdist other than ``load`` and ``worksteal`` remains.
        """
        if not (self.measures and config.getvalue("dist") in ("load", "worksteal")):
            return None
        from dpbench.plugin.scheduling import CaseScheduling

        return CaseScheduling(config, log, self.session.store)


def useful_workers(grid: Grid) -> int:
    """Return the number of workers for ``-n auto``: at most one for each case, 0 without a GPU."""
    return min(WORKERS_PER_GPU * len(visible_gpus()), len(grid.cases()))


def visible_names() -> list[str]:
    """Return a name for each GPU of this process, as ``CUDA_VISIBLE_DEVICES`` accepts it.

    If the variable is set, returns its entries, because they may name MIG slices. Otherwise returns
    UUIDs, which do not depend on CUDA's numbering.
    """
    gpus = visible_gpus()
    entries = os.environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return [gpu.uuid for gpu in gpus]
    return [entry.strip() for entry in entries.split(",")][: len(gpus)]
