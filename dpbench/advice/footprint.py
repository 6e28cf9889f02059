"""Counts the calls, bytes, operations and memory of a step, on tensors without data.

A case is counted at two or more batch sizes, from which memory at other batch sizes is estimated.
The estimate assumes that memory is linear in the batch size. A deep model of equal layers is
counted with two small numbers of layers, and all numbers are assumed to be linear in this number.
"""

from __future__ import annotations

import faulthandler
import os
import re
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dpbench.child.messages import POLL_SECONDS
from dpbench.child.task import Task
from dpbench.core.case import TRANSFORMER, Case, lora_rank
from dpbench.core.errors import DpbenchError, error_named
from dpbench.core.registry import is_builtin
from dpbench.instruments.logical.case_count import counted
from dpbench.instruments.logical.logical import Logical
from dpbench.launch.case_process import CaseProcess
from dpbench.results.outcome import Outcome

Key = TypeVar("Key", bound=Hashable)

DEPTHS = 2, 3
"""The numbers of layers with which a model of more equal layers is counted."""

RESERVED = 1.5e9
"""Bytes of GPU memory that are assumed for CUDA's context, the driver and libraries."""

FRAGMENTATION = 0.04
"""Share of the peak memory that the allocator is assumed to lose to fragmentation. The assumed loss
is at least the size of the largest tensor."""

MAX_BATCH = 4096
"""The largest batch per GPU that `largest_batch` considers."""


@dataclass(frozen=True)
class Count:
    """One counted step.

    Args:
        batch_size: the batch size of the counted case.
        calls: for each group of equal calls: phase, operator, number of calls, and for one call the
            bytes read, bytes written, operations, bytes sent and the type of the operands.
        live: for each operator in a phase: phase, operator, and the live bytes after the call with
            the most live bytes. Entries with an empty operator have the peak memory of a phase.
        largest: the bytes of the largest tensor.
        in_graphs: True if steps run as CUDA graphs, see `TrainerBase`.
    """

    batch_size: int
    calls: Sequence[Sequence[Any]]
    live: Sequence[Sequence[Any]]
    largest: int
    in_graphs: bool


@dataclass(frozen=True)
class Footprint:
    """Counted steps of a case, from which its memory at other batch sizes is estimated."""

    case: Case
    counts: Sequence[Count]

    @property
    def first(self) -> Count:
        """The first count, which has the case's batch size."""
        return self.counts[0]

    def totals(self, of_call: Callable[..., Mapping[Key, float]]) -> dict[Key, float]:
        """Call ``of_call`` for the counted calls of a step, and add up the returned values by key.

        Args:
            of_call: receives phase, operator, bytes read, bytes written, operations, bytes sent and
                type, see `Count`.
        """
        total: dict[Key, float] = defaultdict(float)
        for phase, operator, times, *cost in self.first.calls:
            for key, value in of_call(phase, operator, *cost).items():
                total[key] += times * value
        return total

    def peak(self, batch_size: int) -> float:
        """Return the peak memory in bytes at a batch size."""
        live = self._on_line(
            batch_size,
            lambda count: {(phase, operator): size for phase, operator, size in count.live},
        )
        return max(live.values())

    def largest_tensor(self, batch_size: int) -> float:
        """Return the bytes of the largest tensor of a step at a batch size."""
        return self._on_line(batch_size, lambda count: {"": count.largest})[""]

    def _on_line(
        self, batch_size: int, of_count: Callable[[Count], Mapping[Key, float]]
    ) -> Mapping[Key, float]:
        """Return each value at a batch size, on the straight line through the last two counts.

        Only values that both counts have are returned.
        """
        for count in self.counts:
            if count.batch_size == batch_size:
                return of_count(count)
        one, other = self.counts[-2:]
        low, high = of_count(one), of_count(other)
        share = (batch_size - one.batch_size) / (other.batch_size - one.batch_size)
        return {key: low[key] + share * (high[key] - low[key]) for key in low if key in high}


def needed(footprint: Footprint, batch_size: int) -> float:
    """Return the bytes of GPU memory that a step with this batch size needs."""
    peak = footprint.peak(batch_size)
    return peak + max(FRAGMENTATION * peak, footprint.largest_tensor(batch_size)) + RESERVED


def largest_batch(footprint: Footprint, memory: float) -> int:
    """Return the largest batch size that fits the memory of each GPU, or 0 if none fits.

    The batch size is at most `MAX_BATCH` for each GPU. It is a multiple of the number of GPUs times
    the number of micro-batches.
    """
    case = footprint.case
    part = case.micro_batches * case.gpus
    sizes = range(part, MAX_BATCH * case.gpus + 1, part)
    return part * bisect_right(sizes, memory, key=lambda size: needed(footprint, size))


@dataclass(frozen=True)
class Counts(Logical):
    """An instrument that counts in one process all steps that a `Footprint` needs.

    A step with the estimated `largest_batch` is counted, too, and then the estimate is repeated.
    A trainer whose number of calls grows with the batch would take long, and needs no such step.

    Attributes:
        memory: the bytes of a GPU's memory; 0 to count no step with the largest batch.
    """

    memory: float = 0.0

    def start(self, case: Case) -> CaseProcess:
        return CaseProcess(Task(case, self), log=None, timeout=self.timeout)

    def record_case(self, case: Case) -> Outcome:
        faulthandler.enable(2)
        layers = equal_layers(case)
        counts = [self.of_layers(each, layers) for each in steps_of(case)]
        known = {0, MAX_BATCH * case.gpus, *(count.batch_size for count in counts)}
        numbers = {sum(times for _, _, times, *_ in count.calls) for count in counts}
        for _ in range(2 * (len(numbers) == 1)):
            size = largest_batch(Footprint(case, counts), self.memory)
            if size in known:
                break
            known.add(size)
            counts.append(self.of_layers(replace(case, batch_size=size), layers))
        return Outcome(case, (), details={"counts": [*map(vars, counts)]})

    def of_layers(self, case: Case, layers: int) -> Count:
        """Count a step of a case, from few layers if it has many equal ones."""
        if layers <= DEPTHS[1]:
            return self.of_step(case)
        low, high = (self.of_step(with_layers(case, n), few=True) for n in DEPTHS)
        return extrapolated(low, high, (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]))

    def of_step(self, case: Case, *, few: bool = False) -> Count:
        """Count a step of a case.

        With ``few`` layers, only live bytes after the first and last call of each operator are
        returned, because the number of layers can decide after which call there are the most.
        """
        counter, in_graphs, _ = counted(case, self.active, lambda trainer: trainer.in_graphs)
        alike = Counter[tuple[str, str, Any]]()  # without the source lines of calls
        for (phase, operator, cost, _), times in counter.calls.items():
            alike[phase, operator, cost] += times
        peaks = [(phase, "", peak) for phase, peak in counter.peaks.items()]
        live = [(*at, most) for at, (_, _, most) in counter.live.items()]
        ends = [
            (phase, f"{name}, {which}", size)
            for (phase, name), sizes in counter.live.items()
            for which, size in zip(("first", "last"), sizes, strict=False)
        ]
        return Count(
            case.batch_size,
            [(*what, times, *cost) for (*what, cost), times in alike.items()],
            ends if few else [*live, *peaks],
            counter.memory.largest,
            in_graphs,
        )


def steps_of(case: Case) -> Iterator[Case]:
    """Yield the cases to count: with the case's batch size, and with larger batch sizes.

    A part of the batch is what one rank trains at once. If each part has one example, two larger
    batch sizes are counted. With one example, the per-sample gradient is also the gradient of the
    part, so memory for these parts does not predict the memory for larger parts.
    """
    part = case.micro_batches * case.gpus
    others = [2 * part, 3 * part] if case.batch_size == part else [case.batch_size + part]
    for batch_size in (case.batch_size, *others):
        yield replace(case, batch_size=batch_size)


def equal_layers(case: Case) -> int:
    """Return the number of a model's layers if they are known to be equal; otherwise 0."""
    # Only the processes that count import torch.
    from dpbench.child.build import workload_of

    by_number = re.search(r"\d", case.trainable) and not lora_rank(case.trainable)
    if by_number or case.gpus > 1 or not is_builtin(case):
        return 0
    if case.workload == TRANSFORMER:
        return case.size.layers if case.model == "simple" else 0
    config = getattr(workload_of(case), "config", None)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    lists = [n for n, each in vars(config or case).items() if isinstance(each, list) and each]
    alike = len(kinds) < 2 and {*lists} <= {"layer_types", "architectures"}
    return getattr(config, "num_hidden_layers", 0) if alike else 0


def with_layers(case: Case, number: int) -> Case:
    """Return the same case with another number of layers."""
    if case.workload != TRANSFORMER:
        return replace(case, set={**case.parameters, "num_hidden_layers": number})
    size = case.size
    return replace(case, model_size=f"{size.vocabulary}x{size.hidden}x{number}x{size.heads}")


def extrapolated(low: Count, high: Count, share: float) -> Count:
    """Return the count on the straight line through ``low``, at 0, and ``high``, at 1.

    A call whose cost grows with the number of layers, such as an update of all parameters, is a
    call of ``low`` that is made a negative number of times, and one of ``high``.
    """

    def on_line(some: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
        keys = dict.fromkeys((*some, *others))
        a, b = some.get, others.get
        return {key: a(key, 0) + share * (b(key, 0) - a(key, 0)) for key in keys}

    both = low, high
    calls = on_line(*({(p, name, *cost): n for p, name, n, *cost in c.calls} for c in both))
    live = on_line(*({(p, name): size for p, name, size in c.live} for c in both))
    return Count(
        low.batch_size,
        [(*what[:2], times, *what[2:]) for what, times in calls.items()],
        [(*what, size) for what, size in live.items()],
        round(low.largest + share * (high.largest - low.largest)),
        high.in_graphs,
    )


def footprints(
    cases: Iterable[Case], memory: float = 0.0
) -> Generator[tuple[Case, Footprint | DpbenchError]]:
    """Yield each case in order with its footprint, or with the error of a failed count.

    As many cases as there are CPU cores are counted at once. ``memory`` is that of `Counts`.
    """
    waiting, started = deque(cases), deque[tuple[Case, CaseProcess]]()
    try:
        while waiting or started:
            while waiting and sum(each.runs for _, each in started) < len(os.sched_getaffinity(0)):
                case = waiting.popleft()
                started.append((case, Counts(memory=memory).start(case)))
            case, process = started[0]
            if process.runs:
                time.sleep(POLL_SECONDS)
                continue
            outcome = process.outcome()
            if outcome.error:
                yield case, error_named(outcome.error)(outcome.message)
            else:
                yield case, Footprint(case, [Count(**c) for c in outcome.details["counts"]])
            started.popleft()[1].cancel()
    finally:
        for _, process in started:
            process.cancel()
