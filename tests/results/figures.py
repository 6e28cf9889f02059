"""Rows for tests of tables: figures as large as they get, and how to read a table."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from dpbench.core.case import Case
from dpbench.core.gpu import limited_by
from dpbench.instruments.timing import timing_rows
from dpbench.results.outcome import COMPLETE, Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.summary import own_values, summary, to_frame
from dpbench.show.layout import Table
from dpbench.show.tables import tables

any_text = partial(st.text, st.characters(exclude_categories=["Cs"]))
"""Any text: what Hypothesis makes by itself, for which it tries a million characters first."""

GB = 1e9
UNITS = {"bytes": "B", "seconds": "s", "second": "1/s"}
TIMING = ("step_time_seconds", "samples_per_second", "peak_memory_bytes")

FIGURES: dict[str, dict[str, float]] = {
    # As large as they get at 1b on an H200: batch 16, sequence 1024.
    "standard": {
        "dram_read_bytes": 512.3 * GB,
        "dram_write_bytes": 377.4 * GB,
        "l2_served_bytes": 5120.7 * GB,
        "peak_memory_bytes": 71.9 * GB,
        "step_time_seconds": 2.8017,
    },
    "dpsgd": {
        "dram_read_bytes": 1311.2 * GB,
        "dram_write_bytes": 956.4 * GB,
        "l2_served_bytes": 10240.1 * GB,
        "peak_memory_bytes": 138.2 * GB,
        "step_time_seconds": 5.5942,
    },
    "dpsgd_ghost": {
        "dram_read_bytes": 911.2 * GB,
        "dram_write_bytes": 756.4 * GB,
        "l2_served_bytes": 9120.1 * GB,
        "peak_memory_bytes": 88.2 * GB,
        "step_time_seconds": 4.1942,
    },
    "dpsgd_fgc": {
        "dram_read_bytes": 1111.2 * GB,
        "dram_write_bytes": 856.4 * GB,
        "l2_served_bytes": 9820.1 * GB,
        "peak_memory_bytes": 101.2 * GB,
        "step_time_seconds": 5.1942,
    },
}


def summarised(rows: Iterable[Measurement] | pd.DataFrame) -> pd.DataFrame:
    """The numbers of measurements that follow from no other metric."""
    frame = rows if isinstance(rows, pd.DataFrame) else to_frame(rows)
    return own_values(summary(frame))


def rows(
    trainer: str, metrics: dict[str, float], *, phase: str = STEP, device: str = "H200", **case: Any
) -> list[Measurement]:
    """Measurements of one step of one case."""
    return [
        Measurement(
            Case(trainer, **{"batch_size": 16, "seq_len": 1024, **case}),
            "timing" if metric in TIMING else "ncu",
            phase,
            metric,
            value,
            UNITS.get(metric.rpartition("_")[2], "sector"),
            0,
            device,
            "tool 1",
        )
        for metric, value in metrics.items()
    ]


def dram(total: float) -> dict[str, float]:
    return {"dram_read_bytes": total / 4, "dram_write_bytes": 3 * total / 4}


def tables_of(*measurements: Iterable[Measurement]) -> list[Table]:
    return tables(summary(to_frame(row for group in measurements for row in group)))


def every_figure(**case: Any) -> list[Measurement]:
    return [row for name, metrics in FIGURES.items() for row in rows(name, metrics, **case)]


def column(table: Table, header: str) -> dict[str, str]:
    """The cells of a column, by trainer."""
    [index] = [i for i, h in enumerate(table.headers) if h.replace("\n", " ") == header]
    return {line[0]: line[index] for line in table.cells}


def notes(*measurements: Iterable[Measurement]) -> str:
    return "\n".join(tables_of(*measurements)[0].notes)


def by_phase(trainer: str, **phases: float) -> list[Measurement]:
    """DRAM bytes in GB by phase, and for the step."""
    return [
        *(
            r
            for phase, total in phases.items()
            for r in rows(trainer, dram(total * GB), phase=phase)
        ),
        *rows(trainer, dram(sum(phases.values()) * GB)),
    ]


def timed_run(hertz: float, *reasons: int, name: str = "run") -> Run:
    """A run of a step for each bit mask of NVML's reasons, at an SM clock."""
    case = Case("fused", 8, 256)
    record = {
        "device": "H200",
        "torch": "2.13",
        "phase_seconds": [{"forward": 0.1}] * len(reasons),
        "clocks": [{"sm_clock_hz": hertz, **limited_by(mask)} for mask in reasons],
        "peak_memory_bytes": None,
    }
    outcome = Outcome(case, tuple(timing_rows(case, record)), instruments=("timing",))
    return Run.of(name, [outcome], session={"status": COMPLETE})
