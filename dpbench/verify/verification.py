"""Checks one trainer on one model: gradients, noise, frozen parameters and buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from operator import itemgetter

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpbench.core.case import Case
from dpbench.training.correlated_noise import INDEPENDENT, whitening
from dpbench.training.parallel import rank_and_ranks
from dpbench.verify.check_result import IN_RANK_0, NOT_JUDGED, Check, used
from dpbench.verify.noise import Draw, check_noise
from dpbench.verify.reference import NEGLIGIBLE, Examples, Gradients, distances, thresholds
from dpbench.verify.trained_model import ONE_PROCESS, RATE, TrainedModel
from dpbench.workloads.base import Batch

STEPS = 2
"""Usual number of steps in one run of a trainer."""
TOLERANCE = 1e-5
"""Largest allowed relative error of a parameter's gradient at fp32. `Verification._tolerance`
allows more if PyTorch's float32 norms have larger errors."""
ROUNDED_TWICE = 2 * torch.finfo(torch.bfloat16).eps
"""Smallest relative error of a gradient at bf16 that is allowed."""
SIGMA = 1e4
"""Noise multiplier σ of most noise checks. The gradient is negligible beside such noise."""
SMALL_SIGMA, FRACTIONAL_SIGMA = 0.0137, 1.37
"""Two more noise multipliers. Beside `SMALL_SIGMA`, the gradient is not negligible. Its decimals
find trainers that round σ."""
ROUNDED_SIGMA = 1e-12
"""Noise multiplier whose noise is negligible. It is not 0, to find trainers that clip only if σ =
0."""
THRESHOLD = 0.7
"""Clipping threshold C of the runs with σ = `SIGMA`, except on a linear layer. The threshold is not
1, so noise that is scaled by C², or not by C, has a wrong standard deviation."""
LOW_THRESHOLD = 1e-3
"""Clipping threshold with σ = `SMALL_SIGMA`, as a share of `Verification.below_all`. It makes
unclipped gradients stand out from the noise."""
DATA_SIGMA, DATA_THRESHOLD = 1e6, 1e-9
"""Noise multiplier σ of `Verification.left_behind`, and its clipping threshold as a share of
`Verification.below_all`. A raw gradient stands out from noise in proportion to so small a
threshold."""
DATA_SHARE = 0.01
"""Largest change by one example in `Verification.left_behind`, as a share of the deviation."""
DATA_SEEDS = 4
"""Number of runs with different noise in `Verification.left_behind`."""
NO_OPTIMIZER = ", if the movement is SGD's, since the trainer calls no step() of an optimizer"
"""End of a message about a trainer that moves parameters itself."""
MIN_NOISE = 128
"""Smallest number of noise elements of each parameter in a run with σ = `SIGMA`. Two such runs are
enough to detect noise that has twice the correct standard deviation."""
SEED_STRIDE = 10_000
"""Factor between a run's number and its seed, if the number is even. `build` derives a seed for
each rank from an even seed. The factor keeps the derived seeds larger than all odd seeds."""
MOST_NOISE = 2**16
"""Largest number of noise elements of each parameter of a run with σ < `SIGMA` that is judged."""


@dataclass(frozen=True)
class Batching:
    """A batch size and a number of micro-batches, with batches and their per-sample gradients.

    ``label`` is a suffix for names of checks, e.g. " in 2 parts".
    """

    label: str
    case: Case
    batches: Sequence[Batch]
    examples: Sequence[Examples]


class Verification:
    """The checks of one trainer.

    Args:
        case: see `dpbench.verify.trainer_checks.verify`.
        device: the device to train on.
        clips: the trainer's label ``clips``: ``flat`` or ``per layer``.
        weights: the trainer's ``noise_weights``; a single weight if noise is independent.

    Attributes:
        half, below_all, above_all: thresholds that about half, all and none of the norms exceed.
        judges_noise: whether this process judges the noise. Of several ranks, only rank 0 does.
        used: σ, C and B of each run of `draws`.
    """

    def __init__(
        self, case: Case, device: torch.device, clips: str, weights: Sequence[float] = INDEPENDENT
    ) -> None:
        self.case, self.clips, self.weights = case, clips, weights
        self.model = TrainedModel(case, device, STEPS)
        self.examples = self.model.examples()
        self.half, self.below_all, self.above_all = thresholds(self.examples, clips)
        self.judges_noise = rank_and_ranks()[0] == 0
        whole = replace(case, micro_batches=1)
        self.batchings = [Batching("", whole, self.model.batches, self.examples)]
        if (parts := case.micro_batches) > 1:
            label = f" in {parts} parts"
            self.batchings.append(Batching(label, case, self.model.batches, self.examples))
        self.batchings.append(self._one_by_one())
        if case.sampling == "poisson":
            self.batchings += map(self._of_size, (0, 1, case.batch_size + 1 + case.batch_size % 2))
        self.tolerance = cache(self._tolerance)
        self._clipped = cache(lambda n, i, c: self.clipped(self.batchings[n].examples[i], c))
        self.used: list[tuple[float, float, float]] = []
        self._runs = 0

    def _one_by_one(self) -> Batching:
        """Make batches of another size, with one or two examples in each micro-batch of a rank.

        If the case has several micro-batches, these batches have one micro-batch more.
        """
        parts = self.case.micro_batches
        parts += parts > 1
        size = parts * self.case.gpus
        if size == self.case.batch_size:
            size *= 2
        case = replace(self.case, batch_size=size, micro_batches=parts)
        both = (slice(None, size), slice(-size, None))
        return self._batching(f" of {size}" + f" in {parts} parts" * (parts > 1), case, both)

    def _of_size(self, size: int) -> Batching:
        """Make batches of ``size`` examples, as Poisson sampling may draw.

        ``size`` is 0, 1, or more than the case's batch size.
        """
        number = 2 * self.case.batch_size
        both = [(torch.arange(size) + i) % number for i in range(STEPS)]
        return self._batching(f" sampled {size}", self.case, both)

    def _batching(self, label: str, case: Case, chosen: Sequence[slice | Tensor]) -> Batching:
        """Make batches of examples of both batches. Each entry of ``chosen`` selects a batch."""
        batch = pytree.tree_map(lambda *each: torch.cat(each), *self.model.batches)
        joined = Examples.joined(self.examples)
        batches = [pytree.tree_map(itemgetter(each), batch) for each in chosen]
        examples = [joined.chosen(each, case.batch_size) for each in chosen]
        return Batching(label, case, batches, examples)

    def checks(self, other_process: Iterable[Gradients]) -> Iterator[Check]:
        """Yield all checks.

        Args:
            other_process: noisy steps of another process. Their noise must not occur in this
                process.
        """
        model, ranks = self.model, self.case.gpus
        yield Check.judged("reference", [], "", f"a loop over the examples in {model.reference}")
        found = "each example has the loss that it has alone"
        yield Check.judged("examples apart", [model.mixed] * bool(model.mixed), "", found)
        if model.mixed:
            return  # the reference, of one example at a time, is none
        yield self._first_gradient()
        draws = self.draw_all(other_process)
        sigmas = (ROUNDED_SIGMA, ROUNDED_SIGMA, 0.0)
        for sigma, batching in zip(sigmas, self.batchings, strict=False):
            yield self.gradient(", all clipped", batching, self.below_all, sigma)
        for batching in self.batchings:
            if batching.label.startswith(" sampled"):
                yield self.gradient(", half clipped", batching, self.half, 0.0)
        if self.judges_noise:
            runs = "parameters, steps, runs" + ", processes" * bool(other_process)
            yield from check_noise(draws, model.dtype, runs)
            yield used("used for noise", self.used)
        else:
            yield Check("noise", NOT_JUDGED, "", IN_RANK_0)
        yield self.left_behind(model.first_steps)
        changed = [f"{name}: is frozen, but changes" for name in sorted(model.changed_frozen)]
        frozen = f"{len(model.start) - len(model.trained)} frozen"
        yield Check.judged("frozen parameters stay", changed, "", frozen)
        if ranks > 1:
            names = sorted(model.differ_between_ranks)
            differing = [f"{name}: ranks differ after a step" for name in names]
            yield Check.judged("ranks agree", differing, "", f"{ranks} ranks")

    # --- gradients -------------------------------------------------------------------------------

    def gradient(
        self, what: str, batching: Batching, threshold: float, sigma: float, number: int = STEPS
    ) -> Check:
        """Check that steps without noticeable noise subtract the mean of clipped gradients.

        If parameters do not move so, but an optimizer receives these means, then from now on what
        the optimizer receives is judged, and `left_behind` judges what becomes of the parameters.
        If no optimizer steps, the trainer may keep the weights itself. Then from now on the
        movement begins at the value after the last step.
        """
        case, model = batching.case, self.model
        tolerance = self.tolerance(batching.label, threshold)

        def take() -> tuple[list[Gradients], list[dict[str, float]]]:
            steps = [*model.steps(case, number, batching.batches, sigma, threshold)]
            return steps, self.distances(batching, steps, threshold)

        steps, far = take()
        if _largest(far) > tolerance and not model.keeps_weights and not model.judges_received:
            model.judges_received = bool(model.received)
            model.keeps_weights = not model.received and model.restores_weights(
                case, batching.batches[0]
            )
            others, of_others = take()
            if _largest(of_others) <= tolerance:
                steps, far = others, of_others
            else:
                model.judges_received = model.keeps_weights = False
        near = 1e-3 if case.precision == "fp32" else 0.05
        parts = case.micro_batches * case.gpus
        known = cache(lambda i: batching.examples[i].candidate_means(self.clips, threshold, parts))
        wrong = []
        for name in model.trained:
            if off := [i for i, step in enumerate(far) if step[name] > tolerance]:
                i, batch = off[0], off[0] % STEPS
                error = batching.examples[batch].diagnose(name, steps[i][name], known(batch), near)
                error = error or f"off by {far[i][name]:.2g} of its norm"
                error += "" if model.received else NO_OPTIMIZER * (case.optimizer == "sgd")
                wrong.append(f"{name}: {f'from step {i + 1} on, ' if i else ''}{error}")
        most, worst = max((step[name], name) for step in far for name in step)
        name = f"gradient{batching.label}{what}"
        return Check.judged(name, wrong, worst, f"off by {most:.2g} of itself (≤ {tolerance:.2g})")

    def _first_gradient(self) -> Check:
        first, number = self.batchings[0], self.model.first_steps
        return self.gradient(", half clipped", first, self.half, 0.0, number)

    def distances(
        self, batching: Batching, steps: Sequence[Gradients], threshold: float
    ) -> list[dict[str, float]]:
        """Return the relative error of each parameter in each step.

        Opacus adds 1e-6 to norms, and some trainers add nothing. The errors are computed for both,
        and the errors with the smaller maximum are returned.
        """
        tried = []
        for added in (1e-6, 0.0):
            wanted = [self.clipped(each, threshold, added) for each in batching.examples]
            sizes = [each.sizes for each in batching.examples]
            tried.append(list(map(distances, steps, cycle(wanted), cycle(sizes))))
        return min(tried, key=_largest)

    def clipped(self, examples: Examples, threshold: float, added: float = 0.0) -> Gradients:
        """Return the mean of the examples' clipped gradients."""
        return examples.mean(examples.factors(self.clips, threshold, added))

    def _tolerance(self, label: str, threshold: float) -> float:
        """Return the largest allowed relative error.

        At precisions other than fp32, twice the error of Opacus's trainer ``dpsgd`` is allowed, but
        at most 0.5. With 16 bits, at least `ROUNDED_TWICE` is allowed: a trainer may round factors
        and operands where Opacus rounds only gradients.
        """
        batching = next(each for each in self.batchings if each.label == label)
        if batching.case.precision == "fp32":
            return max(TOLERANCE, 1.5 * max(each.float32_error for each in self.examples))
        trainer = "dpsgd:clip=per_layer" if self.clips == "per layer" else "dpsgd"
        opacus = replace(batching.case, trainer=trainer, **ONE_PROCESS)
        steps = [*self.model.steps(opacus, STEPS, batching.batches, 0.0, threshold)]
        of_opacus = 2 * _largest(self.distances(batching, steps, threshold))
        least = ROUNDED_TWICE if batching.case.precision != "tf32" else 0.0
        return min(max(of_opacus, least), 0.5)

    # --- noise -----------------------------------------------------------------------------------

    def draw_all(self, other_process: Iterable[Gradients]) -> list[Draw]:
        """Collect the noise of runs for each `Batching` with several noise multipliers σ.

        With σ = `SIGMA`, the clipping threshold is `THRESHOLD`. With `SMALL_SIGMA`, it is below all
        norms. With `FRACTIONAL_SIGMA`, it is above all norms.

        Args:
            other_process: steps of another process with the first run's batches, σ and threshold.
        """
        first = self.batchings[0]
        draws = self.draws(first, SIGMA, THRESHOLD, self.model.first_steps)
        for batching in self.batchings[1:]:
            draws += self.draws(batching, SIGMA, THRESHOLD, STEPS)
        if self.judges_noise:
            device = self.model.device
            taken = ({name: g.to(device) for name, g in step.items()} for step in other_process)
            draws += self._drawn("another process", first, SIGMA, THRESHOLD, taken)
        for batching in self.batchings:
            draws += self.draws(batching, SMALL_SIGMA, LOW_THRESHOLD * self.below_all, STEPS)
            draws += self.draws(batching, FRACTIONAL_SIGMA, self.above_all, STEPS)
        return draws

    def draws(self, batching: Batching, sigma: float, threshold: float, steps: int) -> list[Draw]:
        """Take one run and return its noise, or nothing in ranks that do not judge noise."""
        self._runs += 1
        self.used.append((sigma, threshold, batching.case.batch_size))
        # Ranks derive their own seeds from an even seed, see `SEED_STRIDE`.
        seed = self._runs if self._runs % 2 else self._runs * SEED_STRIDE
        run = f"σ = {sigma:g}, C = {threshold:.3g}{batching.label}"
        self.tolerance(batching.label, self.below_all)  # called first, because it may set the seed
        taken = self._noisy_steps(batching, sigma, threshold, steps, seed)
        if self.judges_noise:
            return [*self._drawn(run, batching, sigma, threshold, taken)]
        deque(taken, maxlen=0)  # other ranks wait in collectives for these steps
        return []

    def steps_elsewhere(self, seed: int) -> Iterator[Gradients]:
        """Yield noisy steps for `checks` in another process.

        The same number of steps comes before them in both processes. So noise that repeats in both
        has the same position in both.
        """
        self._first_gradient()
        yield from self._noisy_steps(self.batchings[0], SIGMA, THRESHOLD, STEPS, seed)

    def _noisy_steps(
        self, batching: Batching, sigma: float, threshold: float, steps: int, seed: int
    ) -> Iterator[Gradients]:
        """Yield the updates of steps with noise.

        With σ = `SIGMA`, steps are added until the steps together have `MIN_NOISE` elements of
        every parameter. An added step yields only parameters with fewer than `MIN_NOISE` elements.

        The trainer gets no seed of its own. A trainer that then takes a seed that is always the
        same draws the noise of an earlier run again.
        """
        sizes = {name: self.model.start[name].numel() for name in self.model.trained}
        number = max(steps, -(-MIN_NOISE // min(sizes.values())) if sigma == SIGMA else 0)
        taken = self.model.steps(
            batching.case, number, batching.batches, sigma, threshold, seed, repeatable=False
        )
        for i, step in enumerate(taken):
            yield {name: g for name, g in step.items() if i < steps or sizes[name] < MIN_NOISE}

    def _drawn(
        self,
        run: str,
        batching: Batching,
        sigma: float,
        threshold: float,
        steps: Iterable[Gradients],
    ) -> Iterator[Draw]:
        """Yield each step's noise: the update minus the mean clipped gradient, divided by σC/B.

        σ is the noise multiplier, C the clipping threshold and B the batch size.

        If noise is correlated over steps, the contribution of earlier steps is subtracted as well.
        The result is then only the noise that the step itself has drawn.
        """
        scale = batching.case.batch_size / (sigma * threshold)
        allowed = self.tolerance(batching.label, self.below_all) + self._of_rounding(batching)
        slack = allowed * scale * threshold
        newest, *weights = self.weights
        before: deque[Gradients] = deque(maxlen=len(weights))
        most = MOST_NOISE if sigma < SIGMA else None
        for i, step in enumerate(steps):
            clipped = self._clipped(self.batchings.index(batching), i % STEPS, threshold)
            noise = {name: ((g - clipped[name]) * scale).flatten() for name, g in step.items()}
            for name in noise:
                for weight, drawn in zip(weights, before, strict=False):
                    noise[name] -= weight * drawn[name]
                noise[name] /= newest
            before.appendleft(dict(noise))
            times = sum(map(abs, whitening(self.weights, i + 1)))
            draw = Draw.beside(clipped, run, i + 1, noise, slack * times)
            yield replace(draw, noise={name: z[:most].float() for name, z in noise.items()})

    def _of_rounding(self, batching: Batching) -> float:
        """Return how large gradients that are only rounding errors may become, as a share of C.

        If each parameter is clipped by itself, a trainer with 16 bits clips rounding errors, such
        as the gradients of attention keys' biases, to C/√n for n parameters.
        """
        if self.clips == "flat" or batching.case.precision in ("fp32", "tf32"):
            return 0.0
        sizes = [*self.examples[0].sizes.values()]
        rounded = sum(size < NEGLIGIBLE * max(sizes) for size in sizes)
        return float((rounded / len(sizes)) ** 0.5)

    # --- what steps leave behind -----------------------------------------------------------------

    def left_behind(self, number: int) -> Check:
        """Check that noise hides how one example changes what ``number`` steps leave behind.

        The same steps are taken with several seeds of the noise, and with one example of each batch
        replaced. An element of `TrainedModel.left` may change with the example by at most
        `DATA_SHARE` of its standard deviation over seeds. An element that is a linear function of n
        noisy updates changes by at most 2√n/σ of its deviation. With σ = `DATA_SIGMA` and n = 60,
        this exceeds `DATA_SHARE` only if the deviation of `DATA_SEEDS` values is below 1/600 of the
        true one. This has a probability below 2e-8, by the bound on a mean square in
        `dpbench.verify.noise`. The movement of parameters by plain SGD is judged elsewhere.

        A change by an example counts if it occurs with two seeds. With one seed, noise close to
        zero may let an example change the sign of an element.
        """
        model = self.model
        parameters = model.judges_received or self.case.optimizer != "sgd"

        def after(batches: Sequence[Batch], seed: int) -> Gradients:
            threshold = DATA_THRESHOLD * self.below_all
            list(model.steps(self.case, number, batches, DATA_SIGMA, threshold, seed, RATE))
            return model.left(parameters=parameters)

        name = "buffers hold no data"
        if not model.left(parameters=parameters):
            return Check.judged(name, [], "", "no buffers")
        first, second = model.batches
        others = [_with_first(second, 0, first), _with_first(second, -1, second)]
        runs = [after(model.batches, 1 + seed) for seed in range(DATA_SEEDS)]
        changed = [after(others, 1), after(others, 2)]
        wrong = []
        for left in dict.fromkeys(each for run in (*runs, *changed) for each in run):
            shapes = {run[left].shape if left in run else None for run in (*runs, *changed)}
            if len(shapes) > 1:
                wrong.append(f"{left}: its shape changes with the noise or with an example")
                continue
            values = torch.stack([run[left].double() for run in runs])
            eps = torch.finfo(kind).eps if (kind := runs[0][left].dtype).is_floating_point else 0.0
            hidden = DATA_SHARE * values.std(0) + 2 * eps * values.abs().amax(0)
            differ = [
                _differ(v, run[left], hidden) for v, run in zip(values, changed, strict=False)
            ]
            if (differ[0] & differ[1]).any():
                again = after(model.batches, 1)[left]
                error = "noise does not hide how one example changes it"
                if _differ(values[0], again, hidden).any():
                    error = "cannot be judged, because it differs between two equal runs"
                wrong.append(f"{left}: {error}")
        return Check.judged(name, wrong, "", f"{len(runs[0])} tensors")


def _largest(far: Sequence[dict[str, float]]) -> float:
    return max(distance for step in far for distance in step.values())


def _with_first(source: Batch, i: int, batch: Batch) -> Batch:
    """Replace the first example of a batch with example ``i`` of another batch."""
    return pytree.tree_map(lambda new, old: torch.cat([new[i][None], old[1:]]), source, batch)


def _differ(a: Tensor, b: Tensor, hidden: Tensor) -> Tensor:
    """Return where two values differ by more than ``hidden``. Both may be the same NaN or inf."""
    return ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= hidden))
