"""Verifies several trainers in one group of ranks; each group takes a second to start."""

from __future__ import annotations

import os
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import dpbench
from dpbench import Batch, Workload
from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.instruments.interface import Instrument, Running
from dpbench.process.build import pick_device
from dpbench.process.command_line import arguments
from dpbench.process.forked import COMMAND, environment_of_cases, fork
from dpbench.process.messages import MARK, last_record
from dpbench.registry import resolve
from dpbench.verify.checks import STEPS, verify
from dpbench.verify.reference import distances
from dpbench.verify.subject import Subject

CPU = pick_device("cpu")
MARKED = "0123456789abcdef "
REPOSITORY = Path(__file__).parents[2]

ROWS, WIDTH, LENGTH = 12, 64, 4


class Small(Workload):
    """A layer of each kind that private trainers know; FSDP2 takes its time for each."""

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
"""What is wrong by check, or the words of a refusal under ``refused``."""


@dataclass(frozen=True)
class Verified(Instrument):
    """Takes no steps of the case: it verifies trainers over the case's ranks."""

    name: ClassVar[str] = "verified"
    pairs: str = dpbench.option(
        "trainers and how they are parallel", "", metavar="TRAINER@PARALLEL"
    )

    @classmethod
    def measures(cls, subject: str) -> bool:
        return True

    def start(self, case: Case) -> Running:
        raise NotImplementedError

    def observe(self, case: Case) -> dict[str, Any]:
        return {pair: self.wrong(case, *pair.split("@")) for pair in self.pairs.split()}

    def wrong(self, case: Case, trainer: str, parallel: str) -> Wrong:
        case = resolve(replace(case, trainer=trainer, parallel=parallel))
        try:
            if trainer == "standard":
                return unclipped(case)
            return {check.name: [*check.wrong] for check in verify(case, "cpu") if not check.passed}
        except ConfigurationError as error:
            return {"refused": [str(error)]}


def unclipped(case: Case) -> Wrong:
    """What is wrong with the gradients of the standard trainer: the means over the joint batch."""
    subject = Subject(case, CPU, STEPS)
    examples = subject.examples()
    means = [each.mean(each.norms.new_ones(each.norms.shape)) for each in examples]
    seen = subject.steps(case, STEPS)
    far = [distances(s, m, e.sizes) for s, m, e in zip(seen, means, examples, strict=True)]
    off = [f"{name}: off by {d:.2g}" for step in far for name, d in step.items() if d > 1e-5]
    return {"gradient": off} if off or subject.apart else {}


def wrong_over_ranks(pairs: list[str], ranks: int, folder: Path) -> dict[str, Wrong]:
    """What is wrong with each of these trainers, written ``TRAINER@PARALLEL``."""
    workload = f"{__name__}:{Small.__name__}"
    case = Case(
        "standard", 4 * ranks, workload=workload, micro_batches=2, parallel="ddp", gpus=ranks
    )
    options = ["--instrument", f"{__name__}:Verified", "--pairs", " ".join(pairs)]
    command = [*COMMAND, "step", *arguments(case), *options, "--device", "cpu"]
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    said = {MARK: MARKED, "PYTHONPATH": os.pathsep.join(paths)}
    log = folder / "log.txt"
    with log.open("w") as output:
        kept: dict[str, Any] = {"stdout": output, "env": environment_of_cases() | said}
        process = fork(command, kept) or subprocess.Popen(command, stderr=output, **kept)
        code = process.wait()
    record = last_record(log.read_text().splitlines(), MARKED)
    assert code == 0, log.read_text()
    return {pair: record[pair] for pair in pairs}
