"""``--dpbench-timeout`` ends what takes too long."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite
from tests.programs import program


def test_a_case_that_takes_too_long_is_ended(project: RunSuite, pytester: pytest.Pytester) -> None:
    program(pytester.path / "ncu", "import time; time.sleep(60)")
    result = project("-p", "no:xdist", "--dpbench-trainer=standard", "--dpbench-timeout=0.3")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*CaseTimedOut*did not finish within 0.3 s*raise the time-out*"])
