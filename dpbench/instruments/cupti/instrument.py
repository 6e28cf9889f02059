"""Bytes and busy shares by phase, step time and peak memory, all from one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Self

from dpbench.case import Case
from dpbench.instruments.child import Child
from dpbench.instruments.cupti import errors  # noqa: F401  # of which its process can fail
from dpbench.instruments.timing import Timing, timing_rows
from dpbench.metrics import unit
from dpbench.results.rows import STEP, Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Cupti(Timing):
    """Runs ``dpbench step --cupti``: timed steps without counters, then counted ones."""

    name: ClassVar[str] = "cupti"

    names: tuple[str, ...] = ()  # beside DRAM bytes, time, busy shares; everything if empty

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """As ``--ncu-metrics``, ``--warmup``, ``--active`` and the like say."""
        names = settings.metric_names or ()
        return replace(super().from_settings(settings), device="cuda", names=names)

    def command(self, case: Case) -> list[str]:
        option = "=".join(filter(None, ("--cupti", ",".join(self.names))))
        return [*super().command(case), option]

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are those of timing, and each metric by phase and step."""
        return list(cupti_rows(process.case, process.record()))


def cupti_rows(case: Case, record: Mapping[str, Any]) -> Iterator[Measurement]:
    """The rows of timed steps, and of those that were counted, by phase or as a whole."""
    device, tool = record["device"], f"cupti {record['cupti']}, torch {record['torch']}"
    for row in timing_rows(case, dict(record)):
        yield replace(row, instrument=Cupti.name, tool=tool)
    repeats = {True: count(), False: count()}  # of the steps that were counted as a whole, or not
    for step in record["counted"]:
        where = (next(repeats[STEP in step]), device, tool)
        for phase, values in step.items():
            for metric, value in values.items():
                of = "B" if "bytes" in metric.partition("__")[2] else unit(metric)
                yield Measurement(case, Cupti.name, phase, metric, value, of, *where)
