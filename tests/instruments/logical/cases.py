"""Small cases for tests of the logical instrument, and helpers that read their counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import Any

import torch

from dpbench.core.case import Case
from dpbench.core.registry import MODELS, TRAINERS
from dpbench.instruments.logical.counter import OperatorCounter
from dpbench.instruments.logical.logical import Logical
from dpbench.results.outcome import Outcome

DP_TRAINERS = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
ALL_TRAINERS = ("standard", *DP_TRAINERS)


def tiny(
    trainer: str | type = "standard",
    *,
    model: str | type = "simple",
    batch_size: int = 4,
    seq_len: int = 16,
    **options: Any,
) -> Case:
    """A case of one layer; a trainer or model that is a class is registered first."""
    for registry, chosen in ((TRAINERS, trainer), (MODELS, model)):
        if isinstance(chosen, type):
            registry.register(chosen.__name__, chosen)
    names = [chosen if isinstance(chosen, str) else chosen.__name__ for chosen in (trainer, model)]
    return Case(names[0], batch_size, seq_len, "200x32x1x2", model=names[1], **options)


@cache
def count(case: Case) -> Outcome:
    """Count a case once for all tests: a test shows that counts do not change."""
    return Logical().count(case)


def parameters(case: Case) -> list[int]:
    """Elements of each parameter of a case's model."""
    with torch.device("meta"):
        model = MODELS[case.model](case.size, attention=case.attention)
    return [parameter.numel() for parameter in model.parameters()]


def values(result: Outcome) -> dict[tuple[str, str], float]:
    return {(row.phase, row.metric): row.value for row in result.rows}


def moved(result: Outcome, where: str) -> tuple[float, float]:
    found = values(result)
    return found[where, "logical_read_bytes"], found[where, "logical_write_bytes"]


def guessed(result: Outcome) -> set[str]:
    """Operators whose bytes are guessed from their schema."""
    return {count.operator for count in result.operators if count.general_rule}


def totals(counter: OperatorCounter) -> dict[tuple[str, str], Counter[str]]:
    """Calls, bytes and FLOPs by phase and operator."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in counter.operators:
        for what in ("calls", "read_bytes", "write_bytes", "flops", "collective_bytes"):
            found[each.phase, each.operator][what] += getattr(each, what)
    return found
