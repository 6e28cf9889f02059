"""A trainer on one linear layer, of whose examples any gradient can be asked.

A workload's own examples have ordinary gradients. Here an example says what goes into the layer and
what gradient comes back to it, so that norms can cancel, overflow or be no number; and steps are so
cheap that many are taken. What a trainer does to other kinds of layers, this does not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.child.build import workload_of
from dpbench.core.case import Case
from dpbench.core.registry import resolve
from dpbench.training.base import Batch
from dpbench.verify.check import NOT_JUDGED, Check
from dpbench.verify.noise import check_noise
from dpbench.verify.reference import Gradients
from dpbench.verify.verification import SIGMA, Verification
from dpbench.workloads.base import Workload

OUT = 32
"""Features that come out."""
MANY = 240
"""Steps of noise: half a million elements, of which none beyond 4σ is no chance."""
TINY = 1e-8
"""Of the smallest norm: a threshold beside which an unclipped gradient is large, for any σ here."""
SHAPES = ((2, 64), (128, 32), (16, 256))
"""Tokens of an example and their features: for noise, and two in which norms cancel."""
BESIDE = 1e-9
"""Of the gradients of other examples: beside that of one they are nothing."""
TRIES = 8
"""Examples of tokens alike: of norms that rounding makes, half are too small."""
SLACK = 0.1
"""Rounding of what others add to a step, as a part of C/B."""
NOT_FINITE = (math.nan, math.inf, 1e30)
"""Of the last the square overflows."""


class LinearLayer(Workload):
    """The sum of a layer's outputs, each times the gradient that it is to have.

    Args:
        length: tokens of an example.
        width: features that go in.
    """

    def __init__(self, *, length: int = 2, width: int = 64) -> None:
        self.length, self.width = length, width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, OUT))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            shape = batch_size, self.length
            yield torch.randn(*shape, self.width), torch.randn(*shape, OUT)

    def losses(self, model: Any, batch: Batch) -> Tensor:
        given, gradients = batch
        losses: Tensor = (model(given) * gradients).flatten(1).sum(1)
        return losses

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return model.children()


def check_layer(case: Case, device: torch.device, clips: str) -> Iterator[Check]:
    """The checks of a case's trainer on a linear layer, at its precision and over its ranks.

    A trainer that does not train it is not judged by them.
    """
    names = f"noise: {MANY} steps", "tokens alike", "norms not finite"
    try:
        on_layers = [Verification(layer_case(case, *s), device, clips) for s in SHAPES]
        checks = [_noise(names[0], on_layers[0])]
    except Exception as error:
        words = f"trains no linear layer: {' '.join(str(error).split()) or type(error).__name__}"
        yield from (Check(name, NOT_JUDGED, "", words[:80]) for name in names)
        return
    yield from checks
    yield _tokens_alike(names[1], on_layers[1:])
    yield _not_finite(names[2], on_layers[0])


def layer_case(case: Case, length: int, width: int) -> Case:
    """A small case of a linear layer that a case's trainer trains."""
    parts = min(case.micro_batches, 2)
    return resolve(
        Case(
            case.trainer,
            2 * parts * case.gpus,
            precision=case.precision,
            workload=f"{__name__}:{LinearLayer.__name__}:length={length},width={width}",
            micro_batches=parts,
            parallel=case.parallel,
            gpus=case.gpus,
        )
    )


def _noise(name: str, layer: Verification) -> Check:
    """All that is wrong with the noise of many steps, in each of which gradients are clipped."""
    draws = layer.draws(layer.paths[0], SIGMA, TINY * layer.below_all, MANY)
    checks = [*check_noise(draws, layer.subject.dtype, "parameters, steps")]
    wrong = [f"{c.name.removeprefix('noise: ')}: {line}" for c in checks for line in c.wrong]
    return Check.of(name, wrong, "", checks[0].far)


def _tokens_alike(name: str, layers: Sequence[Verification]) -> Check:
    """Whether an example is clipped whose tokens share an offset that their gradients cancel.

    A norm from products of tokens is a sum of large terms of both signs there, and rounding may
    leave anything of it, also less than nothing.
    """
    precise = layers[0].case.precision == "fp32"
    offset, off = (1e4, 1e-3) if precise else (100.0, torch.finfo(torch.bfloat16).eps)
    wrong, most = [], 0.0
    for layer in layers:
        for path in layer.paths:
            size = path.case.batch_size
            batches = [_alike(layer, size, offset, paired=i % 2 == 0) for i in range(TRIES)]
            seen = layer.subject.steps(path.case, TRIES, batches, 0.0, 1.0)
            worst = max(size * _norm(step) for step in seen)
            most = max(most, worst)
            if not worst <= 1 + off:
                words = f"tokens that share an offset of {offset:g}{path.words}"
                wrong.append(f"an example of {words} moves parameters by {worst:.4g} C/B")
    return Check.of(name, wrong, "", f"{most:.4g} C/B (≤ {1 + off:.4g})")


def _alike(layer: Verification, size: int, offset: float, *, paired: bool) -> Batch:
    """A batch whose first example has tokens alike; beside it the others are nothing."""
    given, gradients = next(iter(workload_of(layer.case).batches(1)))
    if paired:
        gradients[:, 1::2] = -gradients[:, ::2]
    gradients = gradients - gradients.mean(1, keepdim=True)
    gradients = torch.cat([gradients, BESIDE * gradients.expand(size - 1, -1, -1)])
    given = (given + offset).expand(size, -1, -1)
    return tuple(t.to(layer.subject.device, layer.subject.dtype) for t in (given, gradients))


def _not_finite(name: str, layer: Verification) -> Check:
    """Whether an example is let through for a norm that is no number, or too large for one.

    Right is what keeps the example from moving what stays finite by more than C/B: to refuse it, to
    leave it out, to clip it, or to leave nothing finite.
    """
    if layer.case.gpus > 1:
        return Check(name, NOT_JUDGED, "", "over ranks: one that refuses lets others wait")
    wrong, most, threshold = [], 0.0, layer.below_all
    for path in layer.paths:
        factors = path.examples[0].factors(layer.clips, threshold).clone()
        factors[0] = 0
        others = path.examples[0].mean(factors)
        for value, which in product(NOT_FINITE, range(2)):
            batch = [tensor.clone() for tensor in path.batches[0]]
            for tensor in batch:
                tensor[0] *= 10
            batch[which][0, 0, 0] = value
            try:
                [seen] = layer.subject.steps(path.case, 1, [tuple(batch)], 0.0, threshold)
            except Exception:
                continue  # refused
            moved = {n: (g - others[n]).nan_to_num(0, 0, 0) for n, g in seen.items()}
            times = _norm(moved) * path.case.batch_size / threshold
            most = max(most, times)
            if times > 1 + SLACK:
                where = ("what goes in", "the gradient of what comes out")[which]
                words = f"an example with {value} in {where}{path.words}"
                wrong.append(f"{words} moves finite parameters by {times:.4g} C/B")
    return Check.of(name, wrong, "", f"{most:.4g} C/B (≤ {1 + SLACK:g})")


def _norm(gradients: Gradients) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())
