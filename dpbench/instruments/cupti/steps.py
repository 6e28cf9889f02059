"""Counting steps by phase, and each once more as a whole; and any block of PyTorch code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from dpbench.case import OUTSIDE
from dpbench.errors import unknown
from dpbench.instruments.cupti.chip import Configuration
from dpbench.instruments.cupti.errors import (
    CountersDoNotCombine,
    CuptiError,
    DriverUnavailable,
    StepsDiffer,
)
from dpbench.instruments.cupti.library import Library, load_library
from dpbench.instruments.cupti.metrics import (
    BASIC_METRICS,
    DRAM_COUNTERS,
    SHARES,
    RangeMetric,
    counters_of,
    resolve_metrics,
)
from dpbench.instruments.cupti.profiler import MAX_RANGES, RangeProfiler, chip_of
from dpbench.results.rows import STEP
from dpbench.training.phases import observed_step

STEPS_TOLERANCE = 0.005
"""By how much the DRAM bytes of equal steps may differ, as a part of them."""

CACHE_BYTES = 128e6
"""What may stay in the L2 from one step to the next; the largest to date has 126 MB."""

ByPhase = dict[str, dict[str, float]]
"""Values by phase and name."""


@dataclass(frozen=True)
class Counts:
    """What was counted, by phase and metric; phase ``"step"`` is the whole."""

    by_phase: ByPhase = field(default_factory=dict)

    def share(self, name: str, phase: str = STEP) -> float:
        """How busy something was, 0 to 1, e.g. ``gpu_busy_share``."""
        if name not in SHARES:
            raise unknown("share", name, SHARES)
        return SHARES[name].of(self.by_phase[phase])


@dataclass(frozen=True)
class Target:
    """The GPU whose work is counted: a CUDA context of this process.

    Args:
        library: the libcupti of this process.
        device: the GPU's CUDA index.
        context: the context's handle.
        synchronize: waits for all work on the GPU.
    """

    library: Library
    device: int
    context: int
    synchronize: Callable[[], None]

    @classmethod
    def of_torch(cls) -> Target:
        """The GPU that torch uses in this thread."""
        import torch

        if not torch.cuda.is_available():
            raise DriverUnavailable(f"torch {torch.__version__} finds no CUDA GPU")
        torch.cuda.synchronize()  # makes its context this thread's
        library = load_library()
        context = library.driver.current_context()
        return cls(library, torch.cuda.current_device(), context, torch.cuda.synchronize)


class StepCounter:
    """A `PhaseListener` that counts the steps it hears.

    Where one pass is not enough for all metrics, equal steps that follow each other count one
    group of counters each. First they are counted by phase; then as many steps as a whole,
    because synchronizing at the borders of phases keeps the CPU from running ahead, so that the
    phases' times and shares say where the time goes, and the whole's how much it is.

    Args:
        metrics: what is counted.
        target: where.
        by_phase: for each round of steps, whether it is counted by phase.
        max_ranges: how many ranges a step may have, one for each time that the phase changes.

    Attributes:
        chip: the GPU's chip.
        passes: how many steps it takes to count every metric.
    """

    def __init__(
        self,
        metrics: Iterable[RangeMetric],
        target: Target,
        *,
        by_phase: Sequence[bool] = (True, False),
        max_ranges: int = MAX_RANGES,
    ) -> None:
        self._metrics = list(metrics)
        self._target = target
        self._max_ranges = max_ranges
        self.chip = chip_of(target.library, target.device, target.context)
        groups = self.chip.spread(counters_of(self._metrics))
        self.passes = len(groups)
        with ExitStack() as opened:
            configurations = [
                opened.enter_context(closing(Configuration(self.chip, group))) for group in groups
            ]
            self._plan = [(c, phases) for phases in by_phase for c in configurations]
            self._profiler = self._open(configurations[0])
            self._configurations = opened.pop_all()
        self._phases: list[str] = []
        self._counted: list[ByPhase] = []

    @property
    def steps(self) -> int:
        """How many steps must be heard for one `Counts`; further ones begin the next."""
        return len(self._plan)

    def start_step(self) -> None:
        """See `PhaseListener`."""
        configuration, self._by_phase = self._plan[len(self._counted) % self.steps]
        if configuration is not self._profiler.configuration:
            self._profiler.close()
            self._profiler = self._open(configuration)
        self._profiler.start()
        self._phases = []
        self._begin(OUTSIDE if self._by_phase else STEP)

    def switch(self, phase: str) -> None:
        """See `PhaseListener`."""
        if self._by_phase:
            self._end()
            self._begin(phase)

    def end_step(self) -> None:
        """See `PhaseListener`."""
        self._end()
        counted: ByPhase = {}
        for phase, counters in zip(self._phases, self._profiler.stop(), strict=True):
            counted[phase] = _sum([counted[phase], counters]) if phase in counted else counters
        self._counted.append(counted)

    def _open(self, configuration: Configuration) -> RangeProfiler:
        target = self._target
        return RangeProfiler(target.library, target.context, configuration, self._max_ranges)

    def _begin(self, phase: str) -> None:
        self._target.synchronize()
        self._profiler.push()
        self._phases.append(phase)

    def _end(self) -> None:
        self._target.synchronize()
        self._profiler.pop()

    def counts(self, repeat: int = 0) -> Counts:
        """What was counted in the first `steps` steps, or in the ``repeat``-th as many."""
        steps = self._counted[repeat * self.steps : (repeat + 1) * self.steps]
        if len(steps) < self.steps:
            raise CuptiError(f"{len(steps)} of {self.steps} steps were counted")
        check_alike(steps)
        counters: ByPhase = {}
        for step in steps:
            for phase, values in step.items():
                counters[phase] = values | counters.get(phase, {})  # the first step's, if in both
        if STEP not in counters:
            counters[STEP] = _sum(counters.values())
        return Counts(
            {
                phase: {metric.name: metric.value(values) for metric in self._metrics}
                for phase, values in counters.items()
            }
        )

    def close(self) -> None:
        """Give the counters back."""
        with self._configurations:
            self._profiler.close()


def _sum(counted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counters of several ranges together."""
    first, *others = counted
    return {name: value + sum(more[name] for more in others) for name, value in first.items()}


def check_alike(steps: Iterable[ByPhase]) -> None:
    """Find out whether steps went through the same phases and moved the same DRAM bytes."""
    by_phase = [set(step) for step in steps if STEP not in step]
    if any(phases != by_phase[0] for phases in by_phase):
        raise StepsDiffer("the steps have different phases")
    totals = [_sum(step.values()) for step in steps]
    moved = [
        sum(total[counter] for counter in DRAM_COUNTERS)
        for total in totals
        if set(DRAM_COUNTERS) <= set(total)
    ]
    if moved and max(moved) - min(moved) > CACHE_BYTES + STEPS_TOLERANCE * max(moved):
        each = ", ".join(f"{total / 1e9:.3f}" for total in moved)
        raise StepsDiffer(f"the steps moved {each} GB")


@contextmanager
def count_ranges(
    metrics: Iterable[str] = (),
    *,
    by_phase: bool = True,
    max_ranges: int = MAX_RANGES,
    target: Target | None = None,
) -> Iterator[Counts]:
    """Count what the GPU does in a block of PyTorch code, by ``phase()`` and in all.

    >>> with count_ranges() as counts:  # doctest: +SKIP
    ...     with phase("forward"):
    ...         loss = model(batch)
    ...     with phase("backward"):
    ...         loss.backward()
    >>> counts.by_phase["backward"]["dram_read_bytes"]  # doctest: +SKIP

    The GPU is synchronized at each border of a phase. Run the block once before, so that what
    happens only the first time is not counted, and let nothing else use the GPU: its DRAM
    counters see all of it.

    Args:
        metrics: what to count beside DRAM bytes, time and busy shares, as long as it is one pass.
        by_phase: False counts the block as one range, undisturbed: right for busy shares.
        max_ranges: how many ranges the block may have, one for each time that the phase changes.
        target: the GPU; by default torch's.

    Yields:
        The counts, empty until the block has ended.
    """
    chosen = resolve_metrics([*BASIC_METRICS, *metrics])
    counter = StepCounter(
        chosen, target or Target.of_torch(), by_phase=[by_phase], max_ranges=max_ranges
    )
    with closing(counter):
        if counter.passes > 1:
            raise CountersDoNotCombine(
                f"these metrics need {counter.passes} passes on {counter.chip.name}, and a block "
                f"runs once"
            )
        counts = Counts()
        with observed_step(counter):
            yield counts
        counts.by_phase.update(counter.counts().by_phase)
