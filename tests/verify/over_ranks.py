"""Verifies several trainers in one process group, because a group takes a second to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dpbench
from dpbench import Batch, Workload
from dpbench.child.build import build, pick_device
from dpbench.child.messages import RECORDS, reported
from dpbench.child.task import Task
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement
from dpbench.results.outcome import Outcome
from dpbench.training import clipped_sums
from dpbench.training.fused import FusedTrainer
from dpbench.verify.reference import distances
from dpbench.verify.trained_model import TrainedModel
from dpbench.verify.trainer_checks import verification_of, verify_here
from dpbench.verify.verification import STEPS

CPU = pick_device("cpu")
REPOSITORY = Path(__file__).parents[2]

ROWS, WIDTH, LENGTH = 12, 64, 4


class Small(Workload):
    """One layer of each kind that private trainers know, and no more: FSDP2 is slow per layer."""

    def model(self) -> nn.Module:
        layers = OrderedDict[str, nn.Module](
            embedding=nn.Embedding(ROWS, WIDTH),
            inner=nn.Linear(WIDTH, WIDTH),
            norm=nn.LayerNorm(WIDTH),
            head=nn.Linear(WIDTH, ROWS, bias=False),
        )
        return nn.Sequential(layers)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.randint(ROWS, (batch_size, LENGTH))

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        losses: Tensor = (3 * model(batch)).sin().flatten(1).sum(1)
        return losses

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model.inner]


Wrong = dict[str, list[str]]
"""Messages by failed check, or that of a refusal under ``refused``."""


class Apart(FusedTrainer):
    """Reduces matrices one by one and the rest together, as if matrices were large."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        with patch.object(clipped_sums, "LARGE", ROWS * WIDTH):
            super().__init__(model, **options)

    def train_step(self, batch: Batch) -> Tensor:
        with patch.object(clipped_sums, "LARGE", ROWS * WIDTH):
            return super().train_step(batch)


@dataclass(frozen=True)
class Verified(Instrument):
    """Verifies other trainers over the ranks of its case, and takes no step of the case."""

    name: ClassVar[str] = "verified"
    by_rank: ClassVar[bool] = True
    pairs: str = dpbench.option("written TRAINER@PARALLEL, or with @OPTIMIZER", "", metavar="PAIRS")
    counted: str = dpbench.option("those of which a step is counted", "", metavar="PAIRS")
    layer: bool = dpbench.option("also verify them on a linear layer", False)

    @classmethod
    def measures(cls, subject: str) -> bool:
        return True

    def start(self, case: Case) -> PendingMeasurement:
        raise NotImplementedError

    def record_case(self, case: Case) -> Outcome:
        wrong = {pair: self.wrong(case, *pair.split("@")) for pair in self.pairs.split()}
        counts = {pair: second_step(case, *pair.split("@")) for pair in self.counted.split()}
        return Outcome(case, (), details={"wrong": wrong, "counts": counts})

    def wrong(self, case: Case, trainer: str, parallel: str, optimizer: str = "sgd") -> Wrong:
        case = resolve(replace(case, trainer=trainer, parallel=parallel, optimizer=optimizer))
        try:
            if trainer == "standard":
                return unclipped(case)
            if self.layer:
                checks = verify_here(case, "cpu")
            else:
                checks = [*verification_of(case, CPU).checks(())]
            return {check.name: [*check.wrong] for check in checks if not check.passed}
        except ConfigurationError as error:
            return {"refused": [str(error)]}


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.mv}


class Counts(TorchDispatchMode):
    """Counts calls and bytes of collectives, and normal numbers drawn.

    ``order`` has an r for each reduction over ranks, and an m for each product of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {"calls": 0, "bytes": 0, "drawn": 0, "order": ""}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves((args, made)) if isinstance(t, Tensor)]
        packet = func.overloadpacket
        if "reduce" in str(packet):
            self.found["order"] += "r"
        elif packet in PRODUCTS:
            self.found["order"] += "m"
        if func.namespace == "c10d":
            self.found["calls"] += 1
            self.found["bytes"] += max(t.nbytes for t in tensors)
        elif "normal" in str(func):
            self.found["drawn"] += max(t.numel() for t in tensors)
        return made


def second_step(case: Case, trainer: str, parallel: str) -> dict[str, Any]:
    """The counts of one rank in its second step, which later steps equal."""
    case = resolve(replace(case, trainer=trainer, parallel=parallel, micro_batches=1))
    made, batches = build(case, CPU, 2)
    made.train_step(batches[0])
    with Counts() as counts:
        made.train_step(batches[1])
    return counts.found


def unclipped(case: Case) -> Wrong:
    """What is wrong with the standard trainer's gradients, which must be means over the batch."""
    subject = TrainedModel(case, CPU, STEPS)
    examples = subject.examples()
    means = [each.mean(each.norms.new_ones(each.norms.shape)) for each in examples]
    seen = subject.steps(case, STEPS, subject.batches)
    far = [distances(s, m, e.sizes) for s, m, e in zip(seen, means, examples, strict=True)]
    off = [f"{name}: off by {d:.2g}" for step in far for name, d in step.items() if d > 1e-5]
    return {"gradient": off} if off or subject.differ_between_ranks else {}


def small(trainer: str, ranks: int) -> list[str]:
    """The arguments of a case of `Small` under DDP."""
    workload = f"{__name__}:{Small.__name__}"
    words = ["--trainer", trainer, "--batch-size", f"{4 * ranks}", "--workload", workload]
    return [*words, "--parallel", "ddp", "--gpus", f"{ranks}"]


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a ``dpbench`` command on the CPU; return its exit code and output."""
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    said = {RECORDS: str(folder / "records"), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "dpbench", *words, "--device", "cpu"]
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | said,
        text=True,
    )
    return process.returncode, process.stdout


def over_ranks(
    pairs: list[str], counted: list[str], ranks: int, folder: Path, *, layer: bool = False
) -> dict[str, Any]:
    """Verify ``pairs``, each ``TRAINER@PARALLEL``; return ``wrong``, and ``counts`` of others."""
    workload, gpus = f"{__name__}:{Small.__name__}", {"parallel": "ddp", "gpus": ranks}
    case = Case("standard", 4 * ranks, workload=workload, micro_batches=2, **gpus)  # type: ignore[arg-type]
    Task(case, Verified(" ".join(pairs), " ".join(counted), layer)).write(folder / "task.json")
    code, text = run(["step", "--task", str(folder / "task.json")], folder)
    assert code == 0, text
    outcome = reported(folder / "records")
    assert outcome
    return dict(outcome.details)
