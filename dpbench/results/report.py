"""An object with the numbers of one case, for the assertions of a test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS, Timed
from dpbench.core.subject import Subject
from dpbench.results.kernels import KernelCount, OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.summary import (
    divided,
    kernel_table,
    of_one_instrument,
    own_values,
    summary,
    to_frame,
)


@dataclass(frozen=True)
class CaseReport:
    """The measured or counted numbers of one case.

    Args:
        case: the case.
        frame: the long table of the case, with the columns of `Measurement.as_row`.
        operator_counts: the counts of each operator, if the instrument counts operators.
        notes: what logical counting assumed or did not count.
        kernel_counts: the counts of each kernel, if the case was profiled kernel by kernel.
        extra_info: additional values that a test records. They are saved in the run's document.
    """

    case: Subject
    frame: pd.DataFrame = field(repr=False)
    operator_counts: tuple[OperatorCount, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    kernel_counts: tuple[KernelCount, ...] = field(default=(), repr=False)
    extra_info: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, case: Subject, rows: Iterable[Measurement]) -> CaseReport:
        """Make the report of a case from its measurements."""
        return cls(case, to_frame(rows))

    @classmethod
    def of_outcome(cls, outcome: Outcome) -> CaseReport:
        """Make the report of a case from its outcome."""
        frame = to_frame(outcome.rows)
        return cls(outcome.case, frame, outcome.operators, outcome.notes, outcome.kernels)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per device, instrument, phase and metric, see `dpbench.results.summary`."""
        return own_values(summary(self.frame))

    def value(self, metric: str, phase: str = STEP) -> float:
        """Return a metric of the step or of one phase.

        Steps and ranks are combined as in `dpbench.results.summary.summary`. If a metric was
        measured and also counted without hardware, the measured number is returned. If several
        instruments measured the metric on one device, the one that comes first in `Metric.by` is
        used.

        Raises:
            ConfigurationError: the metric was not measured, was measured on several devices, or was
                measured by several instruments that are not all in `Metric.by`.
        """
        return float(self._row(metric, phase).value)

    def _row(self, metric: str, phase: str) -> pd.Series[Any]:
        of_phase = self.summary[self.summary.phase == phase]
        rows = of_phase[of_phase.metric == metric]
        if rows.empty:
            known = ", ".join(sorted(set(of_phase.metric))) or "nothing"
            raise ConfigurationError(
                f"{self.case.id}: {metric!r} was not measured for {phase!r}; measured: {known}"
            )
        if len(rows) > 1:
            rows = rows[rows.device != NO_HARDWARE]
        if (definition := METRICS.find(metric)) and {*rows.instrument} <= {*definition.by}:
            rows = of_one_instrument(rows)
        if len(rows) > 1:
            by = " and ".join(rows.instrument + " on " + rows.device)
            raise ConfigurationError(
                f"{self.case.id}: {metric!r} was measured by {by}; choose one of these instruments"
            )
        return rows.iloc[0]

    @property
    def dram_bytes(self) -> float:
        """Bytes that one step reads from and writes to DRAM, measured by hardware counters."""
        return self.value("dram_bytes")

    @property
    def logical_bytes(self) -> float:
        """Bytes that the operators of one step must read and write, counted without hardware."""
        return self.value("logical_bytes")

    @property
    def phases(self) -> pd.DataFrame:
        """A table with a row for each phase, and a column for each metric that is not `Timed`."""
        timed = [name for name, metric in METRICS.items() if isinstance(metric.how, Timed)]
        rows = self.summary[(self.summary.phase != STEP) & ~self.summary.metric.isin(timed)]
        rows = of_one_instrument(rows)
        rows = rows.drop_duplicates(["phase", "metric"])
        wide = rows.pivot(index="phase", columns="metric", values="value")
        return wide.reindex([name for name in ALL_PHASES if name in wide.index])

    @cached_property
    def operators(self) -> pd.DataFrame:
        """The counts of each operator by phase. Operators with the most bytes come first.

        The columns are ``calls``, ``logical_read_bytes``, ``logical_write_bytes``,
        ``logical_bytes``, ``flops`` and ``collective_bytes``. For example,
        ``report.operators.flops["forward", "aten.mm"]`` is a number.
        """
        if not self.operator_counts:
            raise ConfigurationError(
                f"{self.case.id}: operators were not counted; the logical instrument counts them"
            )
        names = {"read_bytes": "logical_read_bytes", "write_bytes": "logical_write_bytes"}
        table = pd.DataFrame(map(asdict, self.operator_counts)).rename(columns=names)
        table = table.drop(columns=["general_rule", "module", "line"])
        table = table.groupby(["phase", "operator"], sort=False).sum()
        table["logical_bytes"] = table.logical_read_bytes + table.logical_write_bytes
        return table.sort_values("logical_bytes", ascending=False, kind="stable")

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """The counts of each kernel by phase and short name, sorted by DRAM bytes.

        The columns are those of `kernel_table`. For example,
        ``report.kernels.dram_bytes["clip", "gemvx::kernel"]`` is a number.
        """
        if not self.kernel_counts:
            raise ConfigurationError(
                f"{self.case.id} was not profiled kernel by kernel; measure it with --ncu-kernels"
            )
        return kernel_table(self.kernel_counts)

    def ratio_to(self, baseline: CaseReport, metric: str | None = None, phase: str = STEP) -> float:
        """Return a metric of this case divided by the same metric of a baseline.

        Args:
            baseline: the report of another trainer in the same configuration.
            metric: the metric. The default is ``dram_bytes``, or ``logical_bytes`` if this case
                was only counted.
            phase: a phase, or ``"step"``.

        Raises:
            ConfigurationError: the cases differ in more than the trainer, the devices differ, a
                report lacks the metric, or the baseline's number is 0.
        """
        if metric is None:
            counted = set(self.frame.device) == {NO_HARDWARE}
            metric = "logical_bytes" if counted else "dram_bytes"
        if self.case.cell != baseline.case.cell:
            raise ConfigurationError(
                f"{self.case.id} and {baseline.case.id} differ in more than the trainer; "
                f"a ratio between them would compare different work"
            )
        row, other = self._row(metric, phase), baseline._row(metric, phase)
        if row.device != other.device:
            raise ConfigurationError(
                f"{self.case.id} and {baseline.case.id} were measured on different devices, "
                f"{' and '.join(sorted((row.device, other.device)))}"
            )
        ratio = divided(pd.Series([row.value]), pd.Series([other.value]))
        if ratio.hasnans:
            raise ConfigurationError(
                f"{baseline.case.id}: {metric!r} is 0 for {phase!r}, so there is no ratio to it"
            )
        return float(ratio.iloc[0])

    def __str__(self) -> str:
        columns = ["instrument", "device", "metric", "unit"]
        wide = self.summary.pivot(index=columns, columns="phase", values="value")
        wide = wide[[name for name in (STEP, *ALL_PHASES) if name in wide]]
        numbers = wide.to_string(float_format="{:.6g}".format, na_rep="-")
        return f"{self.case.id}, per step and phase:\n{numbers}"
