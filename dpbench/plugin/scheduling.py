"""Schedules tests for pytest-xdist, so that one worker gets all tests of a case.

If two workers had tests of one case, one worker would wait, with an idle GPU, while the other
measures. A test that requests several cases belongs to the first requested case.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from dpbench.session_store import SessionStore


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Schedules tests like ``--dist=loadscope`` of xdist: tests of a scope run in one worker.

    A scope here is a case, or a test that requests no case.
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
