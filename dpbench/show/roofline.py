"""Roofs for people: what bounds each phase, and what a card reaches beside its data sheet."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dpbench.case import ALL_PHASES
from dpbench.results.cards import Ceilings, Roofs, known_roofs
from dpbench.results.rows import STEP
from dpbench.show.groups import by_cell, in_order
from dpbench.show.layout import Table, gigabytes, written
from dpbench.show.tables import SHOWN_SHARE


def roofline_tables(table: pd.DataFrame, roofs: Roofs) -> list[Table]:
    """What `dpbench.results.roofline.under` returned: a table per cell and kind of bytes."""
    return [
        Table(
            f"{title}: roofline of {premise}",
            _headers(rows),
            list(_lines(rows)),
            (_note(roofs, str(rows.precision.iloc[0])),),
        )
        for premise, group in table.groupby("bytes_are", sort=False)
        for title, rows in by_cell(in_order(group))
    ]


def _headers(rows: pd.DataFrame) -> list[str]:
    headers = ["trainer\n· phase", "TFLOP", "GB", "FLOP\n/ B", "bound by", "least\nms"]
    return [*headers, "time\nms", "% of\nroof"] if rows.seconds.notna().any() else headers


def _lines(rows: pd.DataFrame) -> Iterator[list[str]]:
    """For each trainer a line for the step, then one per phase that matters to any of them."""
    timed = rows.seconds.notna().any()
    matters = set(rows[rows.least_seconds >= SHOWN_SHARE * rows.least_seconds.max()].phase)
    for trainer, group in rows.groupby("trainer", sort=False):
        by_phase = {str(row["phase"]): row for row in group.to_dict("records")}
        for phase in (STEP, *ALL_PHASES):
            row = by_phase.get(phase)
            if row is None or phase not in matters:
                continue
            line = [
                str(trainer) if phase == STEP else f"· {phase}",
                gigabytes(row["flops"] / 1e3),
                gigabytes(row["bytes"]),
                written(row["intensity"], "{:.1f}".format),
                row["bound_by"],
                _milliseconds(row["least_seconds"]),
            ]
            if timed:
                line += [_milliseconds(row["seconds"]), written(row["share"], "{:.0%}".format)]
            yield line


def _milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, with one digit after the point or three in all."""
    style = "{:.1f}" if seconds >= 1e-4 else "{:.3g}"
    return written(seconds * 1e3, style.format)


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
