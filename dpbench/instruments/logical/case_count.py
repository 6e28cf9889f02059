"""Counts a step of a case, whose real trainer runs on tensors without data."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor

from dpbench.child.build import about_sizes, build, labels_of
from dpbench.core.case import Case
from dpbench.core.errors import CaseFailed, DpbenchError, own_line
from dpbench.instruments.logical.as_on_cuda import untraced
from dpbench.instruments.logical.counter import OperatorCounter, logical_rows, without_data
from dpbench.instruments.logical.one_rank import fake_process_group
from dpbench.instruments.logical.recorder import freeze_existing_objects
from dpbench.results.kernels import OperatorCount, guesses
from dpbench.results.outcome import Outcome
from dpbench.training.base import TrainerBase
from dpbench.training.phases import observed_step
from dpbench.workloads.base import examples_in

T = TypeVar("T")

STEADY = 1e-3
"""A step is steady if it changes the live bytes by at most this fraction of the bytes before.

The fraction is not 0, because Opacus keeps a few kilobytes of norms after the first step.
"""

MOST_STEPS = 3

Counted = tuple[tuple[OperatorCount, ...], dict[str, int], int]
"""Counts of a step: operators, peak live bytes by phase, bytes of the largest tensor."""


def count_case(case: Case, active: int) -> Outcome:
    """Count a case in this process, with up to ``active`` Poisson batches.

    The notes of the outcome include assumed values of tensors. Operators of unknown libraries
    are counted by their schema. The notes list the unknown operators that move few bytes.
    Tables list the unknown operators that move many bytes.
    """
    counter, labels, steps = counted(case, active, labels_of)
    rows = [
        row
        for repeat, (operators, peaks, largest) in enumerate(steps[1:] or steps)
        for row in logical_rows(case, operators, peaks, repeat, largest)
    ]
    operators = tuple(steps[0][0])
    light = {each.operator for each in operators if each.general_rule}
    light -= guesses(operators).keys()
    notes = sorted(counter.notes)
    notes += [f"{name}: each input is counted as read once" for name in sorted(light)]
    if case.sampling != "fixed":
        notes.append(about_sizes(case, active))
    if case.gpus > 1:
        notes.append(f"counted: one rank of {case.gpus}")
    return Outcome(case, tuple(rows), operators=tuple(operators), notes=tuple(notes), labels=labels)


def counted(
    case: Case, active: int, read: Callable[[TrainerBase], T]
) -> tuple[OperatorCounter, T, list[Counted]]:
    """Count a case, and return the counter, the result of ``read(trainer)``, and the counts.

    Raises:
        CaseFailed: building the case or a step raises an error.
    """
    try:
        with (
            untouched_torch(),
            freeze_existing_objects(),
            fake_process_group(case.gpus),
            without_data() as counter,
        ):
            trainer, steps = _train(case, counter, active)
            return counter, read(trainer), steps
    except DpbenchError:
        raise
    except Exception as error:  # a trainer may raise any error
        raise CaseFailed(
            f"{case.id}: counting logical bytes failed with {_in_one_line(error)}"
        ) from error


def _train(case: Case, counter: OperatorCounter, active: int) -> tuple[TrainerBase, list[Counted]]:
    """Train until a step is steady, and return the trainer and the counts.

    The first counts are the counts of the steady step, or of the last step if no step is
    steady. With Poisson sampling, the counts of each sampled step follow.
    """
    sampled = 0 if case.sampling == "fixed" else active
    batches: Sequence[Any]
    trainer, batches = build(case, torch.device("cpu"), MOST_STEPS + sampled, sampled=sampled)

    def count_step(batch: Any) -> Counted:
        with untraced(), observed_step(counter):
            trainer.train_step(batch)
        return counter.operators, dict(counter.peaks), counter.memory.largest

    after = live_bytes(counter)
    for number, batch in enumerate(batches[:MOST_STEPS]):
        before = after
        steps = [count_step(batch)]
        after = live_bytes(counter)
        steady = abs(after - before) <= STEADY * before
        if steady and number >= (case.gpus > 1):
            break
    else:
        note = f"no step was steady: step {MOST_STEPS} added {after - before:,} bytes to memory"
        counter.notes[note] = 1
    if sampled:
        notes, by_size = counter.notes.copy(), dict[int, Counted]()
        sizes = [examples_in(batch) for batch in batches[MOST_STEPS:]]
        for size, batch in zip(sizes, batches[MOST_STEPS:], strict=True):
            by_size[size] = by_size.get(size) or count_step(batch)
            notes |= counter.notes
        counter.notes = notes
        steps += [by_size[size] for size in sizes]
    return trainer, steps


def _in_one_line(error: Exception) -> str:
    """Return the class and message of an error, and the line of user code that raised the error."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}{own_line(error.__traceback__)}"


def live_bytes(counter: OperatorCounter) -> int:
    """Return the live bytes between two steps, after collecting reference cycles."""
    gc.collect()
    return counter.memory.now


@contextmanager
def untouched_torch() -> Iterator[None]:
    """Use PyTorch's default dtype, device and modes within the block.

    At the end of the block, the user's settings are restored.
    """
    with (
        ExitStack() as stack,
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        warnings.catch_warnings(),
    ):
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        # dpbench reports errors in one line, so PyTorch must not log their tracebacks.
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))
        if torch.get_default_device().type != "cpu":  # a default device slows each operator
            stack.enter_context(torch.device("cpu"))
        # Opacus's fast gradient clipping deep-copies gradients, which reads addresses of gradients.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # FSDP2 warns about each returned view, but the view matters only if it is modified.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        torch.set_default_dtype(torch.float32)
        yield
