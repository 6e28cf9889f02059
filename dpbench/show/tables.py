"""The tables of steps, phases and throughputs of a run: groups of cases, titles and notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES, BASELINE_TRAINER, trained_in, unusual
from dpbench.core.metrics import METRICS, STANDARD, Metric, derived_name
from dpbench.core.registry import TRAINERS
from dpbench.core.subject import SCRIPT
from dpbench.results.conditions import ratio_notes
from dpbench.results.outcome import Outcome
from dpbench.results.roofline import BUSY, LAUNCH_BOUND, WAITS
from dpbench.results.rows import NO_HARDWARE, OF_CASE, STEP
from dpbench.show.layout import ABSENT, BYTES, Table, byte_unit, gigabytes, three_digits
from dpbench.show.view import (
    NAME,
    NO_TEST,
    OF_TESTS,
    PARAM,
    TableOptions,
    column,
    label_of,
    shown_by_default,
)

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""All axes but the trainer. A case has the same values of these axes as its baseline."""


UNCLEAR_ALONE = ("micro_batches", "activation_checkpointing", "gpus", "compile")
"""Axes whose values, such as ``2`` or ``on``, need the name of the axis in a label."""

WIDE_SPREAD = 0.1
"""If the longest and the shortest time of a step differ by more than this share of the value,
tables show both times instead of the value."""


@dataclass(frozen=True)
class Group:
    """Cases that share a table.

    Args:
        title: the beginning of the titles of the group's tables.
        frame: the rows of the cases, in the order of the table's lines. The column ``label`` names
            the case of a row.
        phase: the phase of the first table. The phase is `STEP` unless cases are grouped by phase.
        first_header: the header of the first column.
    """

    title: str
    frame: pd.DataFrame
    phase: str
    first_header: str

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The rows whose phase is `Group.phase`."""
        return self.frame[self.frame.phase == self.phase]

    @cached_property
    def numbers(self) -> dict[tuple[str, str], dict[str, tuple[Any, ...]]]:
        """For each phase and metric, a tuple (value, unit, spread, least, most) by label."""
        numbers: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = defaultdict(dict)
        columns = ["phase", "metric", "label", "value", "unit", "spread", "least", "most"]
        for phase, metric, label, *number in self.frame[columns].itertuples(index=False):
            numbers[phase, metric][label] = tuple(number)
        return numbers

    @cached_property
    def unit(self) -> str:
        """The unit of bytes in the group's tables, which fits the largest number: kB, MB or GB."""
        rows = self.shown[(self.shown.unit == "B") & self.shown.kind.isin(["value", "logical"])]
        return byte_unit(rows.value.max()) if len(rows) else "GB"

    def texts(self, shown: Metric, phase: str | None = None) -> dict[str, str]:
        """Return the texts of a column by label, without cases that lack the number."""
        numbers = self.numbers.get((phase or self.phase, shown.name), {})
        return {label: self._written(shown, *number) for label, number in numbers.items()}

    def _written(
        self, shown: Metric, value: float, unit: str, spread: float, least: float, most: float
    ) -> str:
        if unit == "B" and shown.form == "giga":
            return three_digits(value / BYTES[self.unit])
        if shown.form == "ms" and shown.kind == "value" and spread > WIDE_SPREAD:
            return "–".join(_WRITERS["ms"](end) for end in (least, most))
        return f"{value:.6g} {unit}" if shown.form == "as is" else _WRITERS[shown.form](value)

    def table(
        self,
        title: str,
        columns: Mapping[str, Mapping[str, str]],
        notes: Iterable[str] = (),
        labels: Iterable[str] | None = None,
    ) -> list[Table]:
        """Make a table with a line for each label.

        Args:
            title: the second part of the title, after the group's title.
            columns: for each header, the texts of the column by label.
            notes: the notes below the table.
            labels: the labels to show. If None, uses all labels with a text in some column.

        Returns:
            A list of one table, or an empty list if the table has no columns or lines.
        """
        cases = self.frame.label.unique()
        if labels is None:
            labels = [case for case in cases if any(case in texts for texts in columns.values())]
        cells = [[x, *(texts.get(x, ABSENT) for texts in columns.values())] for x in labels]
        headers = [self.first_header, *columns]
        table = Table(f"{self.title}: {title}", headers, cells, tuple(notes))
        return [table] if columns and cells else []


_WRITERS: dict[str, Callable[[float], str]] = {
    "ratio": "{:.2f}".format,
    "spread": "{:.2%}".format,
    "percent": "{:.0%}".format,
    "ms": lambda seconds: f"{seconds * 1e3:.1f}",
    "giga": gigabytes,
    "number": three_digits,
}


def in_order(summary: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by configuration and device, then by trainer in the order of registration.

    Rows with equal configuration, device and trainer keep their order.
    """
    return ordered(summary, [*CONFIGURATION, "device", "trainer"])


def ordered(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sort rows by columns.

    Trainers are in the order of registration, and phases in the order of a step.
    """
    phases = [*ALL_PHASES, STEP]

    def places(column: pd.Series[Any]) -> pd.Series[Any]:
        if column.name == "trainer":
            return column.map({name: TRAINERS.rank(name) for name in column.unique()})
        return column.map(phases.index) if column.name == "phase" else column

    return rows.sort_values(keys, key=places, kind="stable")


def titled(
    rows: pd.DataFrame, shared: Sequence[str] = CONFIGURATION
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Group rows by the axes ``shared`` and the device. Yield the title and rows of each group."""
    keys = [*shared, "device"]
    for values, group in rows.groupby(keys, sort=False):
        yield title_of(dict(zip(keys, values, strict=True))), group


def under_tests(
    summary: pd.DataFrame, outcomes: Iterable[Outcome], view: TableOptions
) -> pd.DataFrame:
    """Add a column to a summary for each label of tests by which the view groups cases.

    If several tests requested a case, the rows of the case are repeated for each test.
    """
    labels = [name for name in view.group_by if name in OF_TESTS or name.startswith(PARAM)]
    rows = [
        {**outcome.case.columns, "counted": name == "logical"}
        | {label: label_of(test, label) for label in labels}
        for outcome in outcomes
        for name in outcome.instruments
        for test in outcome.tests or [{"test": NO_TEST, "params": {}}]
    ]
    if not (rows and labels):
        return summary.assign(**dict.fromkeys(labels, NO_TEST))
    counted = summary.assign(counted=summary.instrument == "logical")
    tests = pd.DataFrame(rows).drop_duplicates()
    return counted.merge(tests, on=[*AXES, "counted"], how="left")


def groups(summary: pd.DataFrame, view: TableOptions) -> Iterator[Group]:
    """Yield the groups of a summary, with cases in the order that the view requests."""
    named = [k for name in view.group_by for k in (CONFIGURATION if name == "cell" else [name])]
    keys = list(dict.fromkeys([*(name for name in named if name != "device"), "device"]))
    always = ("trainer", "batch_size", "seq_len")
    labels = [
        axis
        for axis in (*AXES, *OF_CASE[1:])
        if axis not in keys and (axis in always or summary[axis].nunique() > 1)
    ] or ["trainer"]
    rows = ordered(in_order(summary), keys)
    prefixes = {"batch_size": "bs", "seq_len": "seq"}
    prefixes |= {axis: f"{axis}=" for axis in UNCLEAR_ALONE}
    prefixes |= {column: f"{column} " for column in labels if column not in AXES}
    parts = [
        (prefixes.get(axis, "") + rows[axis].astype(str)).where(rows[axis].astype(bool), "")
        for axis in labels
    ]
    rows = rows.assign(label=[" ".join(filter(None, names)) for names in zip(*parts, strict=True)])
    for values, group in rows.groupby(keys, sort=False):
        shared = dict(zip(keys, values, strict=True))
        # The title also names axes that are in no label, because these axes have one value each.
        shared |= {a: group[a].iloc[0] for a in AXES if a not in (*keys, *labels)}
        group = group.drop_duplicates(["label", "phase", "metric"])
        phase = str(shared.get("phase", STEP))
        if view.sort in AXES:
            group = ordered(group, [view.sort])
        elif view.sort == NAME:
            group = group.sort_values("label", kind="stable")
        elif view.sort is not None:
            by = column(view.sort)
            sorting = group[(group.metric == by.name) & (group.phase == phase)]
            places = group.label.map(sorting.set_index("label").value)
            group = group.loc[places.sort_values(kind="stable").index]
        yield Group(title_of(shared), group, phase, "trainer" if labels == ["trainer"] else "case")


def title_of(shared: Mapping[str, Any]) -> str:
    """Make a title from the axes, tests, phase and device that rows share."""
    return ", ".join([*title_parts(shared), shared["device"] or "unknown device"])


def title_parts(shared: Mapping[Any, Any]) -> list[str]:
    """Return the parts of `title_of`, without the device."""
    if shared.get("workload") == SCRIPT:
        batch = f"batch {shared['batch_size']}" if shared.get("batch_size") else ""
        return [*filter(None, (shared.get("trainer"), batch))]
    size = " ".join(filter(None, (trained_in(shared), shared.get("precision"))))
    of_test = [str(shared[k]) for k in shared if k in OF_TESTS or str(k).startswith(PARAM)]
    parts = [*of_test, shared.get("trainer", ""), size]
    usual = {"attention": "sdpa", "model": "simple"}
    parts += [shared[axis] for axis, name in usual.items() if shared.get(axis) not in (name, None)]
    parts += [f"{axis.replace('_', ' ')} {value}" for axis, value in unusual(shared).items()]
    words = {"batch_size": "batch", "seq_len": "sequence", "phase": "phase"}
    parts += [f"{word} {shared[axis]}" for axis, word in words.items() if shared.get(axis)]
    return [*filter(None, parts)]


# --- tables ----------------------------------------------------------------------------------

SHOWN_SHARE = 1e-3
"""A phase is shown if its value exceeds this share of the largest value of any phase or step."""

EVEN_SHARE = 0.05
"""A note names the case in which ranks differ most, if the largest value of a rank exceeds the mean
over ranks by more than this share. A phase is ignored if its value is at most this share of the
largest value of any phase or step."""

BUSY_OF = (
    "Busy: the time in which the GPU did anything, as a share of the time of the step or phase "
    "without profiling. If a phase was not timed, the time between synchronizations is "
    "used instead."
)

OF_ONE_RANK = (
    "One rank ÷ one GPU is 1 ÷ ranks if the ranks divide the work, and 1 if each rank does all of "
    "the work."
)

AGAINST_LOGICAL = (
    "Logical bytes are counted without hardware: each operator reads its inputs once and writes "
    "its outputs once.",
    "Above 1, DRAM moves some bytes more than once. Below 1, the L2 cache keeps some bytes.",
)


def tables(
    summary: pd.DataFrame, view: TableOptions | None = None, outcomes: Iterable[Outcome] = ()
) -> list[Table]:
    """Make the tables of a summary, first of each group, then of counters with ncu's own names.

    If the view names columns, each group has just one table, which has the named columns.

    Args:
        summary: the summary of a run.
        view: the options of the tables.
        outcomes: the outcomes of the run, which have the labels of trainers and the tests.
    """
    other_tables = [metric.name for metric in METRICS.values() if metric.table]
    summary = summary[~summary.metric.isin(other_tables) & ~summary.of.isin(other_tables)]
    summary = summary[summary.preferred & summary.value.notna()]
    if summary.empty:
        return []
    view, outcomes = view or TableOptions(), list(outcomes)
    summary = under_tests(summary, outcomes, view)
    listed: list[Table] = []
    for group in groups(summary, view):
        columns = _columns(group, view)
        in_bytes = any(c.kind == "value" and c.unit == "B" for c in columns)
        listed += group.table(
            f"{group.unit} per step" if in_bytes else "per step",
            {_header(shown, view): group.texts(shown) for shown in columns},
            [*_notes(group, columns, view), *_about_outcomes(group, columns, view, outcomes)],
            group.shown.label.unique(),
        )
        if not (view.columns or "phase" in view.group_by):
            listed += _phase_table(group, "dram_bytes", f"DRAM {group.unit}", view)
            listed += _phase_table(group, "logical_bytes", f"logical {group.unit}", view)
            if (group.frame.workload == SCRIPT).any():
                listed += _phase_table(group, "step_time_seconds", "ms", view)
            listed += [*_one_gpu_table(group, columns), *_busy_table(group)]
            listed += [*against_logical(group), *_throughput_table(group)]
    return listed if view.columns else [*listed, *_other_metrics(in_order(summary))]


# --- the step --------------------------------------------------------------------------------


def _columns(group: Group, view: TableOptions) -> list[Metric]:
    """Return the columns of a group's first table.

    If the user requested columns, these columns are returned, or no columns if all of them are
    empty. Without a request, the default columns are returned, with ratios first. If the view
    groups by phase or the group has no bytes, default columns without a number are left out, and
    ratios do not come first.
    """
    logical = bool((group.shown.device == NO_HARDWARE).any())
    chosen = view.columns or shown_by_default(logical=logical)
    if not view.columns:  # show the known parts of a sum if the sum is unknown
        parts = [METRICS[p] for c in chosen if not group.texts(c) for p in c.parts]
        chosen = [*(part for part in parts if group.texts(part)), *chosen]
    filled = [shown for shown in chosen if group.texts(shown)]
    if view.columns:
        return list(chosen) if filled else []
    if "phase" in view.group_by or not any(c.unit == "B" and c.adds_up for c in filled):
        return filled
    # An empty column is shown only if its metric is usually known. Some chips or instruments lack
    # busy shares and metrics from outside dpbench. A single rank sends no bytes to other ranks.
    usual = METRICS.built_in - {BUSY, "collective_bytes"}
    if (group.frame.workload == SCRIPT).all() and not any(c.kind == "ratio" for c in filled):
        chosen = [c for c in chosen if c.kind != "ratio"]  # no --baseline was given
    kept = [c for c in chosen if c in filled or (c.of or c.name) in usual]
    return sorted(kept, key=lambda shown: shown.kind != "ratio")


def _header(shown: Metric, view: TableOptions) -> str:
    """Return a column's header. The header of a ratio names a baseline that is not `standard`."""
    if view.baseline == BASELINE_TRAINER:
        return shown.heading
    return shown.heading.replace(STANDARD, f"÷ {view.baseline}")


def _notes(group: Group, columns: list[Metric], view: TableOptions) -> Iterator[str]:
    rows, names = group.shown, {column.name for column in columns}
    ratios = {c.of for c in columns if c.kind == "ratio"}
    known = rows.groupby("label", sort=False).has_baseline.any()
    not_measured = f"the {view.baseline!r} trainer was not measured for"
    if ratios and not known.any() and (rows.workload == SCRIPT).all():
        if view.baseline == BASELINE_TRAINER:
            yield "No ratio: name the saved run of another script with --baseline NUM or FILE."
    elif ratios and not known.any():
        one_case = len(rows[CONFIGURATION].drop_duplicates()) == 1
        yield f"No ratio: {not_measured} {'this case' if one_case else 'these cases'}."
    elif ratios and not known.all():
        yield f"No ratio for {', '.join(known.index[~known])}: {not_measured} these cases."
    for metric, (_, high) in view.expected.items():
        ratio_rows = rows[(rows.metric == derived_name(metric)) & (rows.trainer != view.baseline)]
        if metric in ratios and group.phase == STEP and len(ratio_rows):
            above = ratio_rows[ratio_rows.value > high]
            listed = ", ".join(f"{row.label} {row.value:.2f}" for row in above.itertuples())
            if listed:
                name = METRICS[metric].short_header
                yield f"{name}: above {high:g} × {view.baseline}, the limit of --expect: {listed}."
    if (ranks := rows.ranks.max()) > 1:
        how = "counts are sums, times and peaks are maxima, shares and sent bytes are means"
        yield f"Over {ranks:.0f} ranks: {how}."
    elif ((rows.device == NO_HARDWARE) & (rows.gpus > 1)).any():
        yield "Only the first rank of each case is counted, so no number is a sum over ranks."
    lowered = rows[(rows.metric == "step_time_seconds") & (rows.lowered != "")]
    if len(lowered):
        listed = "; ".join(f"{row.label} by {row.lowered}" for row in lowered.itertuples())
        yield f"WARNING: clocks were lowered: {listed}."
    if uneven := [*_uneven(group, columns)]:
        yield f"Ranks differ, largest ÷ mean: {', '.join(uneven)}."
    if not any(c.kind == "spread" for c in columns) and (spreads := [*_spreads(group, columns)]):
        yield f"Largest spread, (max - min) / value: {', '.join(spreads)}."
    if rows.in_cache.any() and any(name.startswith("dram_") for name in names):
        yield "WARNING: at this size much of the data stays in the L2 cache: DRAM ratios mislead."
    waits = rows[(rows.metric == BUSY) & (rows.value < WAITS) & (rows.trainer == view.baseline)]
    if derived_name("step_time_seconds") in names and group.phase == STEP and len(waits):
        yield (
            f"In a step of {view.baseline} the GPU waits for Python {1 - waits.value.min():.0%} of "
            f"the time, so ratios of time depend on the CPU."
        )
    idle = rows[(rows.metric == BUSY) & (rows.value < LAUNCH_BOUND)]
    if BUSY in names and group.phase == STEP and len(idle):
        yield (
            f"Busy below {LAUNCH_BOUND:.0%}: the step of {', '.join(idle.label)} is launch-bound, "
            f"so bytes do not explain its time."
        )


def _one_gpu_table(group: Group, columns: list[Metric]) -> list[Table]:
    """Make a table of ratios: a number on several GPUs divided by the number on one GPU.

    Both numbers have the same trainer and the same batch.
    """
    values = [each for each in columns if each.kind == "value"]
    texts = {c.heading: group.texts(column(derived_name(c.name, "over_one_gpu"))) for c in values}
    notes = [OF_ONE_RANK] if (group.frame.device == NO_HARDWARE).any() else []
    return group.table("÷ one GPU, same batch", {h: t for h, t in texts.items() if t}, notes)


def _about_outcomes(
    group: Group, columns: list[Metric], view: TableOptions, outcomes: Sequence[Outcome]
) -> Iterator[str]:
    if any(shown.kind == "ratio" for shown in columns):
        here = {*group.shown.case}
        yield from ratio_notes([o for o in outcomes if o.case in here], view.baseline)
    yield from _differing_labels(group, outcomes)


def _differing_labels(group: Group, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a note for each value of a label that only some trainers of a table have."""
    rows = group.shown
    shown = dict(zip(rows.case, rows.label, strict=True))
    labels: dict[str, dict[str, list[str]]] = {}
    for outcome in outcomes:
        if row := shown.get(outcome.case):
            for name, value in outcome.labels.items():
                labels.setdefault(name, {}).setdefault(value, []).append(row)
    for name, values in labels.items():
        ordered = sorted(values, key=lambda value: -len(values[value]))
        # A trainer's labels are compared with those of others. A script has few labels, or none.
        for value in ordered[int((rows.workload != SCRIPT).all()) :]:
            yield f"Only {', '.join(dict.fromkeys(values[value]))}: {name} {value}."


def _spreads(group: Group, columns: list[Metric]) -> Iterator[str]:
    """Yield the largest spread in each column, with the case and the number of the case's steps."""
    for shown in (each for each in columns if each.spread):
        rows = group.shown[group.shown.metric == derived_name(shown.name, "spread")]
        if len(rows):
            worst = rows.sort_values("value", ascending=False, kind="stable").iloc[0]
            name = shown.heading.replace("\n", " ").removesuffix(" ms")
            yield f"{name} {worst.value:.2%} ({worst.label}, {worst.steps:.0f} steps)"


def _uneven(group: Group, columns: list[Metric]) -> Iterator[str]:
    """Yield, for each column in which ranks differ, the case and phase that differ most."""
    for shown in (each for each in columns if each.kind == "value"):
        rows = group.frame[group.frame.metric == shown.name]
        rows = rows[rows.value > EVEN_SHARE * rows.value.max()]
        rows = rows[rows.imbalance > 1 + EVEN_SHARE]
        if len(rows):
            worst = rows.sort_values("imbalance", ascending=False, kind="stable").iloc[0]
            name = shown.heading.replace("\n", " ").removesuffix(" ms")
            yield f"{name} {worst.imbalance:.2f} ({worst.label}, {worst.phase})"


# --- phases ----------------------------------------------------------------------------------


def _phases_shown(group: Group, metric: str) -> list[str]:
    """Return the phases in which a case exceeds `SHOWN_SHARE` times the metric's largest value."""
    most = _most_by_phase(group, metric)
    return [phase for phase in ALL_PHASES if most.get(phase, 0.0) > most.max() * SHOWN_SHARE]


def _most_by_phase(group: Group, metric: str) -> pd.Series[float]:
    return group.frame[group.frame.metric == metric].groupby("phase").value.max()


def _phase_table(group: Group, metric: str, name: str, view: TableOptions) -> list[Table]:
    """Make a table of a metric by case and phase, with ratios to the baseline in each phase."""
    columns, most, divided = {}, _most_by_phase(group, metric), ""
    shown = _phases_shown(group, metric)
    small = [name for name in ALL_PHASES if name not in shown and most.get(name, 0.0) > 0]
    notes = [f"Below {SHOWN_SHARE:.1%} and not shown: {', '.join(small)}."] if small else []
    for phase in shown:
        if ratios := group.texts(column(derived_name(metric)), phase):
            divided = f" (÷ {view.baseline})"
        values = group.texts(column(metric), phase)
        columns[phase] = {x: f"{v} ({ratios[x]})" if x in ratios else v for x, v in values.items()}
    return group.table(f"{name} by phase{divided}", columns, notes)


def _busy_table(group: Group) -> list[Table]:
    """Make a table of the share of time in which the GPU was busy, by case and phase."""
    phases = _phases_shown(group, "gpu_elapsed_cycles")
    columns = {phase: group.texts(column(BUSY), phase) for phase in (*phases, STEP) if phases}
    return group.table("busy by phase", columns, [BUSY_OF])


def against_logical(group: Group) -> list[Table]:
    """Make a table of measured DRAM bytes divided by logical bytes, for cases that have both.

    A line has the measured and the logical bytes of the step, and the quotients of each phase and
    of the step.
    """
    dram, over = column("dram_bytes"), column("dram_over_logical")
    phases = (*_phases_shown(group, "dram_bytes"), STEP)
    quotients = {phase: group.texts(over, phase) for phase in phases}
    logical = group.texts(column("dram_logical"), STEP)
    bytes_of = {f"DRAM\n{group.unit}": group.texts(dram, STEP), f"logical\n{group.unit}": logical}
    known = set().union(*quotients.values())
    labels = [label for label in group.frame.label.unique() if label in known]
    return group.table("DRAM measured ÷ logical", bytes_of | quotients, AGAINST_LOGICAL, labels)


# --- throughput and other counters -----------------------------------------------------------


def _throughput_table(group: Group) -> list[Table]:
    every = METRICS.every().values()
    rates = [rate for rate in every if rate.kind == "throughput" and METRICS[rate.of].throughput]
    columns = {METRICS[r.of].heading: texts for r in rates if (texts := group.texts(r, STEP))}
    notes = ["Bytes of hardware counters ÷ time of unprofiled steps."]
    return group.table("GB/s", columns, notes)


def _other_metrics(summary: pd.DataFrame) -> list[Table]:
    """Make a table of the counters that the user requested by ncu's own names, in ncu's units."""
    own = summary[summary.metric.str.contains("__") & (summary.phase == STEP)]
    cells = [
        [row["case"].id, str(row["metric"]), f"{row['value']:.6g} {row['unit']}"]
        for row in own.to_dict("records")
        if column(row["metric"]).kind == "value"
    ]
    return [Table("Other counters, per step", ["case", "counter", "value"], cells)] if cells else []
