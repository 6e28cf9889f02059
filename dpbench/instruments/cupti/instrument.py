"""Bytes and busy shares by phase, step time and peak memory, all from one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.instruments.base import Instrument, check_place
from dpbench.instruments.child import Child, step_command
from dpbench.instruments.timing import timing_rows
from dpbench.metrics import unit
from dpbench.process.schedule import Steps
from dpbench.results.rows import STEP, Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Cupti(Instrument):
    """Runs ``dpbench step --cupti``: timed steps without counters, then counted ones."""

    name: ClassVar[str] = "cupti"

    directory: Path  # where the cases' logs go
    names: tuple[str, ...] = ()  # beside DRAM bytes, time, busy shares; everything if empty
    steps: Steps = Steps(Settings.warmup, Settings.active)  # those that are not counted
    timeout: float = Settings.timeout  # seconds after which a case is ended

    @classmethod
    def from_settings(cls, settings: Settings) -> Cupti:
        """As ``--ncu-metrics``, ``--warmup``, ``--active`` and the like say."""
        steps = Steps(settings.warmup, settings.active)
        return cls(settings.ncu_dir, settings.metric_names or (), steps, settings.timeout)

    def check(self) -> None:
        """There are a GPU and a directory that can hold logs."""
        check_place(self.directory, on_gpu=True)

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        option = "=".join(filter(None, ("--cupti", ",".join(self.names))))
        return [*step_command(case, self.steps, device="cuda"), option]

    def start(self, case: Case) -> Child:
        """Start a process whose rows are those of timing, and each metric by phase and step."""
        return Child(
            self.command(case),
            case=case,
            log=(self.directory / case.report_path).with_suffix(".cupti.log"),
            timeout=self.timeout,
            read=lambda process: list(cupti_rows(case, process.record())),
        )


def cupti_rows(case: Case, record: Mapping[str, Any]) -> Iterator[Measurement]:
    """The rows of one record of ``dpbench step --cupti``."""
    whole = ({STEP: values} for values in record["counted_steps"])
    return counted_rows(case, record, [record["counted_phases"], *whole])


def counted_rows(
    case: Case, record: Mapping[str, Any], steps: Iterable[Mapping[str, Mapping[str, float]]]
) -> Iterator[Measurement]:
    """The rows of timed steps, and of steps that were counted, by phase or as a whole."""
    device, tool = record["device"], f"cupti {record['cupti']}, torch {record['torch']}"
    for row in timing_rows(case, dict(record)):
        yield replace(row, instrument=Cupti.name, tool=tool)
    repeats = {True: count(), False: count()}  # of the steps that were counted as a whole, or not
    for step in steps:
        where = (next(repeats[STEP in step]), device, tool)
        for phase, values in step.items():
            for metric, value in values.items():
                of = "B" if "bytes" in metric.partition("__")[2] else unit(metric)
                yield Measurement(case, Cupti.name, phase, metric, value, of, *where)
