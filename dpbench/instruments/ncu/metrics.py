"""The byte metrics that dpbench reads from hardware counters, and the names people know.

Counter names are those of ``ncu --query-metrics``; the correspondence to nvprof's names is
from NVIDIA's "nvprof Metric Comparison" table in the Nsight Compute CLI documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dpbench.errors import ConfigurationError, unknown

SECTOR_BYTES = 32
"""An L2 sector is 32 bytes (Nsight Compute Profiling Guide, "Memory Chart")."""


@dataclass(frozen=True)
class NcuMetric:
    """A metric as the sum of counters, times ``scale``."""

    name: str
    counters: tuple[str, ...]
    scale: int = 1
    unit: str = "B"

    def value(self, counted: Mapping[str, float]) -> float:
        """The metric from the values of its counters."""
        return self.scale * sum(counted[counter] for counter in self.counters)


def _sectors(name: str, *operations: str) -> NcuMetric:
    counters = tuple(f"lts__t_sectors_op_{operation}.sum" for operation in operations)
    return NcuMetric(name, counters, scale=SECTOR_BYTES)


BYTE_METRICS = {
    metric.name: metric
    for metric in (
        NcuMetric("dram_read_bytes", ("dram__bytes_read.sum",)),
        NcuMetric("dram_write_bytes", ("dram__bytes_write.sum",)),
        _sectors("l2_read_bytes", "read"),
        _sectors("l2_write_bytes", "write"),
        _sectors("l2_atomic_bytes", "atom", "red"),
        NcuMetric("l2_total_bytes", ("lts__t_bytes.sum",)),
        NcuMetric("global_load_bytes", ("l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",)),
        NcuMetric("global_store_bytes", ("l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",)),
    )
}
"""What is always collected: one pass of the process on GH100.

``l2_read_bytes`` and ``l2_write_bytes`` leave out atomics and reductions, which nvprof counted
in both. ``global_load_bytes`` misses loads by TMA and LDGSTS on Hopper. ``l2_total_bytes`` is
all traffic through the L2's slices, fills and partition crossings included.
"""

NVPROF_NAMES = {
    "dram_read_throughput": "dram_read_bytes",
    "dram_write_throughput": "dram_write_bytes",
    "l2_read_throughput": "l2_read_bytes",
    "l2_write_throughput": "l2_write_bytes",
    "gld_throughput": "global_load_bytes",
    "gst_throughput": "global_store_bytes",
}
"""nvprof's throughputs, by the byte metric that, divided by time, says the same."""


def resolve(names: Iterable[str]) -> list[NcuMetric]:
    """The metrics behind names of ours, of nvprof, or of counters; DRAM bytes always first.

    Raises:
        ConfigurationError: a name is none of these, and the message lists what exists; or it is a
            counter whose values in two ranges do not add up, such as a rate.
    """
    chosen = {name: BYTE_METRICS[name] for name in ("dram_read_bytes", "dram_write_bytes")}
    for name in names:
        ours = NVPROF_NAMES.get(name, name)
        if ours in BYTE_METRICS:
            chosen[ours] = BYTE_METRICS[ours]
        elif "__" in name and not name.endswith(".sum"):
            raise ConfigurationError(
                f"{name} does not add up over the ranges of a step, as counters whose names end in "
                f".sum do; --ncu-set shows rates and averages of single kernels"
            )
        elif "__" in name:
            chosen[name] = NcuMetric(name, (name,), unit="")
        else:
            known = [*BYTE_METRICS, *NVPROF_NAMES]
            raise unknown("metric", name, known, "or a counter of ncu --query-metrics")
    return list(chosen.values())


def counters(metrics: Iterable[NcuMetric]) -> list[str]:
    """Every counter that the metrics need, once."""
    return list(dict.fromkeys(c for metric in metrics for c in metric.counters))
