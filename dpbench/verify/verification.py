"""The checks of one trainer on one model: gradients, noise, and what must stay as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils import _pytree as pytree

from dpbench.core.case import Case
from dpbench.verify.check import Check
from dpbench.verify.noise import Draw, check_noise
from dpbench.verify.reference import Examples, Gradients, distances, thresholds
from dpbench.verify.subject import ALONE, Subject
from dpbench.workloads.base import Batch

STEPS = 2
IN_TURN = 8
"""Steps of the first run, so that noises used in turn come again; of large models `STEPS`."""
LARGE = 2**21
"""Elements of a large model, whose noise of many steps takes gigabytes."""
TOLERANCE = 1e-5
"""At fp32, how far a parameter's gradient may be off, as a part of its norm."""
SIGMA = 1e4
"""So large that, beside the noise, gradients are below what the checks can see."""
SMALL, ABOVE_ONE = 0.05, 1.6
"""Other σ, none a whole number. Beside the small one a clipped gradient is seen."""
FAINT = 1e-12
"""A σ whose noise is below rounding: a trainer that does something else without noise is seen."""
THRESHOLD = 0.7
"""Of the noise; it is not 1, so that a deviation without it, or with its square, is another."""
HUGE = 1e-3
"""Of the smallest norm: gradients beside which a threshold is so small move far if not clipped."""
ENOUGH = 128
"""Elements of a parameter's noise in a run: in two runs, noise that is added twice is noticed."""
APART = 10_000
"""How far seeds of ranks are from those of another run."""
KEPT = 2**16
"""Elements of each parameter that are kept of runs with an ordinary σ."""
BY_DATA = 1e-3
"""Of how noise changes a buffer: data that change it by more are in it without noise. One that is
made of noisy parameters, such as their mean over steps, changes by 1/SIGMA of it at most."""


@dataclass(frozen=True)
class Path:
    """A way of batches through a step: as a whole, or in some number of parts."""

    words: str
    case: Case
    batches: Sequence[Batch]
    examples: Sequence[Examples]


class Verification:
    """The checks of one trainer that says what it clips, ``flat`` or ``per layer``."""

    def __init__(self, case: Case, device: torch.device, clips: str) -> None:
        self.case, self.clips = case, clips
        self.subject = Subject(case, device, STEPS)
        self.examples = self.subject.examples()
        self.half, self.below_all, self.above_all = thresholds(self.examples, clips)
        batches = self.subject.batches
        whole = replace(case, micro_batches=1)
        self.paths = [Path("", whole, batches, self.examples)]
        if (parts := case.micro_batches) > 1:
            self.paths.append(Path(f" in {parts} parts", case, batches, self.examples))
        self.paths.append(self._one_by_one())
        self.allowed = cache(self._allowed)
        self._clipped = cache(lambda path, i, c: self.clipped(self.paths[path].examples[i], c))
        self._runs = 0

    def _one_by_one(self) -> Path:
        """A batch of another size; in parts of one example, one more than the case has."""
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
        return Path(words, case, batches, [joined.chosen(part) for part in both])

    def checks(self, elsewhere: Sequence[Gradients]) -> Iterator[Check]:
        """Of gradients, of noise, also of noise drawn ``elsewhere``, and of what must stay."""
        # Noise first: what another process draws is to be compared with the first drawn here.
        draws = self.noise(elsewhere)
        yield Check.of("reference", [], "", self.subject.reference)
        yield self.gradient(", half clipped", self.paths[0], self.half, 0.0)
        for sigma, path in zip((FAINT, FAINT, 0.0), self.paths, strict=False):
            yield self.gradient(", all clipped", path, self.below_all, sigma)
        runs = "parameters, steps, runs" + ", processes" * bool(elsewhere)
        yield from check_noise(draws, self.subject.dtype, runs)
        yield self.buffers()
        changed = [f"{name}: is frozen, and changes" for name in sorted(self.subject.changed)]
        frozen = len(self.subject.start) - len(self.subject.trained)
        yield Check.of("frozen parameters stay", changed, "", f"{frozen} frozen")
        if (ranks := self.case.gpus) > 1:
            apart = [f"{name}: ranks differ after a step" for name in sorted(self.subject.apart)]
            yield Check.of("ranks agree", apart, "", f"{ranks} ranks")

    # --- gradients -------------------------------------------------------------------------------

    def gradient(self, what: str, path: Path, threshold: float, sigma: float) -> Check:
        """What steps without visible noise take off, beside the mean of clipped gradients."""
        case = path.case
        seen = self.steps(path, threshold, sigma)
        far = self.far(path, seen, threshold)
        allowed = self.allowed(path.words, threshold)
        near = 1e-3 if case.precision == "fp32" else 0.05
        parts = case.micro_batches * case.gpus
        known = cache(lambda i: path.examples[i].known(self.clips, threshold, parts))
        wrong = []
        for name in self.subject.trained:
            if off := [i for i, step in enumerate(far) if step[name] > allowed]:
                i = off[0]
                is_what = path.examples[i].explained(name, seen[i][name], known(i), near)
                is_what = is_what or f"off by {far[i][name]:.2g} of its norm"
                wrong.append(f"{name}: {f'from step {i + 1} on, ' if i else ''}{is_what}")
        most = _most(far)
        worst = next(name for step in far for name in step if step[name] == most)
        name = f"gradient{path.words}{what}"
        return Check.of(name, wrong, worst, f"{most:.2g} (≤ {allowed:.2g})")

    def steps(self, path: Path, threshold: float, sigma: float) -> list[Gradients]:
        """What steps with little or no noise take off."""
        return [*self.subject.steps(path.case, STEPS, path.batches, sigma, threshold)]

    def far(
        self, path: Path, seen: Sequence[Gradients], threshold: float
    ) -> list[dict[str, float]]:
        """How far each step is off; Opacus adds 1e-6 to norms, others nothing: as it fits."""
        tried = []
        for added in (1e-6, 0.0):
            wanted = [self.clipped(each, threshold, added) for each in path.examples]
            sizes = [each.sizes for each in path.examples]
            tried.append(list(map(distances, seen, wanted, sizes)))
        return min(tried, key=_most)

    def clipped(self, examples: Examples, threshold: float, added: float = 0.0) -> Gradients:
        """The mean of clipped gradients."""
        return examples.mean(examples.factors(self.clips, threshold, added))

    def _allowed(self, words: str, threshold: float) -> float:
        """How far a parameter's gradient may be off on a path."""
        path = next(path for path in self.paths if path.words == words)
        if path.case.precision == "fp32":
            return max(TOLERANCE, 1.5 * max(each.norms_off for each in self.examples))
        trainer = "dpsgd:clip=per_layer" if self.clips == "per layer" else "dpsgd"
        opacus = replace(path, case=replace(path.case, trainer=trainer, **ALONE))
        return min(2 * _most(self.far(path, self.steps(opacus, threshold, 0.0), threshold)), 0.5)

    # --- noise -----------------------------------------------------------------------------------

    def noise(self, elsewhere: Sequence[Gradients]) -> list[Draw]:
        """Of all paths, with several σ and C: none, some or all of the gradients are clipped."""
        large = sum(self.subject.start[name].numel() for name in self.subject.trained) > LARGE
        draws = self.draws(self.paths[0], SIGMA, THRESHOLD, STEPS if large else IN_TURN)
        for path in self.paths[1:]:
            draws += self.draws(path, SIGMA, THRESHOLD, STEPS)
        for i, step in enumerate(elsewhere):
            here = {name: g.to(self.subject.device) for name, g in step.items()}
            path = self.paths[0]
            draws.append(self._draw("another process", i, path, SIGMA, THRESHOLD, here))
        for path in self.paths:
            draws += self.draws(path, SMALL, HUGE * self.below_all, STEPS)
            draws += self.draws(path, ABOVE_ONE, self.above_all, STEPS)
        return draws

    def draws(self, path: Path, sigma: float, threshold: float, steps: int) -> list[Draw]:
        """The noise of one trainer's steps; further ones are of small parameters alone."""
        self._runs += 1
        # Odd ones seed all ranks alike, see Subject.steps; none may meet that of a rank elsewhere.
        seed = self._runs if self._runs % 2 else self._runs * APART
        case, run = path.case, f"σ = {sigma:g}, C = {threshold:.3g}{path.words}"
        self.allowed(path.words, self.below_all)  # before: it seeds, between steps of this run
        seen = noise_of(self.subject, case, path.batches, steps, sigma, threshold, seed)
        return [self._draw(run, i, path, sigma, threshold, step) for i, step in enumerate(seen)]

    def _draw(
        self, run: str, i: int, path: Path, sigma: float, threshold: float, step: Gradients
    ) -> Draw:
        """What a step takes off without the clipped gradient, divided by σC/B."""
        scale = path.case.batch_size / (sigma * threshold)
        clipped = self._clipped(self.paths.index(path), i % STEPS, threshold)
        noise = {name: ((g - clipped[name]) * scale).flatten() for name, g in step.items()}
        norms = {name: float(clipped[name].norm()) or 1.0 for name in noise}
        along = {n: float(each @ clipped[n].flatten()) / norms[n] for n, each in noise.items()}
        if len(noise) == len(clipped):
            whole = sum(norm**2 for norm in norms.values()) ** 0.5
            along[""] = sum(norms[name] * far for name, far in along.items()) / whole
        slack = self.allowed(path.words, self.below_all) * scale * threshold
        kept = KEPT if sigma < SIGMA else None
        noise = {name: each[:kept].float() for name, each in noise.items()}
        return Draw(run, i + 1, noise, along, slack)

    # --- what stays ------------------------------------------------------------------------------

    def buffers(self) -> Check:
        """Buffers of the model that change with one example, and not by noise that covers it."""
        first, second = self.subject.batches
        other = pytree.tree_map(lambda a, b: torch.cat([b[:1], a[1:]]), first, second)

        def after(batch: Batch, seed: int) -> Gradients:
            list(self.subject.steps(self.case, STEPS, [batch, second], SIGMA, THRESHOLD, seed))
            return {name: b.double() for name, b in self.subject.buffers.items()}

        before, changed, noisy = after(first, 1), after(other, 1), after(first, 2)
        wrong = []
        for name, buffer in before.items():
            by_data = (changed[name] - buffer).norm()
            if not by_data <= BY_DATA * (noisy[name] - buffer).norm():
                wrong.append(f"{name}: this buffer changes with one example, and has no noise")
        return Check.of("buffers hold no data", wrong, "", f"{len(before)} buffers")


def noise_of(
    subject: Subject,
    case: Case,
    batches: Sequence[Batch],
    steps: int,
    sigma: float,
    threshold: float,
    seed: int,
) -> Iterator[Gradients]:
    """What steps with noise take off; further ones are of small parameters alone."""
    sizes = {name: subject.start[name].numel() for name in subject.trained}
    number = max(steps, -(-ENOUGH // min(sizes.values())) if sigma == SIGMA else 0)
    for i, step in enumerate(subject.steps(case, number, batches, sigma, threshold, seed)):
        yield {name: g for name, g in step.items() if i < steps or sizes[name] < ENOUGH}


def _most(far: Sequence[dict[str, float]]) -> float:
    return max(distance for step in far for distance in step.values())
