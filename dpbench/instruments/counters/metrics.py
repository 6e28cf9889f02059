"""The options of hardware counters, and the metrics that their names mean on a chip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS, Counters, Metric
from dpbench.core.option_fields import listed, option

ALWAYS = ("dram_read_bytes", "dram_write_bytes")
"""Metrics that are always counted if the chip has them."""


def on_chip(chip: str = "") -> dict[str, Metric]:
    """All metrics for which a chip has counters. GH100 counts all of them in one pass."""
    here = [metric.counted_by(metric.on(chip)) for metric in METRICS.counted("ncu")]
    return {metric.name: metric for metric in here if metric.counters}


def available(
    are_there: Callable[[tuple[str, ...]], bool], instrument: str = "ncu", chip: str = ""
) -> dict[str, Metric]:
    """The metrics whose counters exist, by ``are_there``, with the first existing spelling of each.

    A metric without general counters needs the counters defined for this chip. Counters of another
    chip would add up to something else.
    """
    spelled = [
        metric.counted_by(names)
        for metric in METRICS.counted(instrument)
        for names in (reversed(metric.spellings) if metric.counters else [metric.on(chip)])
    ]
    return {m.name: m for m in spelled if m.counters and are_there(m.counters)}


def resolve(
    names: Iterable[str] | None = None, chip: str = "", ours: Mapping[str, Metric] | None = None
) -> list[Metric]:
    """The metrics with these names.

    Args:
        names: metrics of dpbench or nvprof, or counters; None for all metrics. Counters must be
            sums (``.sum``), because a step adds up its ranges.
        chip: the GPU's chip, "" if unknown.
        ours: all metrics of the GPU; by default those of its chip.
    """
    ours = on_chip(chip) if ours is None else ours
    if names is None:
        return list(ours.values())
    nvprof = {metric.nvprof: metric.name for metric in METRICS.values() if metric.nvprof}
    chosen = {name: ours[name] for name in ALWAYS if name in ours}
    for asked in names:
        name = nvprof.get(asked, asked)
        if name in ours:
            chosen[name] = ours[name]
        elif name in [metric.name for metric in METRICS.counted("ncu")]:
            raise ConfigurationError(f"{chip or 'this GPU'} has no counters for {asked}")
        elif "__" in name and not name.endswith(".sum"):
            raise ConfigurationError(
                f"{name} does not add up over the ranges of a step, as counters whose names end in "
                f".sum do; ncu itself shows rates and averages of single kernels"
            )
        elif "__" in name:
            chosen[name] = Metric(name, how=Counters((name,)))
        else:
            raise unknown("metric", name, [*ours, *nvprof], "or a counter of ncu --query-metrics")
    return list(chosen.values())


def counters(metrics: Iterable[Metric]) -> list[str]:
    """The counters of the metrics, each once."""
    return list(dict.fromkeys(c for metric in metrics for c in metric.counters))


@dataclass(frozen=True)
class CounterOptions:
    """Options of Nsight Compute. CUPTI uses ``ncu_metrics`` as well."""

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
        """The requested metrics; None for all metrics of the chip."""
        return listed(self.ncu_metrics, "--ncu-metrics", "metric; try dram_read_bytes") or None

    @property
    def steps(self) -> Steps:
        """The steps under ncu."""
        return Steps(self.ncu_warmup, self.ncu_active)
