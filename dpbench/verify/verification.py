"""Checks one trainer on one model: gradients, noise, and what a step must not change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

import torch
from torch.utils import _pytree as pytree

from dpbench.core.case import Case
from dpbench.training.correlated_noise import INDEPENDENT, whitening
from dpbench.training.parallel import rank_and_ranks
from dpbench.verify.check_result import IN_RANK_0, NOT_JUDGED, Check
from dpbench.verify.noise import Draw, check_noise
from dpbench.verify.reference import Examples, Gradients, distances, thresholds
from dpbench.verify.trained_model import ALONE, TrainedModel
from dpbench.workloads.base import Batch

STEPS = 2
"""Steps of a run."""
FIRST_RUN_STEPS = 8
"""Steps of the first run, enough to find noise that repeats every few steps. For a large model it
is `STEPS`."""
LARGE_MODEL = 2**21
"""A model with more trained elements is large: the noise of many steps would take gigabytes."""
TOLERANCE = 1e-5
"""Largest relative error of a parameter's gradient at fp32."""
SIGMA = 1e4
"""Noise multiplier σ of most noise checks: so large that the gradient is negligible."""
SMALL_SIGMA, FRACTIONAL_SIGMA = 0.05, 1.6
"""Two more noise multipliers, not whole numbers. With the small one the gradient is visible."""
ROUNDED_SIGMA = 1e-12
"""Noise multiplier whose noise rounds to zero, to find trainers that do not clip if σ > 0."""
THRESHOLD = 0.7
"""Clipping threshold C of the noise checks. It is not 1, so that noise that is scaled by C², or not
by C, has a wrong standard deviation."""
LOW_THRESHOLD = 1e-3
"""Clipping threshold as a share of the smallest norm, so that unclipped gradients are visible."""
MIN_NOISE = 128
"""Fewest noise elements of each parameter in a run. Two runs are enough to find doubled noise."""
SEED_STRIDE = 10_000
"""Distance between seeds of runs. It exceeds the number of ranks, which add their own number."""
KEPT_NOISE = 2**16
"""Most noise elements of each parameter that are kept if σ < `SIGMA`."""
DATA_SHARE = 1e-3
"""How much one example may change a buffer, as a share of the change by noise. A buffer made only
from noisy parameters, such as their mean over steps, stays below 1/SIGMA."""


@dataclass(frozen=True)
class Batching:
    """A batch size and a number of micro-batches, with batches and their per-sample gradients.

    ``words`` is its name in checks, e.g. " in 2 parts".
    """

    words: str
    case: Case
    batches: Sequence[Batch]
    examples: Sequence[Examples]


class Verification:
    """The checks of one trainer.

    Args:
        case: see `dpbench.verify.trainer_checks.verify`.
        device: the device to train on.
        clips: the trainer's label: ``flat`` or ``per layer``.
        weights: the trainer's ``noise_weights``; one weight if noise is independent.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        clips: str,
        weights: Sequence[float] = INDEPENDENT,
    ) -> None:
        self.case, self.clips, self.weights = case, clips, weights
        self.subject = TrainedModel(case, device, STEPS)
        self.examples = self.subject.examples()
        self.half, self.below_all, self.above_all = thresholds(self.examples, clips)
        batches = self.subject.batches
        whole = replace(case, micro_batches=1)
        self.batchings = [Batching("", whole, batches, self.examples)]
        if (parts := case.micro_batches) > 1:
            self.batchings.append(Batching(f" in {parts} parts", case, batches, self.examples))
        self.batchings.append(self._one_by_one())
        if case.sampling == "poisson":
            self.batchings += map(self._of_size, (0, 1, case.batch_size + 1 + case.batch_size % 2))
        self.tolerance = cache(self._tolerance)
        self._clipped = cache(lambda n, i, c: self.clipped(self.batchings[n].examples[i], c))
        self._runs = 0

    def _one_by_one(self) -> Batching:
        """Make another batch size: one example per micro-batch, and one more micro-batch if any."""
        parts = self.case.micro_batches
        parts += parts > 1
        size = parts * self.case.gpus
        if size == self.case.batch_size:
            size *= 2
        case = replace(self.case, batch_size=size, micro_batches=parts)
        batch = pytree.tree_map(lambda *each: torch.cat(each), *self.subject.batches)
        joined = Examples.joined(self.examples)
        both = (slice(None, size), slice(-size, None))
        batches = [pytree.tree_map(lambda t, part=part: t[part], batch) for part in both]
        words = f" of {size}" + f" in {parts} parts" * (parts > 1)
        return Batching(words, case, batches, [joined.chosen(part) for part in both])

    def _of_size(self, size: int) -> Batching:
        """Poisson batches with ``size`` examples: none, one, or more than one forward takes."""
        batch = pytree.tree_map(lambda *each: torch.cat(each), *self.subject.batches)
        joined, number = Examples.joined(self.examples), 2 * self.case.batch_size
        both = [(torch.arange(size) + i) % number for i in range(STEPS)]
        batches = [pytree.tree_map(itemgetter(each), batch) for each in both]
        chosen = [joined.chosen(each, self.case.batch_size) for each in both]
        return Batching(f" sampled {size}", self.case, batches, chosen)

    def checks(self, elsewhere: Sequence[Gradients]) -> Iterator[Check]:
        """Yield all checks. Noise is also compared with that of ``elsewhere``'s noisy steps."""
        # Noisy steps come first, as in the other process, so that first noise meets first noise.
        draws = self.draw_all(elsewhere)
        yield Check.judged("reference", [], "", self.subject.reference)
        yield self.gradient(", half clipped", self.batchings[0], self.half, 0.0)
        sigmas = (ROUNDED_SIGMA, ROUNDED_SIGMA, 0.0)
        for sigma, batching in zip(sigmas, self.batchings, strict=False):
            yield self.gradient(", all clipped", batching, self.below_all, sigma)
        for batching in self.batchings:
            if batching.words.startswith(" sampled"):
                yield self.gradient(", half clipped", batching, self.half, 0.0)
        if self.judges_noise:
            runs = "parameters, steps, runs" + ", processes" * bool(elsewhere)
            yield from check_noise(draws, self.subject.dtype, runs)
        else:
            yield Check("noise", NOT_JUDGED, "", IN_RANK_0)
        yield self.buffers()
        changed = [f"{name}: is frozen, and changes" for name in sorted(self.subject.changed)]
        frozen = len(self.subject.start) - len(self.subject.trained)
        yield Check.judged("frozen parameters stay", changed, "", f"{frozen} frozen")
        if (ranks := self.case.gpus) > 1:
            apart = [f"{name}: ranks differ after a step" for name in sorted(self.subject.apart)]
            yield Check.judged("ranks agree", apart, "", f"{ranks} ranks")

    # --- gradients -------------------------------------------------------------------------------

    def gradient(self, what: str, batching: Batching, threshold: float, sigma: float) -> Check:
        """Compare steps with negligible noise with the mean of clipped gradients."""
        case = batching.case
        steps = [*self.subject.steps(case, STEPS, batching.batches, sigma, threshold)]
        far = self.distances(batching, steps, threshold)
        tolerance = self.tolerance(batching.words, threshold)
        near = 1e-3 if case.precision == "fp32" else 0.05
        parts = case.micro_batches * case.gpus
        known = cache(lambda i: batching.examples[i].candidate_means(self.clips, threshold, parts))
        wrong = []
        for name in self.subject.trained:
            if off := [i for i, step in enumerate(far) if step[name] > tolerance]:
                i = off[0]
                is_what = batching.examples[i].diagnose(name, steps[i][name], known(i), near)
                is_what = is_what or f"off by {far[i][name]:.2g} of its norm"
                wrong.append(f"{name}: {f'from step {i + 1} on, ' if i else ''}{is_what}")
        most = _largest(far)
        worst = next(name for step in far for name in step if step[name] == most)
        name = f"gradient{batching.words}{what}"
        return Check.judged(name, wrong, worst, f"{most:.2g} (≤ {tolerance:.2g})")

    def distances(
        self, batching: Batching, steps: Sequence[Gradients], threshold: float
    ) -> list[dict[str, float]]:
        """The relative error of each parameter in each step.

        Opacus adds 1e-6 to norms; other trainers add nothing. The formula that fits better is used.
        """
        tried = []
        for added in (1e-6, 0.0):
            wanted = [self.clipped(each, threshold, added) for each in batching.examples]
            sizes = [each.sizes for each in batching.examples]
            tried.append(list(map(distances, steps, wanted, sizes)))
        return min(tried, key=_largest)

    def clipped(self, examples: Examples, threshold: float, added: float = 0.0) -> Gradients:
        """The mean of the examples' clipped gradients."""
        return examples.mean(examples.factors(self.clips, threshold, added))

    def _tolerance(self, words: str, threshold: float) -> float:
        """The largest allowed relative error; for 16 bits, twice that of Opacus's ``dpsgd``."""
        batching = next(each for each in self.batchings if each.words == words)
        if batching.case.precision == "fp32":
            return max(TOLERANCE, 1.5 * max(each.float32_error for each in self.examples))
        trainer = "dpsgd:clip=per_layer" if self.clips == "per layer" else "dpsgd"
        opacus = replace(batching.case, trainer=trainer, **ALONE)
        steps = [*self.subject.steps(opacus, STEPS, batching.batches, 0.0, threshold)]
        return min(2 * _largest(self.distances(batching, steps, threshold)), 0.5)

    # --- noise -----------------------------------------------------------------------------------

    @property
    def judges_noise(self) -> bool:
        """Whether this process judges the noise; of several ranks only rank 0 does."""
        return rank_and_ranks()[0] == 0

    def draw_all(self, elsewhere: Sequence[Gradients]) -> list[Draw]:
        """Collect the noise of runs with each batching and several σ.

        C is `THRESHOLD`, then below all norms, then above all of them.

        Args:
            elsewhere: steps like those of the first run, taken in another process.
        """
        elements = sum(self.subject.start[name].numel() for name in self.subject.trained)
        first = self.batchings[0]
        steps = STEPS if elements > LARGE_MODEL else FIRST_RUN_STEPS
        draws = self.draws(first, SIGMA, THRESHOLD, steps)
        for batching in self.batchings[1:]:
            draws += self.draws(batching, SIGMA, THRESHOLD, STEPS)
        if self.judges_noise:
            device = self.subject.device
            here = ({name: g.to(device) for name, g in step.items()} for step in elsewhere)
            draws += self._drawn("another process", first, SIGMA, THRESHOLD, here)
        for batching in self.batchings:
            draws += self.draws(batching, SMALL_SIGMA, LOW_THRESHOLD * self.below_all, STEPS)
            draws += self.draws(batching, FRACTIONAL_SIGMA, self.above_all, STEPS)
        return draws

    def draws(self, batching: Batching, sigma: float, threshold: float, steps: int) -> list[Draw]:
        """Take one run; return its noise, or nothing in a rank that does not judge noise."""
        self._runs += 1
        # Ranks add their number to even seeds (`TrainedModel.steps`), so even seeds are far apart.
        seed = self._runs if self._runs % 2 else self._runs * SEED_STRIDE
        case, run = batching.case, f"σ = {sigma:g}, C = {threshold:.3g}{batching.words}"
        self.tolerance(batching.words, self.below_all)  # now, not in the run: it sets the seed
        taken = noisy_steps(self.subject, case, batching.batches, steps, sigma, threshold, seed)
        if self.judges_noise:
            return [*self._drawn(run, batching, sigma, threshold, taken)]
        deque(taken, maxlen=0)  # steps are collective
        return []

    def _drawn(
        self,
        run: str,
        batching: Batching,
        sigma: float,
        threshold: float,
        steps: Iterable[Gradients],
    ) -> Iterator[Draw]:
        """The updates minus the clipped gradients, divided by σC/B.

        If noise is correlated over steps, earlier steps' noise is subtracted as well: what is left
        is the new noise of each step.
        """
        scale = batching.case.batch_size / (sigma * threshold)
        slack = self.tolerance(batching.words, self.below_all) * scale * threshold
        newest, *weights = self.weights
        before: deque[Gradients] = deque(maxlen=len(weights))
        for i, step in enumerate(steps):
            clipped = self._clipped(self.batchings.index(batching), i % STEPS, threshold)
            noise = {name: ((g - clipped[name]) * scale).flatten() for name, g in step.items()}
            for name in noise:
                for weight, drawn in zip(weights, before, strict=False):
                    noise[name] -= weight * drawn[name]
                noise[name] /= newest
            before.appendleft(dict(noise))
            norms = {name: float(clipped[name].norm()) or 1.0 for name in noise}
            along = {n: float(each @ clipped[n].flatten()) / norms[n] for n, each in noise.items()}
            if len(noise) == len(clipped):
                whole = sum(norm**2 for norm in norms.values()) ** 0.5
                along[""] = sum(norms[name] * far for name, far in along.items()) / whole
            kept = KEPT_NOISE if sigma < SIGMA else None
            noise = {name: each[:kept].float() for name, each in noise.items()}
            times = sum(map(abs, whitening(self.weights, i + 1)))
            yield Draw(run, i + 1, noise, along, slack * times)

    # --- what stays ------------------------------------------------------------------------------

    def buffers(self) -> Check:
        """Check that noise hides how one example changes the model's buffers."""
        first, second = self.subject.batches
        other = pytree.tree_map(lambda a, b: torch.cat([b[:1], a[1:]]), first, second)

        def after(batch: Batch, seed: int) -> Gradients:
            list(self.subject.steps(self.case, STEPS, [batch, second], SIGMA, THRESHOLD, seed))
            return {name: b.double() for name, b in self.subject.buffers.items()}

        before, other_data, other_noise = after(first, 1), after(other, 1), after(first, 2)
        wrong = []
        for name, buffer in before.items():
            by_data = (other_data[name] - buffer).norm()
            if not by_data <= DATA_SHARE * (other_noise[name] - buffer).norm():
                wrong.append(f"{name}: this buffer changes with one example, and has no noise")
        return Check.judged("buffers hold no data", wrong, "", f"{len(before)} buffers")


def noisy_steps(
    subject: TrainedModel,
    case: Case,
    batches: Sequence[Batch],
    steps: int,
    sigma: float,
    threshold: float,
    seed: int,
) -> Iterator[Gradients]:
    """Yield the updates of steps with noise.

    At σ = `SIGMA`, steps are added until every parameter has `MIN_NOISE` elements. Added steps
    yield only the parameters that need more.
    """
    sizes = {name: subject.start[name].numel() for name in subject.trained}
    number = max(steps, -(-MIN_NOISE // min(sizes.values())) if sigma == SIGMA else 0)
    for i, step in enumerate(subject.steps(case, number, batches, sigma, threshold, seed)):
        yield {name: g for name, g in step.items() if i < steps or sizes[name] < MIN_NOISE}


def _largest(far: Sequence[dict[str, float]]) -> float:
    return max(distance for step in far for distance in step.values())
