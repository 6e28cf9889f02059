"""Trainers and models from outside are counted in a process of their own."""

from __future__ import annotations

import pytest

from dpbench.core.errors import CaseFailed
from dpbench.instruments.logical.logical import Counting, Logical
from dpbench.runner import measure
from tests.instruments.logical.cases import count, tiny
from tests.instruments.logical.outside import CountsTokens, Crashes


def test_a_crash_fails_its_case_and_the_end_of_its_output_says_where() -> None:
    outcome = measure(tiny(Crashes), [Logical()])
    assert (outcome.error, outcome.rows) == (CaseFailed.__name__, ())
    assert "was killed by SIGSEGV" in outcome.message
    assert "outside.py" in outcome.log_tail
    assert outcome.log is None


@pytest.mark.slow
def test_the_count_is_that_of_this_process() -> None:
    case = tiny(CountsTokens)
    counting = Logical().start(case)
    try:
        outcome = counting.outcome()
    finally:
        counting.cancel()
    expected = count(case)
    assert (outcome.rows, outcome.operators) == (expected.rows, expected.operators)
    assert outcome.notes == expected.notes


def test_what_is_built_in_needs_no_other_process() -> None:
    assert isinstance(Logical().start(tiny("dpsgd")), Counting)
