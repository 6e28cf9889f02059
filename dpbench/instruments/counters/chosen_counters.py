"""Which hardware counters ncu collects for the metrics that were asked for, on this chip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dpbench.errors import ConfigurationError, unknown
from dpbench.metrics import METRICS, Counters, Metric

ALWAYS = ("dram_read_bytes", "dram_write_bytes")
"""Metrics that are always counted, if the chip can."""


def on_chip(chip: str = "") -> dict[str, Metric]:
    """Every metric that a chip has counters for; on GH100 they take one pass of the process."""
    here = [metric.counted_by(metric.on(chip)) for metric in METRICS.counted("ncu")]
    return {metric.name: metric for metric in here if metric.counters}


def having(
    are_there: Callable[[tuple[str, ...]], bool], instrument: str = "ncu", chip: str = ""
) -> dict[str, Metric]:
    """The metrics of which all counters are there, in the first such spelling.

    A metric without usual counters is had by those of the chip alone: what another chip's add up
    to would not be the same.
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
    """The metrics behind names of ours, of nvprof, or of counters; all that there are by default.

    A counter must add up over the ranges of a step, so a rate is refused. ``ours`` is every metric
    that the GPU has, if that is known better than by its chip's name.
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
    """Every counter that the metrics need, once."""
    return list(dict.fromkeys(c for metric in metrics for c in metric.counters))
