"""Which counters CUPTI reads for the metrics that were asked for, on this chip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dpbench.instruments.counters.chosen_counters import ALWAYS, counters, having, resolve
from dpbench.instruments.cupti.chip import MAY_LACK, Chip
from dpbench.instruments.cupti.library import Library
from dpbench.metrics import METRICS, Metric, Sum

_OWN = [metric for metric in METRICS.counted("cupti") if metric.by == ("cupti",)]

LINKS = tuple(metric.name for metric in _OWN if metric.counters[0].startswith(MAY_LACK))
"""One pass by themselves, which is spent only where the GPU has peers."""

BASIC = (*ALWAYS, *(metric.name for metric in _OWN if metric.name not in LINKS))
"""DRAM bytes, time and how busy the GPU is: one pass on every chip that counts DRAM bytes."""


def chosen(chip: Chip, names: Iterable[str] | None = None, *, peers: bool = False) -> list[Metric]:
    """What is counted: `BASIC`, and what is asked for; everything by default.

    Args:
        chip: the GPU's.
        names: of ours, of nvprof, or of counters.
        peers: whether there are other GPUs, so that everything includes `LINKS`.
    """
    ours = having(chip.has, "cupti", chip.name)
    if names is None:
        return [metric for metric in ours.values() if peers or metric.name not in LINKS]
    parts = [part for name in names for part in _parts(name)]
    return resolve([*(name for name in BASIC if name in ours), *parts], chip.name, ours)


def describe(library: Library, name: str) -> str:
    """What a chip counts, in words: the passes, and each metric's counters."""
    chip = Chip(library, name)
    metrics = chosen(chip, peers=True)
    common = counters(metric for metric in metrics if metric.name in ALWAYS)
    groups = chip.spread(counters(metrics), common)
    version = "{}.{}".format(*library.cuda_version)
    alone = len(chip.spread(counters(chosen(chip)), common))
    more = f", {len(groups) - alone} more where the GPU has peers" if len(groups) > alone else ""
    lines = [f"{name}, libcupti {version}: {alone} step(s) to count everything by phase{more}"]
    for metric in metrics:
        places = [i for i, group in enumerate(groups, 1) if {*metric.counters} & {*group}]
        step = ", ".join(map(str, places))
        lines.append(f"  {metric.name:<24}step {step:<6}{metric.formula}")
    return "\n".join(lines)


def _parts(name: str) -> tuple[str, ...]:
    metric = METRICS.get(name)
    return (metric and metric.parts) or (name,)


def with_derived(values: Mapping[str, float]) -> dict[str, float]:
    """Counted metrics, and the sums and shares that they make."""
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
