"""What a private step must at least move, counted without a GPU: the floor of any method."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from dpbench.case import PHASES, Case
from dpbench.instruments.logical.logical import Logical, untouched_torch
from dpbench.results.frame import summarise, to_frame
from dpbench.results.rows import STEP

BYTES = ("logical_read_bytes", "logical_write_bytes")


def floor(case: Case) -> dict[str, float]:
    """Logical bytes by phase that flat clipping needs at least, if kernels share nothing.

    A standard step, and in ``clip`` what the norms must read again: each layer's input and its
    output's gradient. Norms come before gradients can be weighted, so neither can be used while it
    is read for the gradient. Noise that is drawn while parameters are updated moves nothing.
    """
    standard = by_phase(replace(case, trainer="standard"))
    phases = {phase: standard[phase]["bytes"] for phase in PHASES if phase in standard}
    return phases | {"clip": float(read_by_norms(case))}


def by_phase(case: Case) -> dict[str, dict[str, float]]:
    """By phase, and for the step, what a case is counted to move, compute and keep in memory."""
    summary = summarise(to_frame(Logical().measure(case)))
    wide = summary.pivot_table(values="value", index="phase", columns="metric")
    wide["bytes"] = wide[[*BYTES]].sum(axis="columns")
    names = [str(name) for name in wide.columns]
    values = zip(wide.index, wide.to_numpy().tolist(), strict=True)
    return {str(phase): dict(zip(names, line, strict=True)) for phase, line in values}


def read_by_norms(case: Case) -> int:
    """Bytes of the inputs and outputs of all modules that have parameters to be trained.

    A gradient has the bytes of the output that it belongs to.
    """
    import torch
    from torch.utils import _pytree as pytree

    from dpbench.instruments.logical.counter import without_data
    from dpbench.process.build import build

    total = 0

    def add(module: object, given: object, out: object) -> None:
        nonlocal total
        leaves = pytree.tree_leaves((given, out))
        total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    once = replace(
        case,
        trainer="standard",
        activation_checkpointing="off",
        batch_size=case.batch_size // case.gpus,
        parallel="none",
        gpus=1,
    )
    with untouched_torch(), without_data():
        trainer, (batch,) = build(once, torch.device("cpu"), 1)
        for module in trainer.model.modules():
            if any(each.requires_grad for each in module.parameters(recurse=False)):
                module.register_forward_hook(add)
        trainer.train_step(batch)
    return total


def measured(frame: pd.DataFrame, cases: Iterable[Case]) -> dict[Case, dict[str, float]]:
    """Of a run's numbers, those of the whole steps of these cases that hardware has measured."""
    steps = frame[(frame.phase == STEP) & (frame.instrument != "logical")]
    found: dict[Case, dict[str, float]] = {case: {} for case in cases}
    for row in steps.to_dict("records"):
        if (of := found.get(Case.from_row(row))) is not None:
            of.setdefault(row["metric"], row["value"])
    return found
