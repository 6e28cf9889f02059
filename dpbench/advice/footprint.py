"""Counts the calls, bytes, operations and memory of a step, on tensors without data.

A case is counted at two or more batch sizes, from which memory at other batch sizes is estimated.
A deep transformer is counted with two small numbers of layers, from which the full number of layers
is estimated. Both estimates assume that the counted quantities are linear.
"""

from __future__ import annotations

import faulthandler
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from dpbench.advice.least_bytes import norm_reads
from dpbench.child.task import Task
from dpbench.core.case import BASELINE_TRAINER, TRANSFORMER, Case
from dpbench.core.case_names import is_builtin
from dpbench.core.errors import DpbenchError, error_named
from dpbench.core.model_size import lora_rank
from dpbench.instruments.logical.logical import Logical
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.processes import at_once, cores
from dpbench.results.outcome import Outcome

Key = TypeVar("Key", bound=Hashable)

DEPTHS = 2, 4
"""A transformer with more layers is counted with each of these numbers of layers."""


@dataclass(frozen=True)
class Count:
    """One counted step.

    Args:
        batch_size: the batch size of the counted case.
        layers: the number of layers in the count, if this is less than the case's; otherwise 0.
        calls: for each group of equal calls: phase, operator, number of calls, and for one call the
            bytes read, bytes written, operations, bytes sent and the type of the operands.
        live: for each operator in a phase: phase, operator, and the live bytes after the first
            call, after the last call, and after the call with the most live bytes. If
            ``layers`` is 0, entries with an empty operator have the peak memory of a phase.
        largest: the bytes of the largest tensor.
        norms: for the standard trainer, the minimum bytes that private training would read to
            compute the norms of this batch's gradients; 0 for other trainers.
        in_graphs: True if steps run as CUDA graphs, see `TrainerBase`.
        ways: for each way to compute norms, the number of layers that use it; empty if the trainer
            does not choose ways.
    """

    batch_size: int
    layers: int
    calls: Sequence[Sequence[Any]]
    live: Sequence[Sequence[Any]]
    largest: int
    norms: int
    in_graphs: bool
    ways: Mapping[str, int]


@dataclass(frozen=True)
class Footprint:
    """Counted steps of a case, from which its memory at other batch sizes is estimated."""

    case: Case
    counts: Sequence[Count]

    @property
    def first(self) -> Count:
        """The first count, which has the case's batch size."""
        return self.counts[0]

    @property
    def norms(self) -> float:
        """The minimum bytes to read for norms, see `Count`; 0 unless the trainer is standard."""
        return self._over_layers(lambda count: {"": count.norms})[""]

    @property
    def ways(self) -> dict[str, int]:
        """For each way to compute norms, the number of layers that use it, see `Count`."""
        ways = self._over_layers(lambda count: count.ways)
        return {way: round(number) for way, number in ways.items()}

    def totals(self, of_call: Callable[..., Mapping[Key, float]]) -> dict[Key, float]:
        """Call ``of_call`` for the counted calls of a step, and add up the returned values by key.

        Args:
            of_call: receives phase, operator, bytes read, bytes written, operations, bytes sent and
                type, see `Count`. The sums must be linear in the number of layers.
        """

        def of_count(count: Count) -> dict[Key, float]:
            total: dict[Key, float] = defaultdict(float)
            for phase, operator, times, *cost in count.calls:
                for key, value in of_call(phase, operator, *cost).items():
                    total[key] += times * value
            return total

        return self._over_layers(of_count)

    def peak(self, batch_size: int) -> tuple[float, str]:
        """Return the peak memory in bytes at a batch size, and the phase of the peak."""
        # If the transformer was counted with fewer layers, live bytes after the call with the most
        # live bytes are ignored, because the number of layers can decide which call this is.
        seen = 2 if self.first.layers else 3
        live = self._over_batches(
            batch_size,
            lambda count: {
                (phase, operator, i): size
                for phase, operator, *sizes in count.live
                for i, size in enumerate(sizes[:seen])
            },
        )
        place = max(live, key=lambda place: live[place])
        return live[place], place[0]

    def largest_tensor(self, batch_size: int) -> float:
        """Return the bytes of the largest tensor of a step at a batch size."""
        return self._over_batches(batch_size, lambda count: {"": count.largest})[""]

    def _over_layers(
        self, of_count: Callable[[Count], Mapping[Key, float]], batch_size: int | None = None
    ) -> dict[Key, float]:
        size = batch_size or self.case.batch_size
        points = [(each.layers, of_count(each)) for each in self.counts if each.batch_size == size]
        return _on_line(points, self.case.size.layers if self.first.layers else 0)

    def _over_batches(
        self, batch_size: int, of_count: Callable[[Count], Mapping[Key, float]]
    ) -> dict[Key, float]:
        sizes = dict.fromkeys(count.batch_size for count in self.counts)
        known = {*sizes} if batch_size not in sizes else {batch_size}
        shared = set.intersection(*({*of_count(c)} for c in self.counts if c.batch_size in known))

        def of_shared(count: Count) -> dict[Key, float]:
            return {key: value for key, value in of_count(count).items() if key in shared}

        points = [(size, self._over_layers(of_shared, size)) for size in sizes if size in known]
        return _on_line(points[-2:], batch_size)


def _on_line(points: Sequence[tuple[int, Mapping[Key, float]]], at: int) -> dict[Key, float]:
    """Return each value at x = ``at``, on the straight line through its values at two points.

    If one point lacks a value, the value at this point is 0.
    """
    for x, values in points:
        if x == at:
            return dict(values)
    (x, low), (y, high) = points
    share = (at - x) / (y - x)
    keys = dict.fromkeys((*low, *high))
    return {key: low.get(key, 0) + share * (high.get(key, 0) - low.get(key, 0)) for key in keys}


@dataclass(frozen=True)
class Counts(Logical):
    """An instrument that counts in one process all steps that a `Footprint` needs."""

    def start(self, case: Case) -> CaseProcess:
        return CaseProcess(Task(case, self), log=None, timeout=self.timeout)

    def record_case(self, case: Case) -> Outcome:
        faulthandler.enable(2)
        counts = [vars(self.of_step(*each)) for each in steps_of(case)]
        return Outcome(case, (), details={"counts": counts})

    def of_step(self, case: Case, layers: int) -> Count:
        """Count a step of a case. `Count` describes ``layers``."""
        counter, (ways, in_graphs), _ = self.counted(
            case,
            lambda trainer: (
                dict(Counter(getattr(trainer, "ways", {}).values())),
                trainer.in_graphs,
            ),
        )
        alike = Counter[tuple[str, str, Any]]()  # without the source lines of calls
        for (phase, operator, cost, _), times in counter.calls.items():
            alike[phase, operator, cost] += times
        peaks = [(phase, "", peak, peak, peak) for phase, peak in counter.peaks.items()]
        return Count(
            case.batch_size,
            layers,
            [(*what, times, *cost) for (*what, cost), times in alike.items()],
            [*((*at, *sizes) for at, sizes in counter.live.items()), *([] if layers else peaks)],
            counter.memory.largest,
            norm_reads(case) if case.trainer == BASELINE_TRAINER else 0,
            in_graphs,
            ways,
        )


def steps_of(case: Case) -> Iterator[tuple[Case, int]]:
    """Yield the cases to count, each with the number of layers if it is reduced, otherwise 0.

    The case's batch size and a larger batch size are counted. A part of the batch is what one rank
    trains at once. If each part has one example, two larger batch sizes are counted. With one
    example, the per-sample gradient is also the gradient of the part, so memory for these parts
    does not predict the memory for larger parts.
    """
    part = case.micro_batches * case.gpus
    others = [2 * part, 3 * part] if case.batch_size == part else [case.batch_size + part]
    for batch_size in (case.batch_size, *others):
        of_size = replace(case, batch_size=batch_size)
        if not _is_deep(case):
            yield of_size, 0
            continue
        for layers in DEPTHS:
            size = case.size
            text = f"{size.vocabulary}x{size.hidden}x{layers}x{size.heads}"
            yield replace(of_size, model_size=text), layers


def _is_deep(case: Case) -> bool:
    """Return True if counting a few layers is enough to know the footprint of all layers.

    The case must run on one GPU, name only built-in classes, and train the built-in transformer
    with more than ``DEPTHS[-1]`` layers, all of them alike.
    """
    alike = not re.search(r"\d", case.trainable.removeprefix("lora:")) or lora_rank(case.trainable)
    own = case.workload != TRANSFORMER or case.model != "simple" or not is_builtin(case)
    return bool(alike) and not own and case.gpus == 1 and case.size.layers > DEPTHS[-1]


def footprints(cases: Iterable[Case]) -> Generator[tuple[Case, Footprint | DpbenchError]]:
    """Yield each case in order with its footprint, or with the error of a failed count.

    As many cases as there are CPU cores are counted at once.
    """
    cases = [*cases]
    starts = (partial(Counts().start, case) for case in cases)
    with closing(at_once(starts, cores())) as ended:
        for case, process in zip(cases, ended, strict=True):
            try:
                yield case, _read(case, process)
            finally:
                process.cancel()


def _read(case: Case, process: CaseProcess) -> Footprint | DpbenchError:
    outcome = process.outcome()
    if outcome.error:
        return error_named(outcome.error)(outcome.message)
    return Footprint(case, [Count(**each) for each in outcome.details["counts"]])
