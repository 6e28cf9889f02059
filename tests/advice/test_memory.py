"""The largest batch that fits a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.advice.choice import parse_memory
from dpbench.advice.footprint import MAX_BATCH, Count, Footprint, largest_batch, needed
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError


def footprint(parts: int, lines: list[tuple[int, int]]) -> Footprint:
    """Live bytes of operators, each on a line over the batch size: its start and slope in GB."""
    case = Case("dpsgd", 2 * parts, 8, micro_batches=parts)
    counts = [
        Count(
            size,
            [],
            [("clip", f"{i}", (a + b * size) * 10**9) for i, (a, b) in enumerate(lines)],
            0,
            False,
        )
        for size in (2 * parts, 3 * parts)
    ]
    return Footprint(case, counts)


@given(
    lines=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3),
    parts=st.integers(1, 4),
    memory=st.integers(1, 500),
)
def test_the_next_batch_after_the_largest_does_not_fit(
    lines: list[tuple[int, int]], parts: int, memory: int
) -> None:
    """Whatever operator has the peak."""
    found = footprint(parts, lines)
    largest = largest_batch(found, memory * 1e9)
    assert largest % parts == 0
    if largest:
        assert needed(found, largest) <= memory * 1e9
    assert needed(found, largest + parts) > memory * 1e9


def test_a_peak_that_does_not_grow_has_no_largest_batch() -> None:
    assert largest_batch(footprint(1, [(1, 0)]), 80e9) == MAX_BATCH


def test_room_is_left_for_the_largest_tensor() -> None:
    found = footprint(1, [(1, 0)])
    larger = Footprint(found.case, [replace(each, largest=9 * 10**9) for each in found.counts])
    assert needed(larger, 2) == needed(found, 2) + 9e9 - 0.04e9


@pytest.mark.parametrize(("text", "memory"), [("80GB", 80e9), ("1.5 gib", 1.5 * 2**30)])
def test_memory_is_read_in_both_units(text: str, memory: float) -> None:
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80MB"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="80GB or 80GiB"):
        parse_memory(text)
