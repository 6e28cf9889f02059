"""The largest batch that fits a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.advise.fit import MAX_BATCH, Needed, largest_batch, needed, parse_memory
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("counted_here")

CASE = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")


# --- the largest batch that fits -------------------------------------------------------------


@given(
    fixed=st.integers(0, 20),
    slopes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    turns=st.integers(1, 50),
    parts=st.integers(1, 4),
    memory=st.integers(1, 500),
)
def test_the_next_batch_after_the_largest_does_not_fit(
    fixed: int, slopes: list[int], turns: int, parts: int, memory: int
) -> None:
    """Whatever phases the peak is in: each has a line of its own."""

    def need(case: Case) -> Needed:
        peak = max(fixed + slope * (case.batch_size - turns * i) for i, slope in enumerate(slopes))
        return Needed(peak * 1e9, "backward", False)

    case = Case("dpsgd", parts, 8, micro_batches=parts)
    found = largest_batch(case, memory * 1e9, need)
    assert found.batch_size % parts == 0
    if found.batch_size:
        assert found.needs.fits(memory * 1e9)
    larger = replace(case, batch_size=found.batch_size + parts)
    assert not need(larger).fits(memory * 1e9)


def test_few_counts_are_enough() -> None:
    counted = []

    def need(case: Case) -> Needed:
        counted.append(case.batch_size)
        size = case.batch_size
        return Needed(max(7.6e9 + 0.7e9 * size, 5.4e9 + 1.8e9 * size), "backward", False)

    largest_batch(CASE, 141e9, need)
    assert len(counted) <= 6, counted


def test_a_peak_that_does_not_grow_has_no_largest_batch() -> None:
    found = largest_batch(CASE, 80e9, lambda case: Needed(1e9, "clip"))
    assert found.unbounded
    assert found.batch_size == MAX_BATCH


def test_the_largest_batch_of_a_case_fits_and_the_next_does_not() -> None:
    memory = 1.52e9
    found = largest_batch(CASE, memory)
    assert found.needs == needed(replace(CASE, batch_size=found.batch_size))
    assert found.needs.fits(memory)
    assert not needed(replace(CASE, batch_size=found.batch_size + 1)).fits(memory)


@pytest.mark.parametrize(("text", "memory"), [("80GB", 80e9), ("1.5 gib", 1.5 * 2**30)])
def test_memory_is_read_in_both_units(text: str, memory: float) -> None:
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80MB"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="80GB or 80GiB"):
        parse_memory(text)
