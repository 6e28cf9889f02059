"""Counts the work of a GPU in ranges: steps, phases, or any block of PyTorch code.

`RangeProfiler` is CUPTI's range profiler, which reads hardware counters between two calls.
`Target` is the GPU whose work is counted, with NVML's counters of its NVLink payload. NVML is
NVIDIA's library for managing GPUs. It counts the payload of packets in KiB, without the headers of
the packets, and needs no profiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_uint8
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml as nvml

from dpbench.core.case import OUTSIDE
from dpbench.core.metrics import METRICS, Sum
from dpbench.instruments.counters import ALWAYS, ProfilerNotLoaded, counters
from dpbench.instruments.cupti.chip import LINKS, Configuration, chip_of, chosen, image_fields
from dpbench.instruments.cupti.library import (
    USER_RANGE,
    USER_REPLAY,
    CountersDoNotCombine,
    Library,
    RangesLost,
    StepsDiffer,
    load_library,
)
from dpbench.results.rows import STEP
from dpbench.training.phases import observed_step

# --- the GPU -------------------------------------------------------------------------------------

SENT, RECEIVED = "nvlink_payload_sent_bytes", "nvlink_payload_received_bytes"

FIELDS = {
    SENT: nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    RECEIVED: nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
"""NVML's field for each metric. A field counts KiB since the driver was loaded."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVML field that selects the sum over all links of a GPU."""

Payload = Callable[[], dict[str, float]]
"""A function that returns the bytes that a GPU has sent and received so far, by metric."""


def payload_of(uuid: str) -> tuple[Payload, str]:
    """Return a function that reads the NVLink payload of a GPU, and a note.

    If NVML cannot count the payload, the function returns no metrics and the note says why. If
    NVML can count the payload, the note is empty.
    """

    def read() -> dict[str, float]:
        asked = [(field, ALL_LINKS) for field in FIELDS.values()]
        said = nvml.nvmlDeviceGetFieldValues(handle, asked)
        if refused := next((each.nvmlReturn for each in said if each.nvmlReturn), 0):
            raise nvml.NVMLError(refused)
        return {name: each.value.ullVal * 1024.0 for name, each in zip(FIELDS, said, strict=True)}

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read()
    except nvml.NVMLError as error:
        return dict, f"NVLink payload is not counted: NVML reports {str(error)!r} for {uuid}"
    return read, ""


@dataclass(frozen=True)
class Target:
    """The GPU whose work is counted, and the CUDA context of this process.

    Attributes:
        library: the loaded libcupti.
        index: CUDA index of the GPU.
        context: handle of the CUDA context.
        synchronize: waits for all work on the GPU.
        peers: whether this process sees several GPUs.
        payload: reads the NVLink payload of the GPU. The default reads no metrics.
        note: the reason why NVML cannot count the NVLink payload, or "".
    """

    library: Library
    index: int
    context: int
    synchronize: Callable[[], None]
    peers: bool = False
    payload: Payload = dict
    note: str = ""

    @classmethod
    def of_torch(cls) -> Target:
        """Return the current GPU of torch in this thread."""
        import torch

        if not torch.cuda.is_available():
            raise ProfilerNotLoaded(f"torch {torch.__version__} finds no CUDA GPU")
        torch.cuda.synchronize()  # makes torch's CUDA context current in this thread
        library = load_library()
        context = library.driver.current_context()
        index, peers = torch.cuda.current_device(), torch.cuda.device_count() > 1
        uuid = torch.cuda.get_device_properties(index).uuid
        crossed = payload_of(f"GPU-{uuid}") if peers else ()
        return cls(library, index, context, torch.cuda.synchronize, peers, *crossed)


# --- CUPTI's range profiler ----------------------------------------------------------------------

MAX_RANGES = 64
"""Default for the largest number of ranges between start and stop.

On an NVIDIA H200, starting CUPTI for 64 ranges takes 0.2 s and 70 MB of GPU memory. Starting CUPTI
for 1024 ranges takes 1 s and 1.1 GB.
"""


class RangeProfiler:
    """CUPTI's range profiler, which counts the work in one CUDA context.

    The counts include the work of all threads and streams. `start` can be called
    again after `stop`. `push` and `pop` do not wait for the GPU, so synchronize the GPU before
    each call. A range does not include the time of these calls.

    A context can have only one profiler at a time. A profiler has one configuration of one pass,
    because counters of a second configuration would have no value.
    """

    def __init__(
        self, library: Library, context: int, configuration: Configuration, max_ranges: int
    ) -> None:
        self.configuration = configuration
        self._library = library
        self._max_ranges = max_ranges
        self._names: list[bytes] = []
        self._started = self._open = False
        self._object = library.call("RangeProfiler_Enable", ctx=context).pRangeProfilerObject
        with ExitStack() as undo:
            undo.callback(self.close)
            size = self._call(
                "GetCounterDataSize",
                pMetricNames=ctypes.addressof(configuration.names),
                numMetrics=len(configuration.names),
                maxNumOfRanges=max_ranges,
                maxNumRangeTreeNodes=max_ranges,
            ).counterDataSize
            self._image = (c_uint8 * size)()
            undo.pop_all()

    def _call(self, name: str, **fields: Any) -> Any:
        return self._library.call(
            f"RangeProfiler_{name}", pRangeProfilerObject=self._object, **fields
        )

    def start(self) -> None:
        """Start counting."""
        self._call("CounterDataImage_Initialize", **image_fields("CounterData", self._image))
        self._call(
            "SetConfig",
            **image_fields("Config", self.configuration.image),
            **image_fields("CounterDataImage", self._image),
            range=USER_RANGE,
            replayMode=USER_REPLAY,
            maxRangesPerPass=self._max_ranges,
            numNestingLevels=1,
            minNestingLevel=1,
            targetNestingLevel=1,
        )
        self._call("Start")
        self._started = True
        self._names = []

    def push(self) -> None:
        """Begin a range. The name of the range is its number, counted from 0."""
        if len(self._names) == self._max_ranges:
            raise RangesLost(f"a step has more than {self._max_ranges} ranges")
        self._names.append(str(len(self._names)).encode())  # CUPTI reads the name until `stop`
        self._call("PushRange", pRangeName=self._names[-1])
        self._open = True

    def pop(self) -> None:
        """End the open range, if any."""
        if self._open:
            self._open = False
            self._call("PopRange")

    def stop(self) -> list[dict[str, float]]:
        """Stop counting, and return the values of the counters in each range, in order."""
        self._stop()
        dropped = self._call("DecodeData").numOfRangeDropped
        data, call = image_fields("CounterDataImage", self._image), self._library.call
        counted = {}
        for i in range(call("RangeProfiler_GetCounterDataInfo", **data).numTotalRanges):
            which = {"rangeIndex": i, "rangeDelimiter": b"/", **data}
            name = call("RangeProfiler_CounterData_GetRangeInfo", **which).rangeName
            counted[name] = self.configuration.evaluate(self._image, i)
        lost = sum(name not in counted for name in self._names)
        if dropped or lost:
            raise RangesLost(f"CUPTI lost {max(dropped, lost)} of {len(self._names)} ranges")
        return [counted[name] for name in self._names]

    def _stop(self) -> None:
        self.pop()
        self._started = False
        self._call("Stop")

    def close(self) -> None:
        """Stop counting and release the counters."""
        if self._started:
            self._stop()
        if self._object is not None:
            self._call("Disable")
            self._object = None


# --- steps and blocks ----------------------------------------------------------------------------

STEPS_TOLERANCE = 0.005
"""Relative part of the allowed difference between the DRAM bytes of equal steps.

The allowed difference is this part of the largest DRAM bytes plus `CACHE_BYTES`.
"""

CACHE_BYTES = 128e6
"""Absolute part of the allowed difference between the DRAM bytes of equal steps.

The L2 cache may keep bytes from one step to the next. This number is about the
size of the largest L2 caches of GPUs.
"""

ByPhase = dict[str, dict[str, float]]
"""Values by phase and metric. The phase ``"step"`` is the whole step."""

Ranges = list[tuple[str, dict[str, float]]]
"""Phase and NVLink bytes of each range of a step. The open range has no NVLink bytes yet."""


class StepCounter:
    """A `PhaseListener` that counts steps.

    A round counts all metrics once. If the metrics fit in one pass, a round is one step.
    Otherwise a round consists of several equal steps, and each step counts one group of counters.

    A round is counted by phase or as a whole. If a round is counted by phase, the GPU is
    synchronized at the start and end of each phase, so the CPU cannot run ahead. Therefore times
    and busy shares by phase show how the time of a step is divided, but not how long a phase takes
    when the CPU runs ahead. Nothing is synchronized
    within a step that is counted as a whole.

    If the process sees several GPUs, NVML's counters of NVLink are read at the start and end of
    each range. A rank may receive bytes before the phase or step that needs the bytes, because
    another rank that is ahead already sends data into NCCL's buffers.

    Starting CUPTI takes about 0.2 s on an H200. Therefore CUPTI keeps counting between two steps if
    the second step is counted as a whole with the same counters.

    Args:
        names: names of metrics to count in addition to DRAM bytes, time and busy shares. If None,
            all metrics of the chip are counted.
        target: the GPU.
        rounds: for each round, True to count its steps by phase, False to count whole steps.
        max_ranges: largest number of ranges in a step that is counted by phase. Each change of
            phase begins a range.
    """

    def __init__(
        self,
        names: Iterable[str] | None,
        target: Target,
        rounds: Sequence[bool] = (True, False),
        max_ranges: int = MAX_RANGES,
    ) -> None:
        self._target = target
        most = max_ranges + [*rounds].count(False)
        self._open = partial(RangeProfiler, target.library, target.context, max_ranges=most)
        self.chip = chip_of(target.library, target.index, target.context)
        self.metrics = chosen(self.chip, names, peers=target.peers)
        self._dram = counters(metric for metric in self.metrics if metric.name in ALWAYS)
        groups = self.chip.spread(counters(self.metrics), self._dram)
        self.passes = len(groups)  # steps in a round
        with ExitStack() as opened:
            configurations = [
                opened.enter_context(closing(Configuration(self.chip, group))) for group in groups
            ]
            # Steps of one configuration are consecutive, because a new configuration restarts
            # CUPTI.
            self._plan = [(c, by_phase) for c in configurations for by_phase in rounds]
            self._profiler = self._open(configurations[0])
            self._configurations = opened.pop_all()
        self.steps = len(self._plan)  # number of steps to observe
        self._step: Ranges = []
        self._counted: list[ByPhase] = []  # values of the steps that were read from CUPTI
        self._unread: list[Ranges] = []
        """Ranges of the ended steps whose counters were not yet read from CUPTI."""

    def start_step(self) -> None:
        configuration, self._by_phase = self._plan[len(self._counted) + len(self._unread)]
        if configuration is not self._profiler.configuration:
            self._profiler.close()
            self._profiler = self._open(configuration)
        self._target.synchronize()
        self._crossed = self._target.payload()  # other ranks may send while CUPTI starts
        if not self._unread:
            self._profiler.start()
        self._step = []
        self._begin(OUTSIDE if self._by_phase else STEP)

    def switch(self, phase: str) -> None:
        if self._by_phase:
            self._end()
            self._begin(phase)

    def end_step(self) -> None:
        self._end()
        self._unread.append(self._step)
        following = self._plan[len(self._counted) + len(self._unread) :][:1]
        if following != [(self._profiler.configuration, False)]:
            self._read()

    def _read(self) -> None:
        """Stop CUPTI, and sum the ranges of each step by phase."""
        steps, self._unread = self._unread, []
        read = iter(self._profiler.stop())
        for ranges in steps:
            counted: ByPhase = {}
            for phase, crossed in ranges:
                values = next(read) | crossed
                counted[phase] = _sum([counted[phase], values]) if phase in counted else values
            self._counted.append(counted)

    def _begin(self, phase: str) -> None:
        self._profiler.push()
        self._step.append((phase, {}))

    def _end(self) -> None:
        self._target.synchronize()
        self._profiler.pop()
        # The next phase starts with this value, so that each byte counts in exactly one phase.
        before, self._crossed = self._crossed, self._target.payload()
        self._step[-1][1].update({name: n - before[name] for name, n in self._crossed.items()})

    def rounds(self) -> list[ByPhase]:
        """Return the metrics of each completed round, by phase or of the whole step."""
        if self._unread:
            self._read()
        rounds = self.steps // self.passes
        # A round is complete once its step with the last configuration is counted.
        over = range(len(self._counted) - self.steps + rounds)
        return [self._metrics_of(self._counted[i::rounds]) for i in over]

    def _metrics_of(self, steps: Sequence[ByPhase]) -> ByPhase:
        """Return the metrics of a round from the counts of its steps."""
        self._check_alike(steps)
        values: ByPhase = {}
        for step in steps:
            for phase, counted in step.items():
                values[phase] = counted | values.get(phase, {})  # keep the first step's value
        return {
            phase: {
                metric.name: metric.value(counted)
                for metric in self.metrics
                if counted.keys() >= {*metric.counters} or metric.name not in LINKS
            }
            | {name: counted[name] for name in FIELDS if name in counted}
            for phase, counted in values.items()
        }

    def _check_alike(self, steps: Sequence[ByPhase]) -> None:
        """Raise an error if the steps of a round differ in phases, or too much in DRAM bytes.

        Different rounds may differ. The reported spread shows such differences.
        """
        if any(step.keys() != steps[0].keys() for step in steps):
            raise StepsDiffer("the counted steps have different phases")
        totals = [_sum(step.values()) for step in steps]
        moved = [sum(t[name] for name in self._dram) for t in totals if {*self._dram} <= {*t}]
        if moved and max(moved) - min(moved) > CACHE_BYTES + STEPS_TOLERANCE * max(moved):
            each = ", ".join(f"{total / 1e9:.3f}" for total in moved)
            raise StepsDiffer(f"the counted steps moved different DRAM bytes: {each} GB")

    def close(self) -> None:
        """Read the counted ranges, and release the counters."""
        with self._configurations, closing(self._profiler):
            if self._unread:
                self._read()


def _sum(counted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each counter over several ranges."""
    first, *others = counted
    return {name: value + sum(more[name] for more in others) for name, value in first.items()}


@contextmanager
def count_ranges(
    metrics: Iterable[str] = (),
    *,
    by_phase: bool = True,
    max_ranges: int = MAX_RANGES,
    target: Target | None = None,
) -> Iterator[ByPhase]:
    """Count the work of the GPU in each ``phase()`` of a block of code, and in the whole block.

    By default, the GPU is synchronized at the start and end of each phase. Run the block once
    before you count the block, so that one-time work is not counted. No other process may use the
    GPU, because DRAM counters include the work of all processes.

    Args:
        metrics: names of metrics to count in addition to DRAM bytes, time and busy shares. All
            metrics together must fit in one pass.
        by_phase: if False, the block is one range and the GPU is not synchronized within the
            block. Use False to measure busy shares.
        max_ranges: largest number of ranges in the block. Each change of phase begins a range.
        target: the GPU; by default the current GPU of torch.

    Yields:
        A dictionary of metrics by phase. The key ``"step"`` is the whole block. The dictionary is
        filled when the block ends.

    Examples:
        >>> with count_ranges() as counts:  # doctest: +SKIP
        ...     with phase("forward"):
        ...         loss = model(batch)
        ...     with phase("backward"):
        ...         loss.backward()
        >>> counts["backward"]["dram_bytes"], counts["step"]["gpu_busy_share"]  # doctest: +SKIP
    """
    counter = StepCounter(metrics, target or Target.of_torch(), [by_phase], max_ranges)
    with closing(counter):
        if counter.passes > 1:
            raise CountersDoNotCombine(
                f"these metrics need {counter.passes} passes on {counter.chip.name}, but a block "
                f"runs only once"
            )
        counts: ByPhase = {}
        with observed_step(counter):
            yield counts
        [counted] = counter.rounds()
        for phase, values in {STEP: _sum(counted.values()), **counted}.items():
            counts[phase] = with_derived(values)


def with_derived(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, and the sums and shares that are computed from them."""
    derived = dict(values)
    for metric in METRICS.values():
        parts = [values[name] for name in metric.parts if name in values]
        if not parts or len(parts) < len(metric.parts):
            continue
        if isinstance(metric.how, Sum):
            derived[metric.name] = sum(parts)
        elif parts[1] > 0:
            derived[metric.name] = parts[0] / parts[1]
    return derived
