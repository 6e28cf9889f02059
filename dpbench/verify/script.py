"""Checks the steps of a private script from what a `StepRecord` recorded while the script trained.

Four things are judged. Each rests on what the step itself does:

- *Who is trained.* A parameter or buffer may depend on the private batches only through gradients
  that a private training has handed over (`Influences`).
- *What is handed over*, and *clipping*: the gradient without noise (`PrivateSteps`).
- *The noise*: the difference of the gradients with and without noise (`check_noise`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dpbench.verify.check_result import FAILED, NOT_JUDGED, NOTE, Check, used
from dpbench.verify.noise import check_noise
from dpbench.verify.private import PrivateSteps
from dpbench.verify.script_record import StepRecord, shape_of

MOST_NAMES = 3
"""Largest number of parameters that one line of a message names."""

NOT_CHECKED = (
    "that the loss is a mean or sum over examples; that no example's input or label is made of "
    "others; that the sampler draws at its rate; that no private data passes through Python "
    "numbers, NumPy or files; that σ is the one for your ε; other steps than these"
)


def check_steps(record: StepRecord) -> Iterator[Check]:
    """Yield the checks of all steps."""
    yield from _parameter_checks(record)
    if record.bypassed:
        line = f"{record.bypassed} steps instead of the optimizer that make_private returns"
        yield Check("clipping and noise", FAILED, "", "none", [line])
    if record.private.latest:
        yield _dependence_check(record)
        yield from _noise_checks(record.private, record.steps)
        yield from _gradient_checks(record.private)
    elif not record.bypassed:
        why = (
            "no step is taken by Opacus's optimizer, private.step or private.optimizer, and only "
            "their steps can be checked"
        )
        yield Check("clipping and noise", NOT_JUDGED, "", why)
    yield from _notes(record)


def _parameter_checks(record: StepRecord) -> Iterator[Check]:
    known, steps = record.known, f"in {record.steps} steps"
    # Ignore models that only compute, such as a teacher, beside models that are trained.
    names = {id(p): name for name, p in record.parameters().items()}
    models = [[names[id(p)] for p in m.parameters()] for m in record.models.values()]
    stepped = [each for each in models if any(known[name].has_optimizer for name in each)]
    of_models = {name for each in stepped or models for name in each}
    trained = [name for name, each in known.items() if each.trained and name in of_models]
    chosen = [name for name in trained if known[name].has_optimizer]
    unowned = [parameter for parameter, used in record.unowned.values() if not used]
    absent = "trainable, but in no optimizer that steps"
    if unowned:
        absent += (
            f"; optimizers have {len(unowned)} parameters of no called module; the first has the "
            f"shape {shape_of(unowned[0])}"
        )
    yield _check(
        "optimizer has the parameters",
        [*known] if unowned and not trained else [n for n in trained if n not in chosen],
        absent,
        f"{len(chosen)} of {len(trained)} trainable",
    )
    idle = [name for name in chosen if not known[name].had_gradient]
    how = f"{len(chosen) - len(idle)} of {len(chosen)} {steps}"
    yield _check("parameters get gradients", idle, f"no gradient {steps}", how)
    if should_move := [name for name in chosen if known[name].should_move]:
        stuck = [name for name in should_move if not known[name].moved]
        how = f"{len(should_move) - len(stuck)} of {len(chosen)} {steps}"
        still = [name for name in chosen if not (known[name].should_move or known[name].moved)]
        how += f"; {_named(still)}: no gradient beyond rounding" * bool(still)
        unchanged = f"has a gradient, but did not change {steps}"
        yield _check("parameters move", stuck, unchanged, how)
    else:
        yield Check("parameters move", NOT_JUDGED, "", "no learning rate is above 0")
    frozen = [name for name, each in known.items() if not each.trained]
    thawed = [name for name in frozen if known[name].moved]
    how = f"{len(frozen)} frozen"
    yield _check("frozen parameters stay", thawed, "is frozen, but changes", how)


def _dependence_check(record: StepRecord) -> Check:
    name = "trained by private steps"
    if not (private := record.private_sources()):
        return Check(name, NOT_JUDGED, "", "no private batch is known")
    found = [[each for each, bits in now.items() if bits & private] for now in record.depends]
    reached = {each for now in found for each in now}
    wrong = []
    if reached:
        step, first = next((step, now) for step, now in enumerate(found, 1) if now)
        first = [each for each in first if each in record.written[step - 1]] or first
        more = len(reached) - len(first)
        wrong = [f"{_named(first)} from step {step} on" + f", then {more} more" * bool(more)]
    wrong += ["the loss of a later step"] * record.remembers
    words = "depends on private batches otherwise than through a private step"
    number = len({each for sources in record.depends for each in sources})
    how = f"{len(reached)} of " * bool(reached) + f"{number} parameters and buffers"
    return _check(name, [", and ".join(wrong)] * bool(wrong), words, how)


def _noise_checks(private: PrivateSteps, steps: int) -> Iterator[Check]:
    if private.noiseless or not private.draws:
        some = f" in {len(private.noiseless)} of {steps} steps" * bool(private.draws)
        why = f"σ is 0{some}" if private.noiseless else "no private step was compared"
        yield Check("noise", NOT_JUDGED, "", why)
    dtypes = {p.dtype for each in private.latest.values() for p in each.parameters.values()}
    dtype = min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
    for names, draws in private.draws.items():
        of = f" of {names[0]}, …" * (len(private.draws) > 1)
        for check in check_noise(draws, dtype, "parameters, steps"):
            applies = check.verdict != NOT_JUDGED or check.wrong
            verdict = check.verdict if applies else NOTE
            yield replace(check, name=check.name + of, verdict=verdict)


def _gradient_checks(private: PrivateSteps) -> Iterator[Check]:
    wrong = [f"{_named([*names])}: {what}" for what, names in private.wrong.items()]
    why = "; ".join(private.reasons)
    if private.errors:
        far, worst, tolerance = max(private.errors)
        error_text = f"off by {far:.2g} of its norm (≤ {tolerance:g}), {', '.join(private.clips)}"
        yield Check.judged("gradient", wrong, worst, error_text)
        if not private.has_clipped:
            yield Check("clipping", NOT_JUDGED, "", "no norm exceeded the threshold")
    if why or not private.errors:
        name = "gradient of some steps" if private.errors else "gradient"
        yield Check(name, NOT_JUDGED, "", why or "no private step was taken")


def _notes(record: StepRecord) -> Iterator[Check]:
    notes = {}
    if record.follows:
        why = "if by a metric of private data, that is a leak"
        notes["learning rate"] = f"ReduceLROnPlateau changes it; {why}"
    latest = record.private.latest.values()
    seeds = [each.known_seed for each in latest if each.known_seed is not None]
    if record.private.draws and seeds:
        notes["seed"] = f"who knows the seed {min(seeds)} can subtract the noise"
    notes["not checked"] = NOT_CHECKED
    if record.private.used:
        yield used("used by the script", record.private.used)
    for name, text in notes.items():
        yield Check(name, NOTE, "", text)


def _check(name: str, wrong: Sequence[str], words: str, how: str) -> Check:
    """Make a check that lists the failing parameters in one line."""
    return Check.judged(name, [f"{_named(wrong)}: {words}"] * bool(wrong), "", how)


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
