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
from dpbench.results.frame import of_one_instrument, summarise
from dpbench.results.rows import STEP

MEASURED_BYTES = "measured DRAM bytes"
COUNTED_BYTES = "logical bytes"
"""Where the bytes of a row come from: the column ``bytes_are``."""

BANDWIDTH = "bandwidth"
ARITHMETIC = "arithmetic"
"""What can bound a phase: the column ``bound_by``."""

BUSY = "gpu_busy_share"

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
    summary = of_one_instrument(summarise(frame))
    flops = _values(summary, "flops", "flops").drop(columns="device")
    logical = _values(summary, "logical_bytes", "bytes").assign(bytes_are=COUNTED_BYTES)
    dram = _values(summary, "dram_bytes", "bytes").assign(bytes_are=MEASURED_BYTES)
    seconds = _values(summary, "step_time_seconds", "seconds")
    on_hardware = pd.concat([dram, seconds])[[*AXES, "device"]].drop_duplicates()
    # Timed, but not under the profiler: the logical bytes of the case, on its device.
    timed = _without(on_hardware, dram, [*AXES, "device"])
    timed = timed.merge(logical.drop(columns="device"), on=AXES)
    parts = [dram, timed, _without(logical, on_hardware)]
    table = pd.concat([part for part in parts if not part.empty] or parts, ignore_index=True)
    table = table.merge(flops, on=[*AXES, "phase"], how="left")
    table = table.merge(seconds, on=[*AXES, "device", "phase"], how="left")
    busy = _values(summary, BUSY, "busy")
    table = table.merge(busy, on=[*AXES, "device", "phase"], how="left")
    missing = [*_without(on_hardware, flops).to_dict("records")]
    missing += table[table.flops.isna()].to_dict("records")
    if missing:  # an error, never zero
        case = missing[0]
        raise ConfigurationError(
            f"no operations were counted for {Case.from_row(case).id}, phase "
            f"{case.get('phase', STEP)}: count the same case with the logical instrument"
        )
    return table.assign(intensity=table.flops / table.bytes.where(table.bytes > 0))


def _values(summary: pd.DataFrame, metric: str, column: str) -> pd.DataFrame:
    """One metric as a column, by case, device and phase."""
    found = summary[summary.metric == metric].drop_duplicates([*AXES, "device", "phase"])
    return found[[*AXES, "device", "phase", "value"]].rename(columns={"value": column})


def _without(
    table: pd.DataFrame, other: pd.DataFrame, keys: list[str] | None = None
) -> pd.DataFrame:
    """The rows of a table whose keys (the case's fields) do not occur in another."""
    keys = keys or list(AXES)
    if other.empty:
        return table
    return table[~pd.MultiIndex.from_frame(table[keys]).isin(pd.MultiIndex.from_frame(other[keys]))]


def under(table: pd.DataFrame, roofs: Roofs) -> pd.DataFrame:
    """What `intensities` returned, under the roofs of one card.

    Returns:
        The table with ``bound_by`` (a roof; where the GPU waits for its launches, these, and how
        busy it was), ``least_seconds``, ``share`` (``least_seconds / seconds``),
        and what was achieved, ``flops_per_second`` and ``bytes_per_second``. The least time of
        a step is the sum over its phases, because they run one after the other.
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
    keys = [*AXES, "device", "bytes_are"]
    phases = table[table.phase != STEP].groupby(keys, as_index=False).least_seconds.sum()
    table = table.merge(phases, on=keys, how="left", suffixes=("", "_of_phases"))
    is_sum = (table.phase == STEP) & table.least_seconds_of_phases.notna()
    least = table.least_seconds.mask(is_sum, table.least_seconds_of_phases)
    return table.drop(columns="least_seconds_of_phases").assign(
        least_seconds=least,
        share=least / table.seconds,
        flops_per_second=table.flops / table.seconds,
        bytes_per_second=table.bytes / table.seconds,
    )
