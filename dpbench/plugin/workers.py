"""Several GPUs: which one each xdist worker uses, how many workers, who gets which case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from dpbench.case import Case, Grid
from dpbench.gpu import visible_gpus

WORKERS_PER_GPU = 2
"""One sets up while the other measures; a third would only wait for the GPU's lock."""

PASSES = {"standard": 3, "dpsgd": 4}
"""Passes through the matrix products in a step: a forward and two in backward; per-sample
gradients once more. Any other trainer is taken to run backward twice, as ghost clipping does."""


def useful_workers(grid: Grid) -> int:
    """How many workers ``-n auto`` means: two a GPU, and no more than there are cases."""
    return min(WORKERS_PER_GPU * len(visible_gpus()), sum(1 for _ in grid.cases()))


class Workers:
    """Spreads a ``--ncu`` session over the GPUs that it may use; a plugin of its own.

    Args:
        grid: the session's cases.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Give each worker on this machine one GPU; a replacement of a crashed one keeps it."""
        gpus = visible_names()
        local = [spec for spec in specs if spec.popen]
        for number, spec in enumerate(local if gpus else []):
            spec.env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Deal out whole cases, unless the user chose a way to group tests."""
        if config.getvalue("dist") in ("load", "worksteal"):
            return case_scheduling([case.id for case in self.grid.cases()], config, log)
        return None


def visible_names() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process may use.

    Entries of the caller's own list if there is one, for it may pick some GPUs or slices of one;
    otherwise UUIDs, which do not depend on how CUDA numbers GPUs.
    """
    gpus = visible_gpus()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return [gpu.uuid for gpu in gpus]
    return [entry.strip() for entry in asked.split(",")][: len(gpus)]


def expected_cost(case: Case) -> int:
    """How long a case takes, in no unit: what takes longest is best begun first."""
    return case.batch_size * case.seq_len * PASSES.get(case.trainer, 6)


def case_scheduling(case_ids: Sequence[str], config: pytest.Config, log: Any) -> Any:
    """A scheduler that hands a worker all tests of a case together, in order, as it gets free."""
    from xdist.scheduler import LoadScopeScheduling

    class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return case_of(nodeid, case_ids) or nodeid

        def _reschedule(self, node: Any) -> None:
            # xdist hands out work while two tests are pending: one whole case too early. A worker
            # needs to know only of the next test, to see whose fixtures it can tear down.
            waiting = self._pending_of(self.assigned_work[node])
            if not (self.workqueue and waiting >= 2):
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            # xdist would hand the test that killed its worker to the next one, and the next.
            workload = self.assigned_work[node]
            waiting = (
                test for unit in workload.values() for test, done in unit.items() if not done
            )
            crashed = next(waiting, None)
            if crashed is not None:
                workload[self._split_scope(crashed)][crashed] = True
            for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
                del workload[scope]
            super().remove_node(node)
            return crashed

    return CaseScheduling(config, log)


def case_of(nodeid: str, case_ids: Sequence[str]) -> str | None:
    """The id of the case that a test is parametrised with, if it is."""
    parameters = nodeid.partition("[")[2].removesuffix("]")
    for case_id in case_ids:
        if f"-{case_id}-" in f"-{parameters}-":
            return case_id
    return None
