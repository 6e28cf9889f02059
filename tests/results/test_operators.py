"""What grew between two counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpbench.results.operators import OperatorCount, growth

MM = OperatorCount("backward", "aten.mm", 1, 6, 4, 100)
CLONE = OperatorCount("clip", "aten.clone", 3, 30, 30, 0)


def test_an_operator_that_is_new_has_grown_by_all_of_it() -> None:
    assert growth([MM], [MM, CLONE]) == [CLONE]


def test_an_operator_that_is_gone_has_shrunk() -> None:
    assert growth([MM, CLONE], [MM]) == [OperatorCount("clip", "aten.clone", -3, -30, -30, 0)]


def test_the_same_operator_in_two_phases_is_two() -> None:
    in_noise = OperatorCount("noise", "aten.clone", 1, 5, 5, 0)
    assert growth([CLONE], [CLONE, in_noise]) == [in_noise]


def test_what_grew_most_comes_first() -> None:
    assert growth([], [MM, CLONE]) == [CLONE, MM]


COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["forward", "clip"]), st.sampled_from(["aten.mm", "aten.add"])),
    st.tuples(*[st.integers(0, 10)] * 4),
).map(lambda found: [OperatorCount(*where, *count) for where, count in found.items()])


@given(COUNTS, COUNTS)
def test_growth_is_what_lies_between_the_totals(
    before: list[OperatorCount], after: list[OperatorCount]
) -> None:
    changes = sum(change.total_bytes for change in growth(before, after))
    assert changes == sum(c.total_bytes for c in after) - sum(c.total_bytes for c in before)
