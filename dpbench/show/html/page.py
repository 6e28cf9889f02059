"""Charts and tables as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dpbench.case import AXES
from dpbench.files import write_text
from dpbench.metrics import unit
from dpbench.registry import TRAINERS
from dpbench.results.rows import COLUMNS
from dpbench.show.html import charts, data, figures
from dpbench.show.html.busy import busy
from dpbench.show.html.data import UNMEASURED, Source
from dpbench.show.html.figures import CASE, Cell, Chart, DataTable, Material, Writer
from dpbench.show.html.roofline import against_logical, roofline
from dpbench.show.layout import ABSENT, gigabytes
from dpbench.show.tables import in_order
from dpbench.show.view import Column

Limits = Mapping[str, tuple[float, float]]
"""By metric, between which ratios to standard it is expected."""


def write_html(path: Path, sources: Sequence[Source], expected: Limits | None = None) -> None:
    """Write the page of some runs."""
    write_text(path, render(sources, expected))


def render(sources: Sequence[Source], expected: Limits | None = None) -> str:
    """The page of some runs.

    Everything from outside is escaped, and the page's own policy lets a browser run no script
    but the two that dpbench puts there, and fetch nothing.
    """
    material = Material.of(sources, expected)
    environment = Environment(
        loader=PackageLoader("dpbench.show.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    # As a browser reads a script, and its hash: with plain line ends.
    scripts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in _scripts()]
    return environment.get_template("report.html.j2").render(
        title=", ".join(source.label for source in sources),
        headline=headline(material),
        trainers=trainers(material),
        failures=failures(material.failed),
        charts=draw(material),
        cases=cases(material),
        rows=every_row(sources),
        environments=environments(sources),
        style=Markup(_template("report.css")),
        scripts=[*map(Markup, scripts)],
        hashes=[base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts],
    )


def draw(material: Material) -> list[Chart]:
    """Every chart of the page, in order."""
    return [
        charts.phases(material),
        charts.ratio_map(material),
        *(charts.ratio_along(material, axis) for axis in charts.AXES_OF_THE_GRID),
        charts.memory(material),
        *busy(material),
        roofline(material),
        against_logical(material),
    ]


def _scripts() -> list[str]:
    return [get_plotlyjs(), _template("report.js")]


def _template(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


# --- tables of text --------------------------------------------------------------------------


def headline(material: Material) -> list[str]:
    """What the page is about, in sentences: cases, devices, premises, failures."""
    summary = material.summary.drop_duplicates(["run", *AXES, "measured"])
    devices = sorted(set(material.summary.device[material.summary.measured]))
    found = {
        f"measured on {', '.join(devices)}": int(summary.measured.sum()),
        "counted without hardware": int((~summary.measured).sum()),
    }
    fates = Counter(map(figures.fate, material.failed.error))
    said = [(n, what) for what, n in (*found.items(), *sorted(fates.items())) if n]
    sentences = [f"{n} {'case' if n == 1 else 'cases'} {what}." for n, what in said]
    return sentences if len(summary) else ["No number was measured or counted.", *sentences]


def trainers(material: Material) -> DataTable:
    """By trainer: cases, how many have no result, smallest and largest ratio, peak memory."""
    summary, basis = material.summary, material.basis
    listed = [
        {**case, "failed": bool(case.get("error"))} for s in material.sources for case in s.cases
    ]
    each = pd.DataFrame(listed, columns=[*AXES, "failed"])
    each = each.groupby(list(AXES), sort=False).failed.any().reset_index()
    counts = each.groupby("trainer", sort=False).failed.agg(cases="size", failed="sum")
    ratios = data.ratios(summary, basis).groupby("trainer").ratio.agg(["min", "max"])
    peaks = data.memory_against_bytes(summary, basis).groupby("trainer").peak.max()
    table = counts.join(ratios).join(peaks).reset_index()
    table = table.iloc[table.trainer.map(TRAINERS.rank).argsort(kind="stable")]
    headers = {
        "trainer": "trainer",
        "cases": "cases",
        "failed": "without a result",
        "min": f"smallest {basis.name} ÷ standard",
        "max": f"largest {basis.name} ÷ standard",
        "peak": f"largest peak memory, GB ({basis.verb})",
    }
    return DataTable.of("Trainers", table, headers)


def cases(material: Material) -> DataTable:
    """Whole steps, one line per case and premise; failed cases with their error."""
    wide, failed = data.by_case(material.summary), material.failed
    numbers = {column.name: column for column in data.case_columns() if column.name in wide}
    if not failed.empty:
        # What was measured before a failure has its own line, any other case has one for it.
        keys = ["run", "title", *AXES]
        wide = pd.concat([wide, failed[[*keys, "device", "error"]]], ignore_index=True)
        wide["error"] = wide.groupby(keys).error.transform("first")
        empty = wide[[*numbers]].isna().all(axis=1) & wide.duplicated(keys, keep=False)
        wide = in_order(wide[~empty])
    premise = wide.measured.map({True: "measured", False: "counted"})
    headers = {
        **({"run": "run"} if wide.run.nunique() > 1 else {}),
        **CASE,
        "premise": "premise",
        **{name: _header(column) for name, column in numbers.items()},
        **({} if failed.empty else {"error": "error"}),
    }
    return DataTable.of(
        "One step of each case: means over the steps, medians of times; exact when pointed at",
        wide.assign(premise=premise.where(premise.notna(), ABSENT)),
        headers,
        **{name: _writer(column) for name, column in numbers.items()},
    )


def _header(column: Column) -> str:
    """The header of a column of the tables, on one line, with its unit."""
    header = column.header.replace("\n", " ")
    header = header.replace("÷ std", "÷ standard").replace("mem.", "memory")
    return f"{header}, GB" if _writer(column) is gigabytes else header


def _writer(column: Column) -> Writer:
    """How its numbers are written."""
    if column.kind != "value":
        return figures.times
    by_unit: dict[str, Writer] = {"B": gigabytes, "s": figures.milliseconds}
    return by_unit.get(unit(column.name), "{:.2f}".format)


def failures(failed: pd.DataFrame) -> DataTable | None:
    """The cases without a result and why, or None."""
    if failed.empty:
        return None
    headers = {"run": "run", **CASE, "error": "error", "message": "message"}
    return DataTable.of("Cases that failed or were skipped", in_order(failed), headers)


def every_row(sources: Sequence[Source]) -> DataTable:
    """The long table of all runs, exact; what is the same in all rows is in the caption."""
    frame = pd.concat([s.frame.assign(run=s.label) for s in sources], ignore_index=True)
    names = ["run", *COLUMNS]
    same = [n for n in names if n not in ("metric", "value") and frame[n].nunique() == 1]
    caption = "Every row of the runs, exact"
    if same and len(frame) > 1:
        caption += "; the same in all: " + ", ".join(f"{n} {frame[n].iloc[0]}" for n in same)
        names = [name for name in names if name not in same]
    headers = {name: name.replace("_", " ") for name in names}
    return DataTable.of(caption, frame, headers, value=figures.exact)


def environments(sources: Sequence[Source]) -> DataTable:
    """What each run was measured on and with, one column per run."""
    described = [dict(_about(source)) for source in sources]
    names = dict.fromkeys(name for about in described for name in about)
    rows = [
        [Cell(text, text) for text in (name, *(about.get(name, ABSENT) for about in described))]
        for name in names
    ]
    headers = ["", *(source.label for source in sources)]
    return DataTable("What it was measured on", headers, rows, [False] * len(headers))


def _about(source: Source) -> Iterator[tuple[str, str]]:
    for (instrument, device), rows in source.frame.groupby(["instrument", "device"], sort=True):
        how = "counted without hardware" if instrument == UNMEASURED else f"measured on {device}"
        yield f"rows of {instrument}", f"{len(rows)}, {how}: {'; '.join(sorted(set(rows.tool)))}"
    yield "cases", f"{len(source.cases)}, {len(source.failures)} without a result"
    yield from _flat(source.environment)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as name and text, e.g. ``gpu driver``."""
    for key, value in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif value is None:
            yield name, ABSENT
        elif str(key).endswith("_bytes") and isinstance(value, int | float):
            yield name.removesuffix(" bytes"), f"{gigabytes(value)} GB"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or ABSENT
        else:
            yield name, str(value)
