"""Schedules tests for pytest-xdist: one worker gets all tests of a case.

Otherwise a worker could wait for a case that another worker measures, while the GPU of the waiting
worker is idle. A test that requests several cases belongs to the first of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from dpbench.session_store import SessionStore


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's ``--dist=loadscope`` with cases as scopes. Every other test has its own scope."""

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
        """Give a worker scopes until it has two tests or no scope is left.

        A worker begins a test only if it has a second test or is shut down. xdist gives one scope
        at a time, so the replacement of a dead worker could wait for ever with a single test, or
        with a scope whose tests the dead worker had finished.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Remove a dead worker; count its running test as done, so that no other worker runs it."""
        for tests in self.assigned_work[node].values():
            for test, done in tests.items():
                if not done:
                    tests[test] = True
                    super().remove_node(node)
                    return str(test)
        super().remove_node(node)
        return None
