"""Messages between the ranks of a case outside their steps."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch import distributed

from dpbench.training.parallel import leave_group, rank_and_ranks

__all__ = ["FOR_EVER", "all_gather", "leave_group"]

FOR_EVER = timedelta(days=30)  # the starter of the ranks ends those that hang


@lru_cache(maxsize=1)
def _group(of: Any) -> Any:
    """The ranks of the process group ``of`` over gloo, which uses no GPU."""
    return distributed.new_group(backend="gloo", timeout=FOR_EVER)


def all_gather(word: str) -> list[str]:
    """Send a value to all ranks, and wait for theirs; returns the values by rank.

    Ranks must take equally many steps, or some would wait in a collective for ever. So ranks agree
    here, between two steps, on their number. All ranks must call it in the same order.
    """
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return [word]
    words = [""] * ranks
    distributed.all_gather_object(words, word, group=_group(distributed.group.WORLD))
    return words
