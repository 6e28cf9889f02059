"""The HTML page, with charts and tables in one file that needs no other file."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import resources

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Subject, subject_from
from dpbench.results.changes import kernel_changes, operator_changes
from dpbench.results.conditions import differing_conditions
from dpbench.results.gate import Comparison, Gate
from dpbench.results.outcome import trainer_summary
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run
from dpbench.show.comparison import amount, change_cells, change_text, comparison_tables
from dpbench.show.html.charts import (
    bytes_by_phase,
    flames,
    ratios,
    step_times,
    time,
)
from dpbench.show.html.data import BYTES, KEYS, MEASURED, PageData, labelled, pivot
from dpbench.show.html.figures import NAMES, Chart, cells, times
from dpbench.show.layout import ABSENT, Shown, Table, gigabytes, step_milliseconds, written
from dpbench.show.outputs import labels_of, trainer_table
from dpbench.show.profile import kernel_tables, recorded_tables
from dpbench.show.view import TableOptions, column

MOST = 20
"""The most lines in a table of kernels."""

COUNTS = "dpbench run --instrument logical counts them, without a GPU"


def page(runs: Sequence[Run], view: TableOptions) -> str:
    """Draw the page of runs. This is the output for ``.html``."""
    for run in runs:
        if not run.outcomes:
            raise ConfigurationError(f"{run.path} has no case, so there is nothing to draw")
    named = labelled((run.name, run.document) for run in runs)
    return render(PageData(named, view.expected, view.ceilings))


def render(data: PageData) -> str:
    """Return the page as HTML.

    Names and other text from runs are escaped. The content security policy of the page lets a
    browser run only the two scripts of the page, and forbids requests to other addresses.
    """
    runs = data.runs
    changed = changes(runs)
    return _template().render(
        title=", ".join(run.name for run in runs),
        answers=[each.answer for each in changed] or [cost(data)],
        headline=headline(data),
        steps=steps(data),
        changes=changed,
        charts=draw(data),
        trainers=trainers(runs),
        recorded=recorded(runs),
        environments=environments(runs),
    )


@cache
def _template() -> Template:
    """Load the template with its style and scripts."""
    environment = Environment(
        loader=PackageLoader("dpbench.show.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates = resources.files(__package__) / "templates"
    script = (templates / "report.js").read_text(encoding="utf-8")
    # Browsers hash the text of a script after converting all line ends to \n.
    scripts = [s.replace("\r\n", "\n").replace("\r", "\n") for s in (get_plotlyjs(), script)]
    environment.globals |= {
        "style": Markup((templates / "report.css").read_text(encoding="utf-8")),
        "scripts": [*map(Markup, scripts)],
        "hashes": [base64.b64encode(sha256(s.encode()).digest()).decode() for s in scripts],
    }
    return environment.get_template("report.html.j2")


def draw(data: PageData) -> list[Chart]:
    """Draw all charts of the page, in order."""
    functions = (ratios, bytes_by_phase, step_times, time, flames)
    return [chart for function in functions if (chart := function(data))]


def cost(data: PageData) -> str:
    """Say in a sentence what the case with the highest ratio of bytes costs, and where."""
    most, what = data.ratios.nlargest(1, "ratio"), f"{data.bytes_name} bytes"
    if most.empty:
        return f"No ratio of {what} is known, because no case was run with {data.baseline}, too."
    [(cell, _)], [case] = cells(most), most.to_dict("records")
    own = data.summary.merge(most[KEYS])
    timed = own[(own.metric == "step_time_seconds") & (own.phase == STEP)].ratio.dropna()
    took = [*map("takes {:.2f} times its time".format, timed), "its time was not measured"]
    said = f"{case['trainer']} moves {case['ratio']:.2f} times the {what} of {case['baseline']}"
    by_phase = own[(own.metric == case["metric"]) & (own.phase != STEP)].nlargest(1, "value")
    where = [
        f"; {each['value'] / case['value']:.0%} of its bytes are in {each['phase']}, "
        + _operator(data.runs, case["case"], each["phase"])
        for each in by_phase.to_dict("records")
    ]
    return "".join([f"{cell}: {said}, and {took[0]}", *where, "."])


def _operator(runs: Sequence[Run], case: Subject, phase: str) -> str:
    """Name the operator that moves the most counted bytes in a phase of a case."""
    sizes: Counter[str] = Counter()
    for outcome in (each for run in runs for each in run.outcomes if each.case == case):
        for count in outcome.operators:
            sizes[count.operator] += int(count.total_bytes) * (count.phase == phase)
    [(name, size)] = sizes.most_common(1) or [("", 0)]
    return f"most by {name}" if size else f"by operators that were not counted ({COUNTS})"


def headline(data: PageData) -> list[str]:
    """Write three numbers of cases: measured, counted without hardware, and failed."""
    cases = data.summary.drop_duplicates(["run", "case", "basis"])
    measured = cases[cases.basis == MEASURED]
    counts = {
        f"measured on {', '.join(sorted(set(measured.device)))}": len(measured),
        "counted without hardware": len(cases) - len(measured),
        "failed": len(data.failed),
    }
    sentences = [f"{n} {'case' if n == 1 else 'cases'} {what}." for what, n in counts.items() if n]
    return sentences if len(cases) else ["No number was measured or counted.", *sentences]


def trainers(runs: Sequence[Run]) -> Table:
    """Make the table of successful and failed cases of each trainer.

    The notes of the table are the reasons of failures, and the labels of trainers, such as ``clips
    flat``.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    notes = [f"{name}: {text}." for name, text in labels_of(outcomes).items() if text]
    return trainer_table(trainer_summary(outcomes), notes)


def steps(data: PageData) -> Table:
    """Make the table of whole steps. Measured and counted numbers of a case have separate lines.

    All metrics that a project or a package adds are columns.
    """
    wide = pivot(data.summary[data.summary.phase == STEP], "metric")
    numbers: dict[str, Shown] = {}
    every, ours = METRICS.every().values(), METRICS.built_in
    usual = [m for m in every if "value" in m.shown or not (m.of or m.name in ours)]
    listed = dict.fromkeys(c for c in (*usual, column("samples_per_second")) if c.name in wide)
    for shown in sorted(listed, key=lambda shown: shown.kind != "ratio"):
        header = shown.heading.replace("\n", " ").replace("mem.", "memory")
        header = header.replace("÷ std", f"÷ {data.baseline}")
        plain = times if shown.kind == "ratio" else "{:.2f}".format
        write = {"B": gigabytes, "s": step_milliseconds}.get(shown.unit, plain)
        numbers[f"{header}, GB" if shown.unit == "B" else header] = (shown.name, write)
    run: dict[str, Shown] = {"run": ("run", str)} if wide.run.nunique() > 1 else {}
    both: dict[str, Shown] = {"basis": ("basis", str)} if wide.basis.nunique() > 1 else {}
    known = wide.dropna(subset=[name for name, _ in numbers.values()], how="all")
    names = {h: s for h, s in NAMES.items() if h == "trainer" or known[s[0]].nunique() > 1}
    columns: dict[str, Shown] = {**run, **names, **both, **numbers}
    title = (
        "One step of each case: means over the steps, or medians for times; point at a number for "
        "all digits"
    )
    return Table.of(title, known, columns)


def recorded(runs: Sequence[Run]) -> list[Table]:
    """Make the tables of profilers and of kernels, as a terminal shows them."""
    return [
        replace(table, title=f"{run.name}: {table.title}" if len(runs) > 1 else table.title)
        for run in runs
        for table in (
            *recorded_tables(run.summary, run.frame),
            *(each for o in run.outcomes for each in kernel_tables(o, run.summary, MOST)),
        )
    ]


def environments(runs: Sequence[Run]) -> Table:
    """Make the table of devices, tools and settings, with a column for each run."""
    about = {run.name: dict(_about(run)) for run in runs}
    columns: dict[str, Shown] = {name: (name, str) for name in ("", *about)}
    table = pd.DataFrame(about, dtype=object).rename_axis("").reset_index()
    return Table.of("Devices, software and settings", table, columns)


def _about(run: Run) -> Iterator[tuple[str, str]]:
    for (instrument, device), rows in run.frame.groupby(["instrument", "device"], sort=True):
        how = "counted without hardware" if device == NO_HARDWARE else f"measured on {device}"
        yield f"rows of {instrument}", f"{len(rows)}, {how}: {'; '.join(sorted(set(rows.tool)))}"
    failures = sum(bool(outcome.error) for outcome in run.outcomes)
    cases = f"{len(run.outcomes)}, {failures} without a result"
    flat = pd.json_normalize({"cases": cases, **run.environment, **run.session}, sep=" ")
    for name, value in flat.to_dict("records")[0].items():
        words = str(name).replace("_", " ")
        if isinstance(value, list):
            yield words, ", ".join(map(str, value)) or ABSENT
        elif words.endswith(" bytes") and isinstance(value, int | float):
            yield words.removesuffix(" bytes"), f"{gigabytes(value)} GB"
        else:
            yield words, written(value, str)


# --- what changed ----------------------------------------------------------------------------

MOST_LINES = 60
"""The most operators and kernels in a list."""

SMALLEST_CHANGE = 0.001
"""A change of at most this share of the largest change is left out."""


@dataclass(frozen=True)
class Changes:
    """The changes from one run to another.

    Args:
        title: the names of the two runs.
        answer: the change of a step in one sentence.
        grown: the operators and kernels whose bytes changed most.
        steps: tables that compare the metrics of whole steps.
        differences: other differences, such as versions, settings, code and machine.
    """

    title: str
    answer: str
    grown: Table
    steps: Sequence[Table]
    differences: Sequence[str]


def changes(runs: Sequence[Run]) -> list[Changes]:
    """Return the changes from the first run to each later run with numbers of the same cases."""
    return [found for after in runs[1:] if (found := _changes(runs[0], after))]


def _changes(before: Run, after: Run) -> Changes | None:
    found = Gate(before, after).compare()
    if found.changes.empty:
        return None
    differences = [printable(each) for each in differing_conditions(before, after)]
    title = f"{before.name} → {after.name}"
    steps = comparison_tables(found)
    return Changes(title, _answer(title, found), _grown(before, after), steps, differences)


def _answer(title: str, found: Comparison) -> str:
    """Say by how much the bytes of a step changed most, or its time if no bytes are known."""
    rows = found.changes[found.changes.phase == STEP].dropna(subset="relative")
    by_metric = (rows[rows.metric == name] for name in (*BYTES.values(), "step_time_seconds"))
    steps = next((each for each in by_metric if len(each)), rows)
    if steps.empty:
        return f"{title}: no number of a step is known in both runs."
    most = steps.sort_values("relative", key=abs).to_dict("records")[-1]
    metric, _, old, new, relative, _ = change_cells(most)
    what = metric.replace("_", " ").removesuffix(" seconds")
    said = f"{title}: the {what} of {subject_from(most).id} changed by {relative}, {old} → {new}"
    largest = [f"; most by {change_text(each)}" for each in found.largest[:1] if most["change"]]
    return "".join([said, *largest, "."])


def _grown(before: Run, after: Run) -> Table:
    """List the operators and kernels whose bytes changed most, for cases that both runs have."""
    frames = [frame for frame in _by_case(before, after) if len(frame)]
    found = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"change": []})
    found = found.sort_values("change", key=abs, ascending=False, kind="stable")
    found = found[found.change.abs() > SMALLEST_CHANGE * found.change.abs().max()].head(MOST_LINES)
    if found.empty:
        why = "No operator or kernel with changed bytes is known in the cases of both runs."
        return Table("What changed most", [], [], (why,))
    found = found.assign(relative=(found.change / found.before).where(found.before > 0))
    columns: dict[str, Shown] = {
        "change": ("change", lambda size: f"{'+' if size > 0 else '-'}{amount(abs(size), 'B')}"),
        "by": ("relative", "{:+.1%}".format),
        "phase": ("phase", str),
        "operator or kernel": ("name", str),
        "module": ("module", str),
        "line": ("line", str),
        "before": ("before", lambda size: amount(size, "B")),
        "after": ("after", lambda size: amount(size, "B")),
        "case": ("case", str),
    }
    return Table.of("What changed most", found, columns)


def _by_case(before: Run, after: Run) -> Iterator[pd.DataFrame]:
    cases = {outcome.case for outcome in before.outcomes}
    for case in dict.fromkeys(each.case for each in after.outcomes if each.case in cases):
        for found in (operator_changes(before, after, case), kernel_changes(before, after, case)):
            yield found.assign(case=case.id)
