"""Tables of a case's kernels, and of its phases compared with the roofline of the card."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from dpbench.results.kernels import KernelCount, category, kernel_table
from dpbench.results.outcome import Outcome
from dpbench.results.roofline import LAUNCH_BOUND, Roofs, known_roofs
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.summary import dram_bytes_of_step
from dpbench.show.groups import in_order, ordered, titled
from dpbench.show.layout import Shown, Table, gigabytes, milliseconds, step_milliseconds
from dpbench.show.tables import SHOWN_SHARE

NAME_WIDTH = 24
"""The width of the column of kernels, in characters. With it a table fits 80 characters."""


def kernel_tables(outcome: Outcome, summary: pd.DataFrame, top: int) -> list[Table]:
    """Tables of the kernels and their categories of a case, most DRAM bytes first.

    Empty if it was not profiled kernel by kernel. Shares are of the step's DRAM bytes if ranges
    measured them, else of the bytes of all kernels. Bandwidths are compared with the peak of the
    card, if its data sheet is known.

    Args:
        outcome: the case.
        summary: of its run.
        top: how many kernels are shown; categories are all shown.
    """
    if not (counts := outcome.kernels):
        return []
    of_case = summary[(summary.case == outcome.case) & summary.instrument.isin(outcome.by)]
    step_bytes = dram_bytes_of_step(of_case)
    device = next((row.device for row in outcome.rows if row.device != NO_HARDWARE), "")
    roofs = known_roofs(device)
    tables = []
    for by in (["kernel", "phase"], ["category"]):
        bandwidth = roofs.bandwidth if roofs else None
        table = kernel_table(counts, by, step_bytes=step_bytes, bandwidth=bandwidth)
        shown = table if by == ["category"] else table.head(top)
        count = f" (top {len(shown)} of {len(table)})" if len(shown) < len(table) else ""
        columns: dict[str, Shown] = {
            by[0]: (by[0], wrapped),
            **{key: (key, str) for key in by[1:]},
            "count": ("launches", "{:.0f}".format),
            "DRAM\nGB": ("dram_bytes", gigabytes),
            "ms": ("seconds", milliseconds),
            "share": ("share", "{:.1%}".format),
            "of\npeak": ("ceiling", "{:.0%}".format),
        }
        case = ", ".join(filter(None, (outcome.case.id, device)))
        title = f"{case}: bytes by {by[0]}{count}"
        tables.append(Table.of(title, shown.reset_index(), columns))
    return [*tables[:-1], replace(tables[-1], notes=tuple(_notes(counts, step_bytes, roofs)))]


def wrapped(name: str) -> str:
    """A kernel's name in lines that fit its column."""
    return textwrap.fill(name, NAME_WIDTH, drop_whitespace=False)


def _notes(
    counts: Sequence[KernelCount], step_bytes: float | None, roofs: Roofs | None
) -> Iterator[str]:
    total = sum(count.dram_bytes for count in counts) / len({count.repeat for count in counts})
    of = f"{gigabytes(total)} GB of all profiled kernels; the step itself was not measured"
    if step_bytes:
        of = f"step's {gigabytes(step_bytes)} GB, measured by ranges; all profiled kernels move "
        of += f"{total / step_bytes:.1%} of it"
    yield f"Share of the {of}. Copies and memsets are not kernels."
    yield "ms: the kernels' own time under the profiler, without the gaps between them."
    if roofs:
        yield (
            f"Of peak: DRAM bytes ÷ ms, as a share of the {roofs.bandwidth / 1e9:.4g} GB/s of "
            f"{roofs.name} ({roofs.source})."
        )
    strangers = {count.kernel for count in counts if category(count.name) is None}
    if strangers:
        yield f"No category fits: {', '.join(sorted(strangers))}."


def roofline_tables(table: pd.DataFrame, roofs: Roofs) -> list[Table]:
    """A table for each cell and kind of bytes. `results.roofline.under` makes its numbers."""
    tables = []
    for bytes_are, group in table.groupby("bytes_are", sort=False):
        for title, rows in titled(in_order(group)):
            known = {h: c for h, c in ROOFLINE_COLUMNS.items() if rows[c[0]].notna().any()}
            notes = [
                f"{roofs_in_words(roofs, rows.precision)} FLOP are counted, for matrix products "
                f"and attention. The least time of a step is the sum of its phases' least times.",
                *launch_bound_notes(rows),
            ]
            name = f"{title}: roofline of {bytes_are}"
            tables.append(phase_lines(name, rows, rows.least_seconds, known, notes))
    return tables


ROOFLINE_COLUMNS: dict[str, Shown] = {
    "TFLOP": ("flops", lambda operations: gigabytes(operations / 1e3)),
    "GB": ("bytes", gigabytes),
    "FLOP\n/ B": ("intensity", "{:.1f}".format),
    "bound": ("bound", str),
    "least\nms": ("least_seconds", step_milliseconds),
    "time\nms": ("seconds", step_milliseconds),
    "% of\nroof": ("share", "{:.0%}".format),
}
"""The columns of a roofline table. The last two have numbers only if the phase was timed."""


def phase_lines(
    title: str,
    rows: pd.DataFrame,
    weights: pd.Series[float],
    columns: Mapping[str, Shown],
    notes: Iterable[str],
) -> Table:
    """The step of each trainer, and below it the phases that matter.

    A phase matters if some trainer gives it at least `SHOWN_SHARE` of the largest weight.
    """
    matters = rows.phase[weights >= SHOWN_SHARE * weights.max()]
    lines = rows[rows.phase.isin([*matters, STEP])]
    lines = ordered(lines.assign(of_phase=lines.phase != STEP), ["trainer", "of_phase", "phase"])
    lines = lines.assign(name=lines.trainer.where(lines.phase == STEP, "· " + lines.phase))
    return Table.of(title, lines, {"trainer\n· phase": ("name", str), **columns}, notes)


def launch_bound_notes(rows: pd.DataFrame) -> Iterator[str]:
    """Notes: some phases are launch-bound, or for some trainers this is unknown."""
    if (rows.busy < LAUNCH_BOUND).any():
        yield (
            f"Launch-bound: the GPU was busy for less than {LAUNCH_BOUND:.0%} of the time (in "
            f"brackets); no bound explains the rest."
        )
    timed = rows[(rows.phase == STEP) & rows.seconds.notna()]
    if unknown := [*dict.fromkeys(timed[timed.busy.isna()].trainer)]:
        yield (
            f"How busy the GPU was with {', '.join(unknown)} is not known: some phases may be "
            f"launch-bound. --instrument cupti measures it."
        )


def roofs_in_words(roofs: Roofs, precisions: Iterable[str]) -> str:
    """A card's bandwidth, its peak arithmetic at some precisions, and its ridge points."""
    peaks = [
        f"{roofs.flops[name] / 1e12:.4g} TFLOP/s at {name}, which meet at "
        f"{roofs.ridge(name):.1f} FLOP/B"
        for name in dict.fromkeys(precisions)
        if name in roofs.flops
    ]
    roof = " and ".join(filter(None, [f"{roofs.bandwidth / 1e9:.4g} GB/s", " or ".join(peaks)]))
    return f"Roofs of {roofs.name}: {roof} ({roofs.source})."
