"""The roofline: which roof of a card, bandwidth or arithmetic, bounds each phase of a step.

A phase that does F operations and moves M bytes takes at least ``max(F / peak, M / bandwidth)``
seconds; F / M, its arithmetic intensity, says which of the two it is (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009).

Operations are counted, not measured: those of matrix products and attention, by PyTorch's own
counter. Bytes are DRAM bytes where they were measured, logical bytes elsewhere; the two never
share a table.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs
from dpbench.results.frame import BUSY, of_one_instrument, summarise
from dpbench.results.rows import STEP

MEASURED_BYTES = "measured DRAM bytes"
COUNTED_BYTES = "logical bytes"
"""Where the bytes of a row come from: the column ``bytes_are``."""

BANDWIDTH = "bandwidth"
ARITHMETIC = "arithmetic"
"""What can bound a phase: the column ``bound_by``."""

LAUNCH_BOUND = 0.7
"""A phase whose GPU is busy for less than this part of its time waits for its launches."""


def intensities(frame: pd.DataFrame) -> pd.DataFrame:
    """Operations, bytes and, if it was measured, time of each phase and of the step.

    Each case of the long table needs rows of the ``logical`` instrument, for the operations. DRAM
    bytes and times are those of the instrument that comes first in `PREFERRED`.

    Returns:
        One row per case, device and phase: the case's fields, ``device``, ``phase``,
        ``flops``, ``bytes``, ``bytes_are``, ``intensity`` (FLOP/B), ``seconds`` and ``busy``, the
        part of them in which the GPU did anything (NaN where they were not measured).
    """
    place = [*AXES, "device", "phase"]
    summary = of_one_instrument(summarise(frame))

    def of(metric: str, column: str) -> pd.DataFrame:
        found = summary.loc[summary.metric == metric, [*place, "value"]]
        return found.rename(columns={"value": column})

    flops = of("flops", "flops").drop(columns="device")
    logical = of("logical_bytes", "bytes").assign(bytes_are=COUNTED_BYTES)
    dram = of("dram_bytes", "bytes").assign(bytes_are=MEASURED_BYTES)
    seconds = of("step_time_seconds", "seconds")
    on_hardware = pd.concat([dram, seconds])[[*AXES, "device"]].drop_duplicates()
    # Timed, but not under the profiler: the logical bytes of the case, on its device.
    timed = _without(on_hardware, dram, [*AXES, "device"])
    timed = timed.merge(logical.drop(columns="device"), on=list(AXES))
    parts = [dram, timed, _without(logical, on_hardware, list(AXES))]
    table = pd.concat([part for part in parts if not part.empty] or parts, ignore_index=True)
    table = table.merge(flops, on=[*AXES, "phase"], how="left")
    table = table.merge(seconds, on=place, how="left")
    table = table.merge(of(BUSY, "busy"), on=place, how="left")
    missing = _without(on_hardware, flops, list(AXES)).assign(phase=STEP)
    for case in pd.concat([missing, table[table.flops.isna()]]).head(1).to_dict("records"):
        raise ConfigurationError(  # never zero
            f"no operations were counted for {Case.from_row(case).id}, phase {case['phase']}: "
            f"count the same case with the logical instrument"
        )
    return table.assign(intensity=table.flops / table.bytes.where(table.bytes > 0))


def _without(table: pd.DataFrame, other: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    rows, others = (pd.MultiIndex.from_frame(frame[keys]) for frame in (table, other))
    return table[~rows.isin(others)]


def under(table: pd.DataFrame, roofs: Roofs) -> pd.DataFrame:
    """What `intensities` returned, under the roofs of one card.

    Returns:
        The table with ``bound_by`` (a roof; where the GPU waits for its launches, these, and how
        busy it was), ``least_seconds``, ``share`` (``least_seconds / seconds``), and what was
        achieved, ``flops_per_second``. The least time of a step is the sum over its phases,
        because they run one after the other.
    """
    measured = table[(table.bytes_are == MEASURED_BYTES) | table.seconds.notna()]
    roofs.require(measured.device)
    arithmetic = table.flops / table.precision.map(roofs.flops)
    bandwidth = table.bytes / roofs.bandwidth
    roof = pd.Series(np.where(arithmetic > bandwidth, ARITHMETIC, BANDWIDTH), index=table.index)
    table = table.assign(
        bound_by=roof.mask(
            table.busy < LAUNCH_BOUND, table.busy.map("launches, busy {:.0%}".format)
        ),
        least_seconds=np.maximum(arithmetic, bandwidth),
    )
    phases = table.least_seconds.where(table.phase != STEP)
    of_phases = phases.groupby([table[k] for k in (*AXES, "device", "bytes_are")])
    whole = of_phases.transform("sum", min_count=1).where(table.phase == STEP)
    least = whole.fillna(table.least_seconds)
    return table.assign(
        least_seconds=least,
        share=least / table.seconds,
        flops_per_second=table.flops / table.seconds,
    )
