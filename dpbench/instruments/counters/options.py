"""Options of the instruments that read hardware counters."""

from __future__ import annotations

from dataclasses import dataclass

from dpbench.instruments.counters.chosen_counters import resolve
from dpbench.metrics import METRICS
from dpbench.options import listed, option
from dpbench.process.messages import Steps


@dataclass(frozen=True)
class CounterOptions:
    """Options of Nsight Compute, of which CUPTI has ``ncu_metrics``."""

    ncu_path: str | None = option("the ncu program, if it is not on PATH", metavar="PROGRAM")
    ncu_metrics: list[str] | None = option(
        "what to count: names of dpbench, of nvprof, or ncu counters, separated by commas "
        "(default: DRAM, L2 and global load/store bytes)",
        action="append",
        metavar="NAMES",
    )
    ncu_warmup: int = option("warmup steps under ncu", 1, metavar="N")
    ncu_active: int = option("active steps under ncu", 1, metavar="N")

    def __post_init__(self) -> None:
        resolve(self.names, ours={m.name: m for m in METRICS.counted("ncu")})
        Steps(self.ncu_warmup, self.ncu_active)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The metrics that were asked for; None for all that a chip has."""
        return listed(self.ncu_metrics, "--ncu-metrics", "metric; try dram_read_bytes") or None

    @property
    def steps(self) -> Steps:
        """The steps under ncu."""
        return Steps(self.ncu_warmup, self.ncu_active)
