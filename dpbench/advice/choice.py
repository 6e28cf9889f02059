"""Recommends a private method for a case on a card, and says why. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dpbench.advice.footprint import Footprint, footprints, largest_batch, needed
from dpbench.advice.predict import OPERATOR_SECONDS, predict
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import TRAINERS, locate, resolve
from dpbench.results.roofline import Roofs, find_card, reachable
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.summary import of_one_instrument

CLOSE = 0.05
"""Predicted times are close if the longer time exceeds the shorter time by at most this share.
Smaller differences between predictions mean little."""

SLOW = 4.0
"""If the recommended step takes more times a standard step, or no method trains the model, the
advice says what to change in the model, so that a faster method trains it."""

ON_ALL_LAYERS = ("fused", "dpsgd")
"""Methods whose refusals say what to change in the model, the first that refuses."""


@dataclass(frozen=True)
class Advice:
    """A recommendation for a case.

    Attributes:
        trainer: the recommended method; None if no private method fits the memory.
        reason: the reasons for the recommendation, as text.
        frame: one row for each method: first the standard trainer, then private methods in
            ascending order of predicted time. ``logical_bytes``, ``flops``, ``launches``,
            ``peak_memory_bytes``, ``roofline_seconds`` (minimum time for bytes and arithmetic),
            ``launch_seconds`` (CPU time) and ``predicted_seconds`` are numbers of one step.
            ``bytes_ratio``, ``flops_ratio``, … are ratios to the standard step.
            ``largest_batch`` is the largest batch that fits the memory, and ``fits`` is True if the
            case's batch fits the memory.
        refused: for each method with which this case cannot be trained or counted, the reason.
    """

    trainer: str | None
    reason: str
    frame: pd.DataFrame
    refused: Mapping[str, str] = field(default_factory=dict)


def advise(
    case: Case,
    *,
    trainers: Sequence[str] = (),
    gpu: str = "h200",
    memory: float | None = None,
    progress: Callable[[str], object] = lambda trainer: None,
    operator_seconds: float = OPERATOR_SECONDS,
) -> Advice:
    """Count a step of each method, predict its time on a card, and choose a private method.

    Args:
        case: the case; its trainer is ignored.
        trainers: the names of the methods to compare; by default all registered trainers.
        gpu: the name of a card whose peak rates dpbench knows.
        memory: the bytes of the GPU's memory; by default the memory of the card.
        progress: called with a trainer's name after the trainer's step was counted or refused.
        operator_seconds: the CPU time for an operator outside CUDA graphs, in seconds.

    Raises:
        ConfigurationError: the card, its memory or a method is unknown.
        DpbenchError: the standard step cannot be counted.
    """
    card = find_card(gpu)
    memory = memory or card.memory
    if memory is None:
        raise ConfigurationError(f"the memory of {card.name} is unknown: add --memory")
    names = dict.fromkeys((BASELINE_TRAINER, *(trainers or TRAINERS)))
    cases = [resolve(case.with_trainer(name)) for name in names]
    locate(cases)
    counted: list[Footprint] = []
    refused: dict[str, str] = {}
    for each, found in footprints(dict.fromkeys(cases), memory):
        progress(each.trainer)
        if isinstance(found, Footprint):
            counted.append(found)
        elif each.trainer == BASELINE_TRAINER:
            raise found
        else:
            refused[each.trainer] = str(found).removeprefix(f"{each.id}: ")
    reached = reachable(card)
    rows = [_row(each, reached, memory, operator_seconds) for each in counted]
    frame = _over_standard(pd.DataFrame(rows))
    trainer, reason = _choice(frame, case.batch_size, memory, card.name)
    if len(frame) == 1 or frame[frame.trainer == trainer].predicted_ratio.gt(SLOW).any():
        reason = _changes(refused) + reason
    return Advice(trainer, reason, frame, refused)


def _row(
    footprint: Footprint, card: Roofs, memory: float, operator_seconds: float
) -> dict[str, Any]:
    size = footprint.case.batch_size
    totals = footprint.totals(
        lambda phase, operator, read, written, flops, *_: {
            "logical_bytes": read + written,
            "flops": flops,
            "launches": 1,
        }
    )
    seconds = predict(footprint, card, operator_seconds)
    return {
        "trainer": footprint.case.trainer,
        **totals,
        "peak_memory_bytes": footprint.peak(size),
        "roofline_seconds": seconds.roofline,
        "launch_seconds": seconds.launches,
        "predicted_seconds": seconds.predicted,
        "largest_batch": largest_batch(footprint, memory),
        "fits": needed(footprint, size) <= memory,
    }


def _over_standard(frame: pd.DataFrame) -> pd.DataFrame:
    """Add ratios to the standard step, and sort the other rows by predicted time.

    The first row of ``frame`` is the standard step.
    """
    for metric in ("logical_bytes", "flops", "launches", "peak_memory_bytes", "predicted_seconds"):
        name = (
            metric.removeprefix("logical_").removesuffix("_memory_bytes").removesuffix("_seconds")
        )
        frame[f"{name}_ratio"] = frame[metric] / frame[metric].iloc[0]
    others = frame.iloc[1:].sort_values("predicted_seconds", kind="stable")
    return pd.concat([frame.iloc[:1], others], ignore_index=True)


def _choice(
    frame: pd.DataFrame, batch_size: int, memory: float, card: str
) -> tuple[str | None, str]:
    """Return the fastest private method that fits the memory, and the reasons as text.

    The fastest method has the least predicted time. Returns None if no method fits.
    """
    private = frame[frame.trainer != BASELINE_TRAINER]
    fitting = private[private.fits]
    if private.empty:
        return None, "No private method trains this case."
    if fitting.empty:
        most = private.sort_values("largest_batch", kind="stable").iloc[-1]
        fits = f"`{most.trainer}` fits up to batch {most.largest_batch}"
        fits = fits if most.largest_batch else "even one example does not fit"
        return None, f"No private method fits {memory / 1e9:.3g} GB at batch {batch_size}; {fits}."
    best = fitting.iloc[0]
    parts = [
        f"Use `{best.trainer}`: its step should take {best.predicted_seconds * 1e3:.1f} ms on "
        f"{card}, {best.predicted_ratio:.2f} times a standard step, with {best.bytes_ratio:.2f} "
        f"times the counted bytes and {best.peak_ratio:.2f} times the counted peak memory"
    ]
    if best.predicted_ratio < 1 and not best.launch_seconds:
        parts.append("it is shorter because, with CUDA graphs, Python launches no operators")
    # Methods are in ascending order of predicted time, and `best` is the first that fits.
    # So the methods before `best` do not fit.
    parts += [f"`{name}` does not fit" for name in private.trainer.iloc[: fitting.index[0] - 1]]
    near = fitting[fitting.predicted_seconds <= best.predicted_seconds * (1 + CLOSE)].iloc[1:]
    if len(near):
        within = max(near.predicted_seconds.max() / best.predicted_seconds - 1, 0.01)
        listed = " and ".join(f"`{name}`" for name in near.trainer)
        parts.append(f"{listed} {'is' if len(near) == 1 else 'are'} within {within:.0%}")
    slower = fitting[~fitting.trainer.isin([best.trainer, *near.trainer])]
    if len(slower):
        other = slower.iloc[0]
        ratios = f"{other.predicted_ratio:.2f}, {other.bytes_ratio:.2f} and {other.peak_ratio:.2f}"
        parts.append(f"next is `{other.trainer}` with {ratios} times")
    most = fitting.sort_values("largest_batch", kind="stable").iloc[-1]
    if best.largest_batch < most.largest_batch and best.largest_batch < 2 * batch_size:
        parts.append(f"for batches above {best.largest_batch}, use `{most.trainer}`")
    return str(best.trainer), "; ".join(parts) + "."


def _changes(refused: Mapping[str, str]) -> str:
    """Return what to change in the model so that faster methods train it, as text."""
    for why in [refused[name] for name in ON_ALL_LAYERS if name in refused][:1]:
        names = [f"`{name}`" for name, other in refused.items() if other == why]
        said = f"{', '.join(names)} refuse{'s' * (len(names) == 1)}: {cut(why)}"
        return f"Change the model first: {said}. As it is: "
    return ""


def cut(why: str) -> str:
    """Return the reason of a refusal without the advice to use another trainer."""
    return why.partition(", or use the trainer")[0]


def with_measured(frame: pd.DataFrame, summary: pd.DataFrame, case: Case) -> pd.DataFrame:
    """Add measured values to the table `Advice.frame`.

    Returns:
        The frame with two more columns, which are NaN for methods that were not measured.
        ``measured_seconds`` is the time of a step. ``measured_bytes_ratio`` is the number of DRAM
        bytes divided by the baseline's number, from ``summary``. If several instruments have
        measured a metric, uses the instrument that comes first in the metric's field ``by``.
    """
    steps = summary[(summary.phase == STEP) & (summary.device != NO_HARDWARE)]
    steps = of_one_instrument(steps.loc[[each.cell == case.cell for each in steps.case]])
    for metric, name in (
        ("step_time_seconds", "measured_seconds"),
        ("dram_ratio", "measured_bytes_ratio"),
    ):
        values = steps[steps.metric == metric].drop_duplicates("trainer").set_index("trainer").value
        frame = frame.assign(**{name: frame.trainer.map(values)})
    return frame


def parse_memory(text: str) -> float:
    """Return the bytes of ``80GB`` (1 GB is 10⁹ bytes) or ``80GiB`` (1 GiB is 2³⁰ bytes)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"write memory as 80GB or 80GiB, not as {text!r}")
    return float(match[1]) * (2**30 if match[2].lower() == "gib" else 1e9)
