"""Runs all checks of a trainer, on the model of a case and on a linear layer.

The batches of a workload need not contain difficult examples. In the linear layer, chosen inputs
and output gradients make the contributions of an example's tokens to the example's norm cancel, or
make norms overflow or become NaN. Many examples may also be equal, or a layer be added between two
steps. Layers of other kinds are not checked in this way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.child.build import build, labels_of, pick_device, workload_of
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parted, read_parameters
from dpbench.core.registry import names_of, resolve
from dpbench.launch.processes import new_process
from dpbench.launch.ranks import on_all_ranks
from dpbench.training.base import Batch
from dpbench.training.correlated_noise import INDEPENDENT
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check_result import IN_RANK_0, NOT_JUDGED, NOTE, Check, used
from dpbench.verify.noise import check_noise
from dpbench.verify.reference import CLIPS, Gradients
from dpbench.verify.verification import ROUNDED_SIGMA, SIGMA, Verification
from dpbench.workloads.base import Workload

CHOSEN_BY_VERIFY = ("learning_rate", "noise_multiplier", "max_grad_norm")
"""Parameters of trainers that the checks set, so the trainer's name must not contain them."""

OTHER_PROCESS_SEED = 1000
"""Seed of the run in the other process. This process uses the seeds 1, 20 000, 3, 40 000, …"""

OUT_FEATURES = 32
NOISE_STEPS = 240
"""Number of noisy steps. Together they have half a million elements of noise. In so many elements,
some must be more than 4 standard deviations from zero."""
LEFT_STEPS = 60
"""Number of steps after which `Verification.left_behind` judges what they leave."""
NOISE_THRESHOLD = 1e-8
"""Clipping threshold of the noisy steps, as a share of `Verification.below_all`. It is so small
that an unclipped gradient is visible in the noise."""
SHAPES = ((2, 64), (128, 32), (16, 256))
"""Pairs of an example's number of tokens and number of input features. The first pair is for the
noise and for `_not_finite`, the other pairs are for `_tokens_alike`."""
SMALL_SHARE = 1e-9
"""Factor by which `_tokens_alike` scales the gradients of all examples of a batch except the
first."""
TRIES = 8
"""Number of batches in `_tokens_alike`. Rounding makes some norms too large and others too small,
and only a norm that is too small makes a clipped gradient too large."""
SLACK = 0.1
"""Share of C/B by which `_not_finite` allows an example to exceed C/B, because the gradients of the
other examples have rounding errors. C is the clipping threshold and B the batch size."""
OVER_RANKS = "with several ranks: if one rank refused, the others would wait"
"""Reason why a check is not judged."""
NOT_FINITE = (math.nan, math.inf, 1e30)
"""Values that replace one element of the inputs or of the output gradients. The square of 1e30
overflows float32."""

ALIKE = 320
"""Number of equal examples in `_examples_alike`. Their sum is a number from 256 to 512 times one of
them. In this range, numbers of 8 bits differ by 2."""
FRACTIONS = (0.25, 0.75)
"""Factors of one more example's gradient in `_examples_alike`, one for each pair of steps."""
ALIKE_SIGMA = 0.02
"""Noise multiplier in `_examples_alike`. The noise of an element is about 2 times the gradient of
an example, so that a parameter in 16 bits is rounded up or down by chance."""
MOST_ALIKE = 1.25
"""Largest change of the sum in `_examples_alike`. The rounding of 2080 elements changes it by 0.02
(standard deviation)."""


def verify(case: Case, device: str = "auto", *, processes: bool = False) -> list[Check]:
    """Check the trainer of a case. If the case has several ranks, start a process for each rank.

    Args:
        case: a small case. If its batch has several micro-batches, training the undivided batch is
            checked too.
        device: ``auto``, ``cpu`` or ``cuda``.
        processes: whether to compare the noise with the noise of a newly started process.

    Raises:
        ConfigurationError: the trainer refuses the case, or there is nothing to verify.
    """
    if case.gpus == 1:
        return verify_here(case, device, processes=processes)
    import_module("torch._dynamo")  # the first optimizer would import this in each fork
    with _other_process(case, device, processes) as steps:
        work = partial(verify_here, device=device, other_process=[*steps])
    return on_all_ranks(work, case, device)[0]


def verify_here(
    case: Case, device: str, other_process: Iterable[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """Check a case in this process. Every rank must call this, because ranks step together.

    Gradients are compared with the gradients of the joint batch of all ranks. Only rank 0 judges
    the noise.

    Args:
        case: see `verify`.
        device: see `verify`.
        other_process: noisy steps of another process.
        processes: whether to start that other process now.
    """
    place = pick_device(device)
    if refused := [
        name for name in read_parameters(parted(case.trainer)[1]) if name in CHOSEN_BY_VERIFY
    ]:
        raise ConfigurationError(f"verify chooses {refused[0]}: leave it out of the trainer's name")
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        verification = verification_of(case, place)
        with _other_process(case, device, processes) as steps:
            steps = steps if processes else other_process
            if place.type == "cuda":  # its memory may not suffice for both processes
                steps = [*steps]
            checks = [*verification.checks(steps)]
            return [*checks, *check_layer(case, place, verification.clips, verification.weights)]


def verification_of(case: Case, device: torch.device) -> Verification:
    """Return the checks of a trainer on its case, or refuse a trainer that is not private."""
    trainer, _ = build(case, device, 1)
    if isinstance(trainer, StandardTrainer):
        raise ConfigurationError(
            f"trainer {case.trainer} clips nothing and adds no noise, so verify has nothing to "
            f"check"
        )
    clips = labels_of(trainer).get("clips", "flat")
    if clips not in CLIPS:
        raise unknown(f"label clips of trainer {case.trainer}", clips, CLIPS)
    weights = getattr(trainer, "noise_weights", INDEPENDENT)
    del trainer
    return Verification(case, device, clips, weights)


@contextmanager
def _other_process(case: Case, device: str, starts: bool) -> Iterator[Iterable[Gradients]]:
    """Start a process that takes a case's noisy steps, if it ``starts``.

    Yield the updates, as float64 on the CPU. Iterating over them waits for the process.
    """
    if not starts:
        yield []
        return
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    with new_process() as pool:
        taken = pool.submit(_take_noisy_steps, replace(case, **spelled), device)

        def steps() -> Iterator[Gradients]:
            for step in taken.result():
                yield {name: torch.from_numpy(g).double() for name, g in step.items()}

        yield steps()


def _take_noisy_steps(case: Case, device: str) -> list[dict[str, Any]]:
    case = resolve(case)
    work = partial(_noise_of_rank, device)
    import_module("torch._dynamo")  # the first optimizer would import this in each fork
    return work(case) if case.gpus == 1 else on_all_ranks(work, case, device)[0]


def _noise_of_rank(device: str, case: Case) -> list[dict[str, Any]]:
    steps = verification_of(case, pick_device(device)).steps_elsewhere(OTHER_PROCESS_SEED)
    return [{name: g.float().cpu().numpy() for name, g in step.items()} for step in steps]


# --- a linear layer ------------------------------------------------------------------------------


class LinearLayer(Workload):
    """A linear layer with chosen output gradients.

    The loss is the sum of output × chosen gradient. So the gradient of the loss with respect to the
    output is the chosen gradient.

    Args:
        length: number of tokens of an example.
        width: number of input features.
    """

    def __init__(self, *, length: int = 2, width: int = 64) -> None:
        self.length, self.width = length, width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, OUT_FEATURES))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            shape = batch_size, self.length
            yield torch.randn(*shape, self.width), torch.randn(*shape, OUT_FEATURES)

    def losses(self, model: Any, batch: Batch) -> Tensor:
        inputs, gradients = batch
        losses: Tensor = (model(inputs) * gradients).flatten(1).sum(1)
        return losses

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return model.children()


def check_layer(
    case: Case, device: torch.device, clips: str, weights: Sequence[float]
) -> Iterator[Check]:
    """Yield the checks on a linear layer, with the case's precision and ranks.

    If the trainer cannot train a linear layer, the checks are not judged.
    """
    all_steps = f"{NOISE_STEPS} steps"
    names = [f"gradient: {all_steps}", f"noise: {all_steps}", "tokens alike", "norms not finite"]
    names.append("layer added later")
    names += ["examples alike"] * (case.precision.startswith("bf16"))
    try:
        noisy, *others = [
            Verification(layer_case(case, *s), device, clips, weights) for s in SHAPES
        ]
        whole, threshold = noisy.batchings[0], NOISE_THRESHOLD * noisy.below_all
        gradient = noisy.gradient("", whole, noisy.half, ROUNDED_SIGMA, NOISE_STEPS)
        for other in others:
            other.model.keeps_weights = noisy.model.keeps_weights
            other.model.judges_received = noisy.model.judges_received
        draws = noisy.draws(whole, SIGMA, threshold, NOISE_STEPS)
    except Exception as error:
        why = f"trains no linear layer: {' '.join(str(error).split()) or type(error).__name__}"
        yield from (Check(name, NOT_JUDGED, "", "", [why]) for name in names)
        return
    yield replace(gradient, name=names[0])
    left = noisy.left_behind(LEFT_STEPS)
    yield replace(left, name=f"{left.name}: {LEFT_STEPS} steps")
    if noisy.judges_noise:
        checks = [*check_noise(draws, noisy.model.dtype, "parameters, steps")]
        wrong = [f"{c.name.removeprefix('noise: ')}: {line}" for c in checks for line in c.wrong]
        yield Check.judged(names[1], wrong, "", checks[0].error_text)
        yield used(f"used for {names[1]}", noisy.used)
    else:
        yield Check(names[1], NOT_JUDGED, "", IN_RANK_0)
    yield _tokens_alike(names[2], others)
    yield from _not_finite(names[3], noisy)
    yield _added_later(names[4], noisy)
    for name in names[5:]:
        yield _examples_alike(name, noisy)


def layer_case(case: Case, length: int, width: int) -> Case:
    """Make a small case of the same trainer on a linear layer."""
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


def _tokens_alike(name: str, layers: Sequence[Verification]) -> Check:
    """Check clipping of an example if a large number, the offset, is added to all its inputs.

    The example's output gradients sum to zero over its tokens, so the offset does not change the
    gradient of the weight. Ghost clipping computes a squared norm as a sum of products over pairs
    of tokens. The offset makes these products large, and some of them negative. So rounding can
    make their sum much too small, or even negative.
    """
    precise = layers[0].case.precision == "fp32"
    offset, off = (1e4, 1e-3) if precise else (100.0, torch.finfo(torch.bfloat16).eps)
    wrong, most = [], 0.0
    for layer in layers:
        for batching in layer.batchings:
            size = batching.case.batch_size
            batches = [_batch_alike(layer, size, offset, paired=i % 2 == 0) for i in range(TRIES)]
            steps = layer.model.steps(batching.case, TRIES, batches, 0.0, 1.0)
            worst = max(size * _norm(step) for step in steps)
            most = max(most, worst)
            if not worst <= 1 + off:
                wrong.append(
                    f"an example with {offset:g} added to its inputs moves parameters by "
                    f"{worst:.4g} C/B{batching.label}, but at most {1 + off:.4g} C/B is allowed"
                )
    return Check.judged(name, wrong, "", f"moves by {most:.4g} C/B (≤ {1 + off:.4g})")


def _batch_alike(layer: Verification, size: int, offset: float, *, paired: bool) -> Batch:
    """Make a batch of examples with an offset, in which only the first has large gradients.

    The output gradients of an example sum to zero over all tokens. If ``paired``, the output
    gradients of tokens 1 and 2, of tokens 3 and 4, and so on, each sum to about zero.
    """
    inputs, gradients = next(iter(workload_of(layer.case).batches(1)))
    if paired:
        gradients[:, 1::2] = -gradients[:, ::2]
    gradients = gradients - gradients.mean(1, keepdim=True)
    gradients = torch.cat([gradients, SMALL_SHARE * gradients.expand(size - 1, -1, -1)])
    inputs = (inputs + offset).expand(size, -1, -1)
    return tuple(t.to(layer.model.device, layer.model.dtype) for t in (inputs, gradients))


def _examples_alike(name: str, layer: Verification) -> Check:
    """Check that one of many equal examples moves the sum of gradients by at most its own gradient.

    All elements of an example's gradient are 1, or all are 0. A sum that is rounded to bf16 before
    noise is added would move by twice as much, or not at all. Two steps with the same noise differ
    in one example. Rounding after noise is added does not change the mean of all elements.
    """
    unit = layer.case.micro_batches * layer.case.gpus
    size = -(-(ALIKE + 2) // unit) * unit
    case = replace(layer.case, batch_size=size)
    inputs = torch.ones(size, *SHAPES[0])
    norm = ((SHAPES[0][1] + 1) * OUT_FEATURES) ** 0.5
    most = 0.0
    for fraction in FRACTIONS:
        means = []
        for last in (0.0, 1.0):
            gradients = torch.zeros(size, SHAPES[0][0], OUT_FEATURES)
            gradients[:ALIKE, 0], gradients[ALIKE, 0], gradients[ALIKE + 1, 0] = 1, fraction, last
            batch = tuple(t.to(layer.model.device, layer.model.dtype) for t in (inputs, gradients))
            [step] = layer.model.steps(case, 1, [batch], ALIKE_SIGMA, 2 * norm)
            means.append(float(torch.cat([g.flatten() for g in step.values()]).mean()))
        most = max(most, abs(means[1] - means[0]) * size)
    wrong = [f"one of {ALIKE} equal examples moves their sum by {most:.3g} times its gradient"]
    found = f"moves by {most:.3g} times its gradient (≤ {MOST_ALIKE:g})"
    return Check.judged(name, wrong * (not most <= MOST_ALIKE), "", found)


def _added_later(name: str, layer: Verification) -> Check:
    """Check that a layer which model and optimizer get between two steps is not trained unclipped.

    The trainer may refuse the layer, clip its gradient with the others, or not train it.
    """
    if layer.case.gpus > 1:
        return Check(name, NOT_JUDGED, "", OVER_RANKS)
    first, threshold = layer.batchings[0], layer.below_all
    options = {"noise_multiplier": 0.0, "max_grad_norm": threshold, "learning_rate": 1.0}
    trainer, parameters = layer.model.built(first.case, 0, **options)
    trainer.train_step(first.batches[0])
    model: Any = trainer.model
    try:
        late = nn.Linear(OUT_FEATURES, OUT_FEATURES).to(layer.model.device, layer.model.dtype)
        model.append(late)
        trainer.plain_optimizer.add_param_group({"params": [*late.parameters()]})
        trained = [*parameters.values(), *late.parameters()]
        before = [p.detach().clone() for p in trained]
        trainer.train_step(first.batches[0])
    except Exception as error:
        return Check.judged(name, [], "", f"refused: {shorten(str(error), 60, placeholder=' …')}")
    moved = {str(i): p.detach() - b for i, (p, b) in enumerate(zip(trained, before, strict=True))}
    times = _norm(moved) / threshold
    wrong = [f"a batch moves parameters by {times:.4g} C with a layer that was added later"]
    found = f"moves by {times:.4g} C (≤ {1 + SLACK:g})"
    return Check.judged(name, wrong * (times > 1 + SLACK), "", found)


def _not_finite(name: str, layer: Verification) -> Iterator[Check]:
    """Check that an example whose norm is not finite moves no finite parameter too far.

    All elements of parameters that stay finite may together move by at most C/B, the clipping
    threshold divided by the batch size. The trainer may refuse the example, leave the example out,
    clip its gradient, or make parameters not finite. A note says that it makes them not finite.
    """
    if layer.case.gpus > 1:
        yield Check(name, NOT_JUDGED, "", OVER_RANKS)
        return
    wrong, most, threshold, kept = [], 0.0, layer.below_all, True
    for batching in layer.batchings:
        factors = batching.examples[0].factors(layer.clips, threshold).clone()
        factors[0] = 0
        others = batching.examples[0].mean(factors)
        for value, which in product(NOT_FINITE, range(2)):
            batch = [tensor.clone() for tensor in batching.batches[0]]
            for tensor in batch:
                tensor[0] *= 10
            batch[which][0, 0, 0] = value
            try:
                [step] = layer.model.steps(batching.case, 1, [tuple(batch)], 0.0, threshold)
            except Exception:
                continue  # the trainer refuses the example
            kept &= all(bool(g.isfinite().all()) for g in step.values())
            moved = {n: (g - others[n]).nan_to_num(0, 0, 0) for n, g in step.items()}
            times = _norm(moved) * batching.case.batch_size / threshold
            most = max(most, times)
            if times > 1 + SLACK:
                where = ("an input", "an output gradient")[which]
                example = f"an example with {value} in {where}{batching.label}"
                wrong.append(f"{example} moves finite parameters by {times:.4g} C/B")
    yield Check.judged(name, wrong, "", f"moves by {most:.4g} C/B (≤ {1 + SLACK:g})")
    if not kept:
        text = "an example with NaN or infinity makes parameters not finite, which shows it"
        yield Check("example not finite", NOTE, "", text)


def _norm(gradients: Gradients) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())
