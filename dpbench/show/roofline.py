"""Roofs for people: what bounds each phase, and what a card reaches beside its data sheet."""

from __future__ import annotations

import pandas as pd

from dpbench.case import ALL_PHASES
from dpbench.results.cards import Ceilings, Roofs, known_roofs
from dpbench.results.rows import STEP
from dpbench.show.layout import Shown, Table, gigabytes
from dpbench.show.tables import SHOWN_SHARE, by_cell, in_order


def roofline_tables(table: pd.DataFrame, roofs: Roofs) -> list[Table]:
    """What `dpbench.results.roofline.under` returned: a table per cell and kind of bytes."""
    return [
        _table(f"{title}: roofline of {premise}", rows, roofs)
        for premise, group in table.groupby("bytes_are", sort=False)
        for title, rows in by_cell(in_order(group))
    ]


def _table(title: str, rows: pd.DataFrame, roofs: Roofs) -> Table:
    """For each trainer a line for the step, then one per phase that matters to any of them."""
    matters = rows.phase[rows.least_seconds >= SHOWN_SHARE * rows.least_seconds.max()]
    order = [STEP, *ALL_PHASES]
    lines = pd.concat(
        by_trainer.sort_values("phase", key=lambda phases: phases.map(order.index))
        for _, by_trainer in rows[rows.phase.isin(matters)].groupby("trainer", sort=False)
    )
    lines["name"] = lines.trainer.where(lines.phase == STEP, "· " + lines.phase)
    columns: dict[str, Shown] = {
        "trainer\n· phase": ("name", str),
        "TFLOP": ("flops", lambda operations: gigabytes(operations / 1e3)),
        "GB": ("bytes", gigabytes),
        "FLOP\n/ B": ("intensity", "{:.1f}".format),
        "bound by": ("bound_by", str),
        "least\nms": ("least_seconds", _milliseconds),
    }
    if rows.seconds.notna().any():
        columns["time\nms"] = ("seconds", _milliseconds)
        columns["% of\nroof"] = ("share", "{:.0%}".format)
    return Table.of(title, lines, columns, [_note(roofs, str(rows.precision.iloc[0]))])


def _milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, with one digit after the point or three in all."""
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-4 else f"{seconds * 1e3:.3g}"


def _note(roofs: Roofs, precision: str) -> str:
    peak = roofs.flops[precision]
    return (
        f"Roofs of {roofs.name}: {roofs.bandwidth / 1e9:.4g} GB/s and {peak / 1e12:.4g} TFLOP/s "
        f"at {precision}, which meet at {roofs.ridge(precision):.1f} FLOP/B ({roofs.premise}). "
        f"FLOP are counted: matrix products and attention. The step's least time is the sum of "
        f"its phases'."
    )


def ceilings_table(ceilings: Ceilings) -> Table:
    """Measured and, if the card is known, data-sheet figures side by side."""
    sheet = known_roofs(ceilings.device)
    lines = [("copy, GB/s", 1e9, ceilings.bandwidth, sheet and sheet.bandwidth)]
    lines += [
        (f"{precision} matrix product, TFLOP/s", 1e12, reached, sheet and sheet.flops[precision])
        for precision, reached in ceilings.flops.items()
    ]
    cells = [
        [
            name,
            f"{reached / unit:.1f}",
            *([f"{peak / unit:.4g}", f"{reached / peak:.0%}"] if peak else []),
        ]
        for name, unit, reached, peak in lines
    ]
    headers = ["what", "measured", *(["data sheet", "share"] if sheet else [])]
    notes = (
        f"Copy of {gigabytes(ceilings.copy_bytes)} GB on the device, bytes read and written; "
        f"matrices of {ceilings.matrix} x {ceilings.matrix}; torch {ceilings.torch}.",
        f"Data sheet: {sheet.premise}." if sheet else "This card is not in dpbench's table.",
    )
    return Table(f"{ceilings.device}: measured ceilings", headers, cells, notes)
