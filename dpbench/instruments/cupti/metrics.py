"""What is counted in a range: bytes by ncu's names, time, and how busy the GPU is.

Everything here adds up over ranges. A share is a ratio of two such sums, so that the share of
several ranges together is right too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dpbench.errors import unknown
from dpbench.instruments.ncu.metrics import BYTE_METRICS, NVPROF_NAMES, resolve


@dataclass(frozen=True)
class RangeMetric:
    """A metric as the sum of counters, times ``scale``."""

    name: str
    counters: tuple[str, ...]
    scale: float = 1
    unit: str = "cycle"

    def value(self, counted: Mapping[str, float]) -> float:
        """The metric from the values of its counters."""
        return self.scale * sum(counted[counter] for counter in self.counters)


@dataclass(frozen=True)
class Share:
    """A part of a whole: the ratio of two metrics."""

    name: str
    part: RangeMetric
    whole: RangeMetric

    def of(self, values: Mapping[str, float]) -> float:
        """The share, 0 to 1, from the values of its two metrics."""
        return values[self.part.name] / values[self.whole.name]


RANGE_TIME = RangeMetric("range_time_seconds", ("gpu__time_duration.sum",), 1e-9, "s")
"""How long a range took, as the GPU's own clock has it; true, since launches are not delayed."""

DRAM_BYTES = ("dram_read_bytes", "dram_write_bytes")

DRAM_COUNTERS = tuple(c for name in DRAM_BYTES for c in BYTE_METRICS[name].counters)
"""Read in every pass where they fit, so that steps can be compared."""

SHARES = {
    share.name: share
    for share in (
        Share(
            "gpu_busy_share",
            RangeMetric("gpu_busy_cycles", ("gr__cycles_active.sum",)),
            RangeMetric("gpu_elapsed_cycles", ("gr__cycles_elapsed.sum",)),
        ),
        Share(
            "sm_busy_share",
            RangeMetric("sm_busy_cycles", ("sm__cycles_active.sum",)),
            RangeMetric("sm_elapsed_cycles", ("sm__cycles_elapsed.sum",)),
        ),
        Share(
            "tensor_pipe_share",
            RangeMetric("tensor_pipe_cycles", ("sm__pipe_tensor_cycles_active.sum",)),
            RangeMetric(
                "tensor_pipe_peak_cycles",
                ("sm__pipe_tensor_cycles_active.sum.peak_sustained_elapsed",),
            ),
        ),
        Share(
            "warps_active_share",
            RangeMetric("warp_cycles", ("sm__warps_active.sum",)),
            RangeMetric("warp_peak_cycles", ("sm__warps_active.sum.peak_sustained_elapsed",)),
        ),
    )
}
"""How busy the GPU is: of a range's time, when anything ran; of all SMs' time, when an SM had a
warp; of what the tensor cores, and the slots for warps, could do in that time, what they did."""

_BYTES = {
    name: RangeMetric(name, metric.counters, metric.scale, metric.unit)
    for name, metric in BYTE_METRICS.items()
}

BASIC_METRICS = {
    metric.name: metric
    for metric in (
        *(_BYTES[name] for name in DRAM_BYTES),
        RANGE_TIME,
        *(metric for share in SHARES.values() for metric in (share.part, share.whole)),
    )
}
"""DRAM bytes, time and shares: one pass on every chip that counts DRAM bytes."""

METRICS = BASIC_METRICS | _BYTES
"""These and all other bytes: one pass on GH100 and GB100, two on others from TU102 on."""

SPELLINGS = {
    "dram__bytes_read.sum": "dram__bytes_op_read.sum",
    "dram__bytes_write.sum": "dram__bytes_op_write.sum",
}
"""What chips from GB202 on call a counter that others call by the first name."""


def resolve_metrics(names: Iterable[str]) -> list[RangeMetric]:
    """The metrics behind names of ours, shares, nvprof's names or counters; DRAM bytes first."""
    chosen = {name: METRICS[name] for name in DRAM_BYTES}
    for name in names:
        if name in SHARES:
            share = SHARES[name]
            chosen |= {share.part.name: share.part, share.whole.name: share.whole}
        elif name in METRICS:
            chosen[name] = METRICS[name]
        elif name in NVPROF_NAMES or "__" in name:
            wanted = resolve([name])[-1]
            ours = RangeMetric(wanted.name, wanted.counters, wanted.scale, wanted.unit)
            chosen[ours.name] = METRICS.get(ours.name, ours)
        else:
            known = [*METRICS, *SHARES, *NVPROF_NAMES]
            raise unknown("metric", name, known, "or a counter such as sm__inst_executed.sum")
    return list(chosen.values())


def counters_of(metrics: Iterable[RangeMetric]) -> list[str]:
    """Every counter that the metrics need, once."""
    return list(dict.fromkeys(counter for metric in metrics for counter in metric.counters))
