"""What a private step must at least move, counted without a GPU: the floor of any method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from dpbench.core.case import PHASES, Case
from dpbench.instruments.logical.logical import Logical, untouched_torch
from dpbench.results.rows import STEP
from dpbench.results.summary import of_one_instrument, own_values, summary, to_frame

BYTES = ("logical_read_bytes", "logical_write_bytes")


def floor(case: Case) -> dict[str, float]:
    """Logical bytes by phase that flat clipping needs at least, if kernels share nothing.

    A standard step, and in ``clip`` what the norms must read again: each layer's input and its
    output's gradient, or each example's gradient. Norms come before gradients can be weighted, so
    none can be used while it is read for the gradient. Noise that is drawn while parameters are
    updated moves nothing. It is of one rank's batch, trained at once: to accumulate over
    micro-batches or to reduce over ranks takes more, how much more is the method's own.
    """
    standard = by_phase(_at_once(case))
    phases = {phase: standard[phase]["bytes"] for phase in PHASES if phase in standard}
    return phases | {"clip": float(read_by_norms(case))}


def _at_once(case: Case) -> Case:
    """A standard step of one rank's batch, without micro-batches."""
    case = replace(case.baseline, micro_batches=1)
    return replace(case, batch_size=case.batch_size // case.gpus, parallel="none", gpus=1)


def by_phase(case: Case) -> dict[str, dict[str, float]]:
    """By phase, and for the step, what a case is counted to move, compute and keep in memory."""
    counted = own_values(summary(to_frame(Logical().measure(case))))
    wide = counted.pivot_table(values="value", index="phase", columns="metric")
    wide["bytes"] = wide[[*BYTES]].sum(axis="columns")
    names = [str(name) for name in wide.columns]
    values = zip(wide.index, wide.to_numpy().tolist(), strict=True)
    return {str(phase): dict(zip(names, line, strict=True)) for phase, line in values}


def read_by_norms(case: Case) -> int:
    """Bytes that the norms of all modules with parameters to be trained read at least.

    Of each module its inputs and outputs, a gradient having the bytes of the output that it belongs
    to, or one gradient of each example, if these are fewer bytes.
    """
    import torch
    from torch.utils import _pytree as pytree

    from dpbench.child.build import build
    from dpbench.instruments.logical.counter import without_data

    once = replace(_at_once(case), activation_checkpointing="off")
    passing: Counter[torch.nn.Module] = Counter()

    def add(module: torch.nn.Module, given: object, out: object) -> None:
        leaves = pytree.tree_leaves((given, out))
        passing[module] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def gradients(module: torch.nn.Module) -> int:
        own = module.parameters(recurse=False)
        return once.batch_size * sum(each.nbytes for each in own if each.requires_grad)

    with untouched_torch(), without_data():
        trainer, (batch,) = build(once, torch.device("cpu"), 1)
        for module in filter(gradients, trainer.model.modules()):
            module.register_forward_hook(add)
        trainer.train_step(batch)
        return sum(min(size, gradients(module)) for module, size in passing.items())


def measured(summary: pd.DataFrame, cases: Iterable[Case]) -> dict[Case, dict[str, float]]:
    """Of a run's numbers, those of the whole steps of these cases that hardware has measured.

    Of two instruments' it is that of the one which the definition of the metric prefers.
    """
    by_hardware = summary[(summary.phase == STEP) & (summary.instrument != "logical")]
    found: dict[Case, dict[str, float]] = {case: {} for case in cases}
    for row in of_one_instrument(by_hardware).to_dict("records"):
        if (of := found.get(row["case"])) is not None:
            of[row["metric"]] = row["value"]
    return found
