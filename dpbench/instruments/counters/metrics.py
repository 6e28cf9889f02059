"""Options of hardware counters, and the metrics that a chip can count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dpbench.child.messages import Steps
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS, Counters, Metric
from dpbench.core.option_fields import listed, option

ALWAYS = ("dram_read_bytes", "dram_write_bytes")
"""Metrics that are always counted if the chip has counters for them."""


def on_chip(chip: str = "") -> dict[str, Metric]:
    """Return all metrics of ncu for which ``chip`` has counters, by name.

    The chip GH100 counts all built-in metrics of ncu in one pass.
    """
    here = [metric.counted_by(metric.on(chip)) for metric in METRICS.counted("ncu")]
    return {metric.name: metric for metric in here if metric.counters}


def available(
    are_there: Callable[[tuple[str, ...]], bool], instrument: str = "ncu", chip: str = ""
) -> dict[str, Metric]:
    """Return the metrics whose counters exist, by name.

    A metric may have general counters, and other counters for some chips. If the
    general counters exist, the returned metric uses the general counters. Otherwise the returned
    metric uses the counters of the first chip whose counters all exist. A metric without
    general counters needs the counters that are defined for this chip, because counters of another
    chip may exist with another meaning.

    Args:
        are_there: returns True if all of the named counters exist.
        instrument: name of the instrument that counts the metrics.
        chip: name of the chip, or "" if the chip is unknown.
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
    """Return the metrics with these names, and the metrics in `ALWAYS`.

    Args:
        names: names of dpbench's metrics, nvprof's metrics or counters. If None, all metrics are
            returned. Names of counters must end in ``.sum``, because the values of a step's ranges
            are added up.
        chip: name of the GPU's chip, or "" if the chip is unknown.
        ours: all metrics of the GPU, by name. If None, all metrics of the chip are used.
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
                f"{name} cannot be added up over the ranges of a step: choose a counter whose "
                f"name ends in .sum, or run ncu itself for rates and averages of single kernels"
            )
        elif "__" in name:
            chosen[name] = Metric(name, how=Counters((name,)))
        else:
            hint = "or a counter that `ncu --query-metrics` lists"
            raise unknown("metric", name, [*ours, *nvprof], hint)
    return list(chosen.values())


def counters(metrics: Iterable[Metric]) -> list[str]:
    """Return the counters of the metrics, without duplicates."""
    return list(dict.fromkeys(c for metric in metrics for c in metric.counters))


@dataclass(frozen=True)
class CounterOptions:
    """Options of Nsight Compute. The instrument cupti also uses ``ncu_metrics``."""

    ncu_path: str | None = option(
        "path of the program ncu, if it is not on PATH", metavar="PROGRAM"
    )
    ncu_metrics: list[str] | None = option(
        "comma-separated names of dpbench's metrics, nvprof's metrics or ncu's counters to count "
        "(default: DRAM, L2 and global load/store bytes)",
        action="append",
        metavar="NAMES",
    )
    ncu_warmup: int = option("number of warm-up steps under ncu", 1, metavar="N")
    ncu_active: int = option("number of measured steps under ncu", 1, metavar="N")

    def __post_init__(self) -> None:
        resolve(self.names, ours={m.name: m for m in METRICS.counted("ncu")})
        Steps(self.ncu_warmup, self.ncu_active)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the requested metrics, or None to request all metrics of the chip."""
        return listed(self.ncu_metrics, "--ncu-metrics", "metric; try dram_read_bytes") or None

    @property
    def steps(self) -> Steps:
        """Numbers of warm-up and measured steps under ncu."""
        return Steps(self.ncu_warmup, self.ncu_active)
