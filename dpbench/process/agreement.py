"""What the ranks of a case tell each other outside their steps, without a collective on a GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dpbench.errors import ConfigurationError
from dpbench.training.parallel import rank_and_ranks

FOR_EVER = timedelta(days=30)  # whoever started the ranks ends those that wait in vain


@cache
def _store() -> Any:
    """The launcher's store, by a connection that has nothing to do with the process group."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigurationError(
            "ranks must agree on their steps by a store, which MASTER_ADDR and MASTER_PORT name: "
            "start them by torchrun"
        )
    store = TCPStore(host, int(port), is_master=False, timeout=FOR_EVER)
    return PrefixStore("dpbench", store)


def said_by_all(word: str) -> list[str]:
    """Send a word to all ranks, and wait for theirs; returns the words by rank.

    Ranks must take equally many steps, or some would wait in a collective for ever. So ranks agree
    here, between two steps, how many they take. All ranks must call it in the same order.

    Raises:
        ConfigurationError: the ranks were started without a store.
    """
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return [word]
    turn = _store().add(f"turn of {rank}", 1)
    _store().set(f"{turn} by {rank}", word)
    said = (_store().get(f"{turn} by {each}") for each in range(ranks))
    return [word.decode() for word in said]
