"""Every check of a trainer: what is taken off parameters at σ = 0, and the noise."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch

from dpbench.case import Case
from dpbench.errors import ConfigurationError, unknown
from dpbench.names import parted, read_parameters
from dpbench.process.build import build, labels_of, pick_device
from dpbench.process.fork_server import postpone
from dpbench.process.ranks import Observe, observe_all
from dpbench.registry import names_of, resolve
from dpbench.training.standard import StandardTrainer
from dpbench.verify.check import Check
from dpbench.verify.noise import check_noise
from dpbench.verify.reference import CLIPS, Gradients, distances, thresholds
from dpbench.verify.subject import ALONE, Subject

STEPS = 2
TOLERANCE = 1e-5
"""At fp32, how far a parameter's gradient may be off, as a part of its norm."""
SIGMA = 1e4
"""So large that, beside the noise, gradients are below what the checks can see."""
FAINT = 1e-12
"""A σ whose noise is below rounding: a trainer that does something else without noise is seen."""
THRESHOLD = 0.7
"""Of the noise; it is not 1, so that a deviation without it, or with its square, is another."""
ENOUGH = 128
"""Elements of a parameter's noise in a run: in two runs, noise that is added twice is noticed."""
OWN = ("learning_rate", "noise_multiplier", "max_grad_norm")
"""The parameters of a trainer that are chosen here."""

ELSEWHERE = 3
"""The seed of another process; those of runs in this one are 1 and 2."""


def verify(case: Case, device: str = "auto", *, processes: bool = False) -> list[Check]:
    """Hold the trainer of a case to what it says; over ranks, in processes that it starts.

    Args:
        case: small; with several micro-batches, the batch as a whole is tried as well.
        device: ``auto``, ``cpu`` or ``cuda``.
        processes: whether noise is compared with that of another process.

    Raises:
        ConfigurationError: the trainer refuses the case, or there is nothing to verify.
    """
    if case.gpus == 1:
        return verify_here(case, device, processes=processes)
    drawn = draw_elsewhere(case, device) if processes else []
    checks: list[Check] = _over_ranks(partial(_verify_rank, device, drawn), case, device)["checks"]
    return checks


def _over_ranks(work: Observe, case: Case, device: str) -> dict[str, Any]:
    import_module("torch._dynamo")  # which the first optimizer imports: once for all ranks
    return observe_all(work, case, device)


def _verify_rank(device: str, drawn: Sequence[Gradients], case: Case) -> dict[str, Any]:
    return {"checks": verify_here(case, device, drawn)}


def verify_here(
    case: Case, device: str, drawn: Sequence[Gradients] = (), *, processes: bool = False
) -> list[Check]:
    """`verify` in this process, which all ranks of a case do together.

    Gradients are held to those of the joint batch, and noise is compared with what was ``drawn``.
    """
    place = pick_device(device)
    if given := [name for name in read_parameters(parted(case.trainer)[1]) if name in OWN]:
        raise ConfigurationError(f"{given[0]} is chosen by verify: leave it out of the trainer")
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        trainer, _ = build(case, place, 1)
        if isinstance(trainer, StandardTrainer):
            raise ConfigurationError(
                f"trainer {case.trainer} clips nothing and adds no noise: there is nothing to "
                f"verify"
            )
        clips = labels_of(trainer).get("clips", "flat")
        if clips not in CLIPS:
            raise unknown(f"label clips of trainer {case.trainer}", clips, CLIPS)
        del trainer
        verification = Verification(case, place, clips)
        return [*verification.checks(draw_elsewhere(case, device) if processes else drawn)]


def noise_of(subject: Subject, case: Case, seed: int) -> list[Gradients]:
    """What steps take off that are but noise: its deviation is ``SIGMA * THRESHOLD / batch_size``.

    Further steps than the first are of small parameters alone.
    """
    sizes = {name: subject.start[name].numel() for name in subject.trained}
    number = max(STEPS, -(-ENOUGH // min(sizes.values())))
    steps = subject.steps(case, number, seed=seed, noise_multiplier=SIGMA, max_grad_norm=THRESHOLD)
    return [
        step if i < STEPS else {name: g for name, g in step.items() if sizes[name] < ENOUGH}
        for i, step in enumerate(steps)
    ]


def draw_elsewhere(case: Case, device: str) -> list[Gradients]:
    """The noise of a case's steps in a process of its own, on the CPU."""
    spelled: dict[str, Any] = {axis: known.argument(name) for axis, known, name in names_of(case)}
    at_once = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback of its own
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, at_once) as pool:
        drawn = pool.submit(_draw, replace(case, **spelled), device).result()
    return [{name: torch.from_numpy(g).double() for name, g in step.items()} for step in drawn]


def _draw(case: Case, device: str) -> list[dict[str, Any]]:
    postpone("opacus")
    case = resolve(case)
    work = partial(_noise, device)
    drawn = work(case) if case.gpus == 1 else _over_ranks(work, case, device)
    noise: list[dict[str, Any]] = drawn["noise"]
    return noise


def _noise(device: str, case: Case) -> dict[str, Any]:
    noise = noise_of(Subject(case, pick_device(device), STEPS), case, seed=ELSEWHERE)
    arrays = [{name: g.float().cpu().numpy() for name, g in step.items()} for step in noise]
    return {"noise": arrays}


class Verification:
    """The checks of one trainer that says what it clips, ``flat`` or ``per layer``."""

    def __init__(self, case: Case, device: torch.device, clips: str) -> None:
        self.case, self.clips = case, clips
        self.subject = Subject(case, device, STEPS)
        self.examples = self.subject.examples()
        self.whole = replace(case, micro_batches=1)

    def checks(self, elsewhere: Sequence[Gradients]) -> Iterator[Check]:
        """Of gradients, of noise, also of noise drawn ``elsewhere``, and of what is frozen."""
        # Noise first: what another process draws is to be compared with the first drawn here.
        draws: list[Gradients] = []
        for seed, case in enumerate((self.whole, self.case), 1):
            draws += noise_of(self.subject, case, seed)
        device = self.subject.device
        draws += [{name: g.to(device) for name, g in step.items()} for step in elsewhere]
        yield Check.of("reference", [], "", self.subject.reference)
        half, below_all = thresholds(self.examples, self.clips)
        parts = self.case.micro_batches
        yield self.gradient("gradient, half clipped", self.whole, half, 0.0)
        in_parts = f" in {parts} parts" if parts > 1 else ""
        yield self.gradient(f"gradient{in_parts}, all clipped", self.case, below_all, FAINT)
        runs = "steps, runs, processes" if elsewhere else "steps, runs"
        deviation = SIGMA * THRESHOLD / self.case.batch_size
        yield from check_noise(draws, deviation, self.subject.dtype, runs, self.case.gpus)
        changed = [f"{name}: is frozen, and changes" for name in sorted(self.subject.changed)]
        frozen = len(self.subject.start) - len(self.subject.trained)
        yield Check.of("frozen parameters stay", changed, "", f"{frozen} frozen")
        if (ranks := self.case.gpus) > 1:
            apart = [f"{name}: ranks differ after a step" for name in sorted(self.subject.apart)]
            yield Check.of("ranks agree", apart, "", f"{ranks} ranks")

    def gradient(self, check: str, case: Case, threshold: float, sigma: float) -> Check:
        """What steps without visible noise take off, beside the mean of clipped gradients."""
        seen = self.steps(case, threshold, sigma)
        far = self.far(seen, threshold)
        allowed = self.allowed(case, threshold)
        near = 1e-3 if case.precision == "fp32" else 0.05
        parts = case.micro_batches * case.gpus
        known = cache(lambda i: self.examples[i].known(self.clips, threshold, parts))
        wrong = []
        for name in self.subject.trained:
            if off := [i for i, step in enumerate(far) if step[name] > allowed]:
                i = off[0]
                what = self.examples[i].explained(name, seen[i][name], known(i), near)
                what = what or f"off by {far[i][name]:.2g} of its norm"
                wrong.append(f"{name}: {f'from step {i + 1} on, ' if i else ''}{what}")
        most = _most(far)
        worst = next(name for step in far for name in step if step[name] == most)
        return Check.of(check, wrong, worst, f"{most:.2g} (≤ {allowed:.2g})")

    def steps(self, case: Case, threshold: float, sigma: float) -> list[Gradients]:
        """What steps with little or no noise take off."""
        return [*self.subject.steps(case, STEPS, noise_multiplier=sigma, max_grad_norm=threshold)]

    def far(self, seen: Sequence[Gradients], threshold: float) -> list[dict[str, float]]:
        """How far each step is off; Opacus adds 1e-6 to norms, others nothing: as it fits."""
        tried = []
        for added in (1e-6, 0.0):
            factors = [each.factors(self.clips, threshold, added) for each in self.examples]
            wanted = [each.mean(f) for each, f in zip(self.examples, factors, strict=True)]
            sizes = [each.sizes for each in self.examples]
            tried.append(list(map(distances, seen, wanted, sizes)))
        return min(tried, key=_most)

    def allowed(self, case: Case, threshold: float) -> float:
        """How far a parameter's gradient may be off."""
        if case.precision == "fp32":
            return max(TOLERANCE, 1.5 * max(each.norms_off for each in self.examples))
        trainer = "dpsgd:clip=per_layer" if self.clips == "per layer" else "dpsgd"
        opacus = self.steps(replace(case, trainer=trainer, **ALONE), threshold, 0.0)
        return min(2 * _most(self.far(opacus, threshold)), 0.5)


def _most(far: Sequence[dict[str, float]]) -> float:
    return max(distance for step in far for distance in step.values())
