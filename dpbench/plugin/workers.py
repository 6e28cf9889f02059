"""Several GPUs: which one each xdist worker uses, how many workers, who gets which case."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.gpu import visible_gpus
from dpbench.grid import Grid

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
            return CaseScheduling([case.id for case in self.grid.cases()], config)
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


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Cases as several workers best measure them.

    What takes longest comes first, so that no GPU is left with that while the others have nothing
    to do; cases with the same baseline come together, after it. Tests compare with the baseline:
    workers that wait for it start no case meanwhile, and the GPU would wait for their imports.
    """
    cases = list(cases)
    longest = {case.baseline: 0 for case in cases}
    for case in cases:
        longest[case.baseline] = max(longest[case.baseline], expected_cost(case))

    def place(case: Case) -> tuple[int, str, bool, int]:
        baseline = case.baseline
        return -longest[baseline], baseline.id, case != baseline, -expected_cost(case)

    return sorted(cases, key=place)


def expected_cost(case: Case) -> int:
    """How long a case takes, in no unit."""
    return case.batch_size * max(case.seq_len, 1) * PASSES.get(case.trainer, 6)


class CaseScheduling:
    """Hands a worker all tests of a case together, in order, as it gets free.

    xdist's own schedulers hand out work while two tests are pending, one whole case too early, and
    give the test that killed its worker to the next one, and the next. What the methods are for:
    ``xdist.scheduler.protocol.Scheduling``.
    """

    def __init__(self, case_ids: Sequence[str], config: pytest.Config) -> None:
        from xdist import workermanage

        # xdist 3.6 has another name for it.
        tx_specs = getattr(workermanage, "parse_tx_spec_config", None)
        self.case_ids = case_ids
        self.config = config
        self.expected = len((tx_specs or workermanage.parse_spec_config)(config))
        self.collections: dict[Any, list[str]] = {}
        self.waiting: list[list[str]] | None = None
        """Tests by case that no worker has yet; None before all workers have collected."""
        self.given: dict[Any, list[str]] = {}
        """What each worker has still to run."""

    @property
    def nodes(self) -> list[Any]:
        return [*self.given]

    @property
    def collection_is_completed(self) -> bool:
        return len(self.collections) >= self.expected

    @property
    def tests_finished(self) -> bool:
        # A worker runs a test when it knows the next one, or that there is none.
        begun = self.collection_is_completed and self.waiting is not None
        return begun and not self.waiting and all(len(left) < 2 for left in self.given.values())

    @property
    def has_pending(self) -> bool:
        return bool(self.waiting) or any(self.given.values())

    def add_node(self, node: Any) -> None:
        self.given[node] = []

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        self.collections[node] = list(collection)

    def schedule(self) -> None:
        if self.waiting is None:
            tests = next(iter(self.collections.values()))
            if any(other != tests for other in self.collections.values()):
                raise pytest.UsageError("dpbench: the workers collected different tests")
            by_case: dict[str, list[str]] = {}
            for test in tests:
                by_case.setdefault(self._case(test), []).append(test)
            self.waiting = [*by_case.values()]
        for node in self.nodes:
            self._feed(node)

    def _feed(self, node: Any) -> None:
        """Let a worker know of the next test, so that it sees whose fixtures it can tear down."""
        if node.shutting_down or node not in self.collections:
            return
        while self.waiting and len(self.given[node]) < 2:
            tests = self.waiting.pop(0)
            self.given[node] += tests
            node.send_runtest_some([self.collections[node].index(test) for test in tests])
        if not self.waiting:
            node.shutdown()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self.given[node].remove(self.collections[node][item_index])
        self._feed(node)

    def mark_test_pending(self, item: str) -> None:
        self.waiting = [[item], *(self.waiting or [])]
        for node in self.nodes:
            self._feed(node)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        left = self.given.pop(node)
        if not left:
            return None
        crashed, *others = left
        by_case = [list(tests) for _, tests in groupby(others, self._case)]
        self.waiting = [*by_case, *(self.waiting or [])]
        for other in self.nodes:
            self._feed(other)
        return crashed

    def _case(self, test: str) -> str:
        return case_of(test, self.case_ids) or test


def case_of(nodeid: str, case_ids: Sequence[str]) -> str | None:
    """The id of the case that a test is parametrised with, if it is."""
    parameters = nodeid.partition("[")[2].removesuffix("]")
    for case_id in case_ids:
        if f"-{case_id}-" in f"-{parameters}-":
            return case_id
    return None
