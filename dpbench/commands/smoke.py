"""Check that every trainer can train a tiny model.

Each trainer takes two steps on a tiny model, or on a workload of your own. Gradients of a trainer
with the label ``clips`` are then compared with the clipped gradients of a loop over examples. A
line for each trainer says whether the steps worked. The exit code is 0 if they worked for every
trainer. For all checks of clipping and noise, use dpbench verify.

Examples:
  dpbench smoke
  dpbench smoke --trainer dpsgd --trainer mypackage.trainers:MyTrainer
  dpbench smoke --workload mypackage.images:Digits --set image_size=28
"""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

from dpbench.child.build import build, labels_of, pick_device, smoke_test
from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, own_line
from dpbench.core.names import joined, parted
from dpbench.core.registry import TRAINERS
from dpbench.core.settings import axis_help, declare
from dpbench.verify.reference import CLIPS, Examples, distances, thresholds
from dpbench.verify.trained_model import TrainedModel

SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 32, "model_size": "tiny"}

FAR, FAR_ROUNDED = 1e-3, 0.5
"""Largest allowed relative errors of a gradient, at fp32 and at other precisions. These are larger
than those of verify, because smoke looks for gradients that are missing or not clipped."""

LARGE_MODEL = 2**21
"""Number of trained elements above which a model is not compared, so that smoke stays quick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    declare(parser.add_argument, "trainer", help=axis_help("trainer"), dest="trainers")
    add_case(parser, AXES[1:], device="cpu", **SMALL)


def run(options: argparse.Namespace) -> int:
    """Train with each trainer, and print whether that worked."""
    failed = 0
    for trainer in options.trainers or list(TRAINERS):
        case = chosen_case(options, **SMALL, trainer=trainer)
        if case.gpus > 1:
            raise ConfigurationError(
                "smoke trains in one process: for several ranks, use dpbench verify or dpbench run"
            )
        TRAINERS.locate(case.trainer)
        name = case.trainer
        try:
            short, parameters = parted(name)
            name = joined(TRAINERS[short].__name__, parameters)
            smoke_test(case, device=options.device)
            why_not = compare_with_loop(case, options.device)
        except Exception as error:  # report any error
            failed += 1
            where = own_line(error.__traceback__)
            print(f"{trainer}: [TEST FAILED] {name}: {type(error).__name__}: {error}{where}")
        else:
            note = f" Its gradients were not compared with a loop's: {why_not}." if why_not else ""
            print(f"{trainer}: [TEST OK] {name} passed local test.{note}")
    return 1 if failed else 0


def compare_with_loop(case: Case, device: str) -> str:
    """Compare a step that clips about half of the gradients with a loop over the examples.

    Returns:
        Why the trainer's gradients could not be compared, or "". A trainer without the label
        ``clips`` is not private, and is not compared.

    Raises:
        AssertionError: a gradient is wrong.
    """
    trainer, _ = build(case, pick_device(device), 1)
    clips = labels_of(trainer).get("clips")
    if clips not in CLIPS:
        return f"its label clips is {clips!r}" if clips else ""
    if sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) > LARGE_MODEL:
        return "the model is large; dpbench verify compares them"
    try:
        model, examples = _loop(case.baseline, device)
        half, *_ = thresholds([examples], clips)
        [seen] = model.steps(case, 1, model.batches, sigma=0.0, threshold=half)
    except ConfigurationError as error:
        return str(error)
    far = distances(seen, examples.mean(examples.factors(clips, half)), examples.sizes)
    worst = max(far, key=lambda name: far[name])
    if far[worst] > (FAR if case.precision == "fp32" else FAR_ROUNDED):
        raise AssertionError(
            f"the clipped gradient of {worst} is off by {far[worst]:.2g} of its norm from that of "
            f"a loop over the examples; dpbench verify says more"
        )
    return ""


@cache
def _loop(case: Case, device: str) -> tuple[TrainedModel, Examples]:
    """Return a case's model, and the per-sample gradients of its batch from a loop."""
    model = TrainedModel(case, pick_device(device), steps=1)
    try:
        return model, model.examples()[0]
    except RuntimeError as error:
        raise ConfigurationError(f"the loop fails: {' '.join(str(error).split())}") from error
