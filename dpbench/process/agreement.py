"""What the ranks of a case tell each other outside their steps, without a collective on a GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dpbench.training.parallel import rank_and_ranks

FOR_EVER = timedelta(days=30)  # whoever started the ranks ends them if one does not come


@cache
def _store() -> Any:
    """The launcher's store, by a connection that has nothing to do with the process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=FOR_EVER)
    return PrefixStore("dpbench", store)


def said_by_all(word: str) -> list[str]:
    """Tell all ranks a word, and wait for theirs; those of all, by rank.

    Ranks must take equally many steps, or some wait in a collective for ever: what decides how
    many it asks here, between two steps. All ranks ask in the same order.
    """
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return [word]
    turn = _store().add(f"turn of {rank}", 1)
    _store().set(f"{turn} by {rank}", word)
    said = (_store().get(f"{turn} by {each}") for each in range(ranks))
    return [word.decode() for word in said]
