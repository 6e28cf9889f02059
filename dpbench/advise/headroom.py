"""The minimum bytes of a private step, counted without a GPU, and what cases need beyond it."""

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
    """The minimum logical bytes of flat clipping by phase, without caches between kernels.

    It is a standard step, plus in ``clip`` what norms must read again: each layer's input and its
    output's gradient, or the per-sample gradients. All norms must be known before any gradient is
    weighted, so one read cannot serve both. Noise drawn in the update moves nothing. The floor is
    for one rank's batch without micro-batches; accumulation and reduction over ranks come on top,
    and depend on the method.
    """
    standard = by_phase(_standard_of_rank(case))
    phases = {phase: standard[phase]["bytes"] for phase in PHASES if phase in standard}
    return phases | {"clip": float(read_by_norms(case))}


def _standard_of_rank(case: Case) -> Case:
    """The standard case of one rank's batch, without micro-batches."""
    case = replace(case.baseline, micro_batches=1)
    return replace(case, batch_size=case.batch_size // case.gpus, parallel="none", gpus=1)


def by_phase(case: Case) -> dict[str, dict[str, float]]:
    """The logical metrics of a case, and its bytes, by phase and for the step."""
    counted = own_values(summary(to_frame(Logical().measure(case))))
    wide = counted.pivot_table(values="value", index="phase", columns="metric")
    wide["bytes"] = wide[[*BYTES]].sum(axis="columns")
    names = [str(name) for name in wide.columns]
    values = zip(wide.index, wide.to_numpy().tolist(), strict=True)
    return {str(phase): dict(zip(names, line, strict=True)) for phase, line in values}


def read_by_norms(case: Case) -> int:
    """The minimum bytes that norms of all modules with trained parameters read.

    For each module: its inputs and output gradients, which are as large as the outputs, or its
    per-sample gradients if they are smaller.
    """
    import torch
    from torch.utils import _pytree as pytree

    from dpbench.child.build import build
    from dpbench.instruments.logical.counter import without_data

    case = replace(_standard_of_rank(case), activation_checkpointing="off")
    passing: Counter[torch.nn.Module] = Counter()

    def add(module: torch.nn.Module, given: object, out: object) -> None:
        leaves = pytree.tree_leaves((given, out))
        passing[module] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def gradients(module: torch.nn.Module) -> int:
        own = module.parameters(recurse=False)
        return case.batch_size * sum(each.nbytes for each in own if each.requires_grad)

    with untouched_torch(), without_data():
        trainer, (batch,) = build(case, torch.device("cpu"), 1)
        for module in filter(gradients, trainer.model.modules()):
            module.register_forward_hook(add)
        trainer.train_step(batch)
        return sum(min(size, gradients(module)) for module, size in passing.items())


def measured(summary: pd.DataFrame, cases: Iterable[Case]) -> dict[Case, dict[str, float]]:
    """Measured metrics of the cases' whole steps, by case; logical counts are left out.

    If two instruments measured a metric, the one that its definition prefers counts.
    """
    by_hardware = summary[(summary.phase == STEP) & (summary.instrument != "logical")]
    found: dict[Case, dict[str, float]] = {case: {} for case in cases}
    for row in of_one_instrument(by_hardware).to_dict("records"):
        if (metrics := found.get(row["case"])) is not None:
            metrics[row["metric"]] = row["value"]
    return found
