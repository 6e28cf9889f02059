"""One measured case as an object: what a test asserts on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from dpbench.case import OUTSIDE, PHASES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.frame import summarise, to_frame
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.tables import as_text, tables


@dataclass(frozen=True)
class CaseReport:
    """What was measured of one case.

    Args:
        case: the case.
        frame: its rows, one per number, with the columns of `Measurement.as_row`.
    """

    case: Case
    frame: pd.DataFrame = field(repr=False)

    @classmethod
    def of(cls, case: Case, rows: Iterable[Measurement]) -> CaseReport:
        """The report of a case from its measurements."""
        return cls(case, to_frame(rows))

    @classmethod
    def of_outcome(cls, outcome: Outcome) -> CaseReport:
        """The report of a case that was measured."""
        return cls.of(outcome.case, outcome.rows)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per instrument, phase and metric, over the steps; see `summarise`."""
        return summarise(self.frame)

    def value(self, metric: str, phase: str = STEP) -> float:
        """A metric of the step or of one phase: mean over the active steps, median for times.

        Raises:
            ConfigurationError: it was not measured; the message lists what was.
        """
        rows = self.summary[self.summary.phase == phase]
        found = rows[rows.metric == metric].value
        if found.empty:
            known = ", ".join(sorted(set(rows.metric))) or f"nothing in phase {phase!r}"
            raise ConfigurationError(
                f"{self.case.id}: {metric!r} was not measured for {phase!r}; there is {known}"
            )
        return float(found.iloc[0])

    @property
    def dram_bytes(self) -> float:
        """Bytes read from and written to DRAM by one step."""
        return self.value("dram_bytes")

    @property
    def phases(self) -> pd.DataFrame:
        """Metrics by phase: one row per phase, one column per metric of the profiler."""
        rows = self.summary[(self.summary.phase != STEP) & (self.summary.instrument == "ncu")]
        wide = rows.pivot(index="phase", columns="metric", values="value")
        return wide.reindex([name for name in (*PHASES, OUTSIDE) if name in wide.index])

    def ratio_to(
        self, baseline: CaseReport, metric: str = "dram_bytes", phase: str = STEP
    ) -> float:
        """How many times the baseline's value this case's is.

        Raises:
            ConfigurationError: the two differ in more than the trainer, or the metric was not
                measured for both.
        """
        if self.case.baseline != baseline.case.baseline:
            raise ConfigurationError(
                f"{self.case.id} and {baseline.case.id} differ in more than the trainer; "
                f"a ratio between them would compare different work"
            )
        devices = sorted({*self.frame.device, *baseline.frame.device})
        if len(devices) > 1:
            raise ConfigurationError(
                f"{self.case.id} and {baseline.case.id} were measured on different devices, "
                f"{' and '.join(devices)}"
            )
        value, reference = self.value(metric, phase), baseline.value(metric, phase)
        if reference == 0:
            raise ConfigurationError(
                f"{baseline.case.id}: {metric!r} is 0 for {phase!r}, so nothing is a ratio to it"
            )
        return value / reference

    def __str__(self) -> str:
        return as_text(tables(self.frame))
