"""Spans of time, each from a start to an end, in any unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

Span = tuple[float, float]


def each_alone(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans by their start, each without what those before it cover; maybe of no length."""
    covered = float("-inf")
    for start, end in spans:
        start, covered = max(start, covered), max(end, covered)
        yield start, covered


class Busy:
    """When at least one of some spans lasted."""

    def __init__(self, spans: Iterable[Span]) -> None:
        alone = [*each_alone(sorted(spans))]
        self._starts = [start for start, _ in alone]
        self._lengths = [end - start for start, end in alone]
        self._before = [0.0, *accumulate(self._lengths)]

    def between(self, start: float, end: float) -> float:
        """For how long, within a span."""
        return self._until(end) - self._until(start)

    def _until(self, when: float) -> float:
        place = bisect_right(self._starts, when) - 1
        if place < 0:
            return 0.0
        return self._before[place] + min(when - self._starts[place], self._lengths[place])
