"""Messages that the ranks of a case exchange between steps."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch import distributed

from dpbench.training.parallel import leave_group, rank_and_ranks

__all__ = ["FOR_EVER", "all_gather", "leave_group"]

FOR_EVER = timedelta(days=30)  # the process that started the ranks ends hanging ranks


@lru_cache(maxsize=1)
def _group(of: Any) -> Any:
    """Return a gloo process group with the ranks of the group ``of``. gloo uses no GPU."""
    return distributed.new_group(backend="gloo", timeout=FOR_EVER)


def all_gather(word: str) -> list[str]:
    """Send a string to all ranks, and return the strings that all ranks sent, by rank.

    All ranks must call this function equally often. The ranks use it to agree whether to take
    another step. A rank that took more steps than another rank would wait in a collective for ever.
    """
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return [word]
    words = [""] * ranks
    distributed.all_gather_object(words, word, group=_group(distributed.group.WORLD))
    return words
