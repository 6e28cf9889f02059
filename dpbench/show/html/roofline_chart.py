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
from dpbench.show.html.drawing import Material, cells, trainer_keys
from dpbench.show.html.logical_chart import NEEDS_LOGICAL
from dpbench.show.html.palette import PHASE_STYLES
from dpbench.show.html.parts import CASE, Chart, DataTable, Key
from dpbench.show.html.roofline_panels import panels, window
from dpbench.show.html.source import UNMEASURED, Source, has_case_of
from dpbench.show.layout import gigabytes
from dpbench.show.tables import SHOWN_SHARE

TITLE = "Roofline by phase"

MEASURED_CASE = ["run", *AXES, "device"]
"""What tells one measured case from another: two runs may have measured the same."""

PREMISE = (
    "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
    "operations counted without hardware"
)

HOW_TO_READ = (
    "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
    "Operations are those of matrix products and attention. Phases without any have no place "
    "on the first kind of panel; they are in the second and in the table."
)


def roofline(sources: Sequence[Source], material: Material) -> Chart:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    drawn: list[pd.DataFrame] = []
    refusals: list[str] = []
    roofs: dict[str, Roofs] = {}
    for run, device, frame in _with_operations(sources):
        try:
            roofs[device] = find_card(device)
            drawn.append(under(intensities(frame), roofs[device]).assign(run=run))
        except ConfigurationError as error:
            refusals.append(f"{device}: {error}.")
    if not drawn:
        why = " ".join(dict.fromkeys(refusals)) or _nothing(material.summary)
        return Chart("roofline", TITLE, missing=why)
    table = _phases_to_show(pd.concat(drawn, ignore_index=True), material.summary)
    seen = window(table, roofs)
    drawings = [
        drawing
        for what, rows in cells(table)
        for drawing in panels(what, rows, roofs[rows.device.iloc[0]], material.look, seen)
    ]
    keys = [Key("■", key.text, key.colour) for key in trainer_keys(material.look, table.trainer)]
    placed = set(table.phase[table.flops > 0])
    keys += [Key(style.glyph, name) for name, style in PHASE_STYLES.items() if name in placed]
    used = [_roofs_in_words(roofs[str(device)], rows) for device, rows in table.groupby("device")]
    notes = [*refusals, *used, HOW_TO_READ]
    return Chart("roofline", TITLE, PREMISE, drawings, keys, _as_table(table), notes)


def _nothing(summary: pd.DataFrame) -> str:
    if data.step_bytes(summary, data.DRAM).empty:
        return "No DRAM bytes were measured in these runs, so no phase has a place under a roof."
    return NEEDS_LOGICAL


def _with_operations(sources: Sequence[Source]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """By run and device, the measured rows of cases whose operations some run has counted."""
    everything = pd.concat([source.frame for source in sources], ignore_index=True)
    counted = everything[everything.instrument == UNMEASURED]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    for source in sources:
        measured = source.frame[source.frame.instrument != UNMEASURED]
        for device, rows in measured.groupby("device", sort=False):
            complete = has_case_of(rows, counted)
            for metric in ("dram_read_bytes", "step_time_seconds"):
                complete &= has_case_of(rows, rows[rows.metric == metric])
            if complete.any():
                theirs = counted[has_case_of(counted, rows[complete])]
                both = pd.concat([rows[complete], theirs], ignore_index=True)
                yield source.label, str(device), both


def _phases_to_show(table: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Every phase of measured steps, and what lies outside if that takes enough to matter."""
    names = summary[summary.measured].drop_duplicates(MEASURED_CASE).set_index(MEASURED_CASE).title
    steps = table[table.phase == STEP].set_index(MEASURED_CASE).seconds
    table = table.join(names, on=MEASURED_CASE).join(steps.rename("whole"), on=MEASURED_CASE)
    matters = table.phase.isin(PHASES) | (table.seconds / table.whole > SHOWN_SHARE)
    table = table[(table.bytes_are == MEASURED_BYTES) & matters & (table.phase != STEP)]
    order = {name: place for place, name in enumerate(ALL_PHASES)}
    return in_order(table.sort_values("phase", key=lambda c: c.map(order), kind="stable"))


def _roofs_in_words(roofs: Roofs, rows: pd.DataFrame) -> str:
    peaks = [
        f"{gigabytes(roofs.flops[precision] / 1e3)} TFLOP/s at {precision}"
        for precision in sorted(set(rows.precision))
    ]
    return (
        f"Roofs of {roofs.name}: {gigabytes(roofs.bandwidth)} GB/s, {', '.join(peaks)} "
        f"({roofs.premise})."
    )


def _as_table(table: pd.DataFrame) -> DataTable:
    return DataTable.of(
        "Phases under the roofs: operations counted, bytes and time measured",
        table.assign(percent=table.share * 100),
        {
            **CASE,
            "phase": "phase",
            "flops": "TFLOP (counted)",
            "bytes": "DRAM GB (measured)",
            "intensity": "FLOP/B",
            "seconds": "ms (measured)",
            "least_seconds": "least ms",
            "bound_by": "bound by",
            "percent": "% of roof",
        },
    )
