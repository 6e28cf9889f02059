"""Roofline by phase: measured time and bytes, counted operations, a named card's two roofs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, PHASES
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs, find_card
from dpbench.results.roofline import MEASURED_BYTES, intensities, under
from dpbench.results.rows import STEP
from dpbench.show.groups import in_order
from dpbench.show.html import data
from dpbench.show.html.drawing import (
    Material,
    cells,
    trainer_keys,
)
from dpbench.show.html.logical_chart import NEEDS_LOGICAL
from dpbench.show.html.parts import (
    CASE,
    GB,
    Chart,
    Column,
    DataTable,
    Key,
    milliseconds,
)
from dpbench.show.html.roofline_panels import MARKS, panels, window
from dpbench.show.html.source import Source, cell_label
from dpbench.show.tables import SHOWN_SHARE

TITLE = "Roofline by phase"

MEASURED_CASE = ["run", *AXES, "device"]
"""What tells one measured case from another: two runs may have measured the same."""


def roofline(sources: Sequence[Source], material: Material) -> Chart:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    drawn: list[pd.DataFrame] = []
    notes: list[str] = []
    roofs: dict[str, Roofs] = {}
    for run, device, frame in _with_operations(sources):
        try:
            roofs[device] = find_card(device).roofs()
            drawn.append(under(intensities(frame), roofs[device]).assign(run=run))
        except ConfigurationError as error:
            notes.append(f"{device}: {error}.")
    if not drawn:
        why = " ".join(dict.fromkeys(notes)) or _nothing(material.summary)
        return Chart("roofline", TITLE, missing=why)
    table = _shown(_titled(pd.concat(drawn, ignore_index=True), material.summary))
    seen = window(table[table.flops > 0], roofs)
    highest = float(table.share.max()) * 100
    drawings = [
        part
        for what, batch, seq, rows in cells(table)
        for part in panels(
            f"{what}, {cell_label(batch, seq)}", rows, roofs, material.look, seen, highest
        )
    ]
    keys = [Key("■", key.text, key.colour) for key in trainer_keys(material.look, table.trainer)]
    placed = set(table.phase[table.flops > 0])
    keys += [Key(mark.glyph, name) for name, mark in MARKS.items() if name in placed]
    used = {str(device): sorted(set(rows.precision)) for device, rows in table.groupby("device")}
    notes += [_roofs_in_words(roofs[name], precisions) for name, precisions in used.items()]
    notes.append(
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "on the first kind of panel; they are in the second and in the table."
    )
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    return Chart("roofline", TITLE, premise, drawings, keys, _as_table(table), list(notes))


def _nothing(summary: pd.DataFrame) -> str:
    if data.step_bytes(summary, data.DRAM).empty:
        return "No DRAM bytes were measured in these runs, so no phase has a place under a roof."
    return NEEDS_LOGICAL


def _with_operations(sources: Sequence[Source]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """By run and device, the measured rows of cases whose operations some run has counted."""
    everything = pd.concat([source.frame for source in sources], ignore_index=True)
    counted = everything[(everything.instrument == "logical")]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    cases = pd.MultiIndex.from_frame(counted[list(AXES)])
    for source in sources:
        measured = source.frame[source.frame.instrument != "logical"]
        for device, rows in measured.groupby("device", sort=False):
            both = rows[pd.MultiIndex.from_frame(rows[list(AXES)]).isin(cases)]
            both = both[
                _cases_with(both, "dram_read_bytes") & _cases_with(both, "step_time_seconds")
            ]
            if not both.empty:
                theirs = counted[cases.isin(pd.MultiIndex.from_frame(both[list(AXES)]))]
                yield source.label, str(device), pd.concat([both, theirs], ignore_index=True)


def _cases_with(rows: pd.DataFrame, metric: str) -> pd.Series[bool]:
    """Which rows belong to a case that has a metric."""
    cases = pd.MultiIndex.from_frame(rows[list(AXES)])
    having = pd.MultiIndex.from_frame(rows.loc[rows.metric == metric, list(AXES)])
    return pd.Series(cases.isin(having), index=rows.index)


def _titled(table: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    names = summary[summary.measured].drop_duplicates(MEASURED_CASE)
    return in_order(table.join(names.set_index(MEASURED_CASE).title, on=MEASURED_CASE))


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """Every phase of measured steps, and what lies outside if that takes enough to matter."""
    steps = table[table.phase == STEP].set_index(MEASURED_CASE).seconds
    share = table.seconds / table.join(steps.rename("whole"), on=MEASURED_CASE).whole
    shown = (table.bytes_are == MEASURED_BYTES) & (table.phase.isin(PHASES) | (share > SHOWN_SHARE))
    shown &= table.phase != STEP
    order = {name: place for place, name in enumerate(ALL_PHASES)}
    return (
        table[shown].sort_values("phase", key=lambda c: c.map(order), kind="stable").pipe(in_order)
    )


def _roofs_in_words(roofs: Roofs, precisions: Sequence[str]) -> str:
    peaks = ", ".join(f"{GB(roofs.flops[p] / 1e3)} TFLOP/s at {p}" for p in precisions)
    return f"Roofs of {roofs.name}: {GB(roofs.bandwidth)} GB/s, {peaks} ({roofs.premise})."


def _as_table(table: pd.DataFrame) -> DataTable:
    return DataTable.of(
        "Phases under the roofs: operations counted, bytes and time measured",
        table.assign(percent=table.share * 100),
        [
            *CASE,
            Column("phase", "phase"),
            Column("TFLOP (counted)", "flops", lambda v: GB(v / 1e3)),
            Column("DRAM GB (measured)", "bytes", GB),
            Column("FLOP/B", "intensity", "{:.1f}".format),
            Column("ms (measured)", "seconds", milliseconds),
            Column("least ms", "least_seconds", milliseconds),
            Column("bound by", "bound_by"),
            Column("% of roof", "percent", "{:.0f}".format),
        ],
    )
