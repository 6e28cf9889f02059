"""The HTML page as text: what is in it, and that nothing from outside can act."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from dpbench.results.roofline import Roofs
from dpbench.results.run import Run
from dpbench.show.html import charts
from dpbench.show.html.data import PageData, labelled
from dpbench.show.html.figures import Chart, plain
from dpbench.show.html.page import cost, draw, render

ROOT = Path(__file__).parents[3]
GRID1: Any = Run.load(ROOT / "tests/data/saved/grid1.json").document
COUNTED: Any = Run.load(ROOT / "tests/data/logical-1b-bs8-seq256.json").document

TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")
HOSTILE = "</script><script>alert(1)</script><!--"


class Elements(HTMLParser):
    """Start tags of a page, its text outside scripts, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts.append(data)
        self.text.append(data)


def one_cell(document: dict[str, Any]) -> dict[str, Any]:
    keep = {"batch_size": 8, "seq_len": 256}.items()
    parts = {part: [r for r in document[part] if keep <= r.items()] for part in ("rows", "cases")}
    return {**document, **parts}


CELL = one_cell(GRID1)


def cell() -> dict[str, Any]:
    """The document of Grid 1 with one cell of it, to be changed."""
    return copy.deepcopy(CELL)


def material(*documents: dict[str, Any], **expected: tuple[float, float]) -> PageData:
    runs = labelled((f"run{place}", document) for place, document in enumerate(documents))
    return PageData(runs, expected) if expected else PageData(runs)


ALONE = material(CELL)


def drawn(chart: Callable[[PageData], Chart | None], of: PageData) -> Chart:
    found = chart(of)
    assert found is not None
    return found


def figures_of(chart: Chart) -> list[Any]:
    return [*chart.panels.values()]


def page_of(of: PageData) -> Elements:
    return Elements(render(of))


def test_every_chart_is_drawn_where_there_are_counts_too() -> None:
    charts = draw(material(GRID1, COUNTED))
    assert {chart.id: len(chart.panels) for chart in charts} == {
        "ratios": 4,
        "phases": 4,
        "times": 4,
        "time": 4,
    }
    assert charts[0].id == "ratios"  # the page's answer
    assert all(chart.table.exact for chart in charts)
    for figure in (figure for chart in charts for figure in figures_of(chart)):
        go.Figure(figure)  # refuses what plotly does not know


def with_busy_shares() -> dict[str, Any]:
    """A cell, and by CUPTI how busy its GPU was: at 10 % to clip, which took a fifth of a step."""
    document = cell()
    steps = [r for r in document["rows"] if r["metric"] == "samples_per_second"]
    shares = {"forward": (70, 70), "clip": (2, 20), "noise": (0, 1), "step": (72, 91)}
    for row in [r for r in steps if not r["repeat"]]:
        for phase, (busy, elapsed) in shares.items():
            by_cupti = {**row, "instrument": "cupti", "phase": phase, "unit": "1"}
            document["rows"] += [
                {**by_cupti, "metric": "gpu_busy_cycles", "value": float(busy)},
                {**by_cupti, "metric": "gpu_elapsed_cycles", "value": float(elapsed)},
                {**by_cupti, "metric": "range_time_seconds", "unit": "s", "value": 0.5},
            ]
        document["rows"].append(
            {**by_cupti, "metric": "step_time_seconds", "unit": "s"} | {"value": 0.5}
        )
    return document


def test_the_expected_range_is_said_below_the_bars() -> None:
    usual, own = (
        drawn(charts.bytes_by_phase, ALONE),
        drawn(charts.bytes_by_phase, material(CELL, dram_bytes=(1.0, 1.5))),
    )
    other = drawn(charts.bytes_by_phase, material(CELL, l2_served_bytes=(1.0, 1.5)))
    assert "Expected range: 2 to 5 times standard's bytes." in usual.table.notes[1]
    assert "Expected range: 1 to 1.5 times" in own.table.notes[1]
    assert len(other.table.notes) == 1


def test_ratios_of_bytes_time_and_memory_stand_side_by_side() -> None:
    [figure] = figures_of(drawn(charts.ratios, ALONE))
    bars = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    assert list(bars) == ["DRAM bytes", "time", "peak memory"]
    summary = ALONE.summary[ALONE.summary.phase == "step"].set_index(["metric", "trainer"]).ratio
    for name, metric in (("DRAM bytes", "dram_bytes"), ("time", "step_time_seconds")):
        assert bars[name]["y"] == ["dpsgd", "dpsgd_ghost", "dpsgd_fgc"]
        assert bars[name]["x"] == [summary[metric, trainer] for trainer in bars[name]["y"]]
        assert bars[name]["text"] == [f"{x:.2f}" for x in bars[name]["x"]]
    assert figure["layout"]["shapes"][0]["x0"] == 1


def test_a_steps_time_is_drawn_by_phase_and_as_long_as_it_took() -> None:
    [figure] = figures_of(drawn(charts.step_times, ALONE))
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    times = ALONE.summary[ALONE.summary.metric == "step_time_seconds"]
    steps = times[times.phase == "step"].set_index("trainer").value * 1e3
    longest = figure["layout"]["xaxis"]["range"][1]
    assert longest == pytest.approx(steps.max())
    whole = sum(bar["x"][bar["y"].index("dpsgd")] for bar in bars if "dpsgd" in bar["y"])
    assert whole == pytest.approx(steps["dpsgd"], rel=0.02)  # medians of phases


def test_what_time_is_made_of_is_drawn_in_milliseconds() -> None:
    chart = drawn(charts.time, material(with_busy_shares(), COUNTED))
    [figure] = figures_of(chart)
    bars = {trace["name"]: trace["x"] for trace in figure["data"] if trace["type"] == "bar"}
    assert list(bars) == ["step", "arithmetic", "bytes", "idle"]
    assert bars["step"] == [500.0] * 4
    assert bars["idle"] == pytest.approx([500 * (1 - 72 / 91)] * 4)
    assert all(part > 0 for parts in bars.values() for part in parts)
    lines = [dict(zip(chart.table.headers, line, strict=True)) for line in chart.table.cells]
    waits = [line for line in lines if line["bound"] == "launch-bound (10%)"]
    assert {line["phase"] for line in waits} == {"clip"}
    assert any("bounds overlap" in note for note in chart.table.notes)
    assert any("need not add up to 100%" in note for note in chart.table.notes)


def test_bounds_of_time_need_the_ceilings_of_the_card() -> None:
    document = cell()
    for row in document["rows"]:
        row["device"] = "NVIDIA L4"
    chart = drawn(charts.time, material(document, COUNTED))
    assert [*chart.panels, *chart.table.cells] == []
    assert "no measured ceilings of NVIDIA L4" in chart.table.notes[0]
    of_l4 = Roofs.of(["NVIDIA L4"], 3e11, {"fp32": 3e13, "tf32": 6e13, "bf16": 1e14}, "a test")
    own = replace(material(document, COUNTED), ceilings=of_l4)
    assert len(drawn(charts.time, own).panels) == 1


def test_text_from_outside_is_text() -> None:
    document = cell()
    document["environment"]["gpu"]["name"] = HOSTILE
    for row in document["rows"]:
        row["tool"] = HOSTILE
        if row["trainer"] == "dpsgd":
            row["trainer"] = HOSTILE
    for case in document["cases"]:
        if case["trainer"] == "dpsgd":
            case |= {"trainer": HOSTILE, "error": HOSTILE, "message": HOSTILE}
    page = Elements(render(PageData(labelled([(HOSTILE, document)]))))
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in page.tags]
    assert page.text.count(HOSTILE) > 10
    figures = json.loads(page.scripts[0])
    assert "alert(1)" in json.dumps(figures)


def test_plotly_reads_no_markup_in_names() -> None:
    assert plain("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    assert len(plain("x" * 100)) < 30


def test_page_fetches_nothing_and_runs_only_its_own_scripts() -> None:
    page = page_of(ALONE)
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    hashes = {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in page.scripts
    }
    assert len(allowed) == 2
    assert allowed <= hashes
    sources = [a.get("src") or a.get("href") for _, a in page.tags]
    assert all(source.startswith(("#", "data:")) for source in sources if source)


def test_the_page_begins_with_what_the_costliest_case_costs_and_where() -> None:
    said = cost(ALONE)
    assert said.startswith("1b fp32, batch 8 × sequence 256: dpsgd_fgc moves 4.9")
    assert "and takes 2." in said
    assert "of its bytes are in backward, by operators that were not counted (dpbench run" in said
    assert said in " ".join(page_of(ALONE).text)
    counted = cost(material(COUNTED))
    assert "and its time was not measured" in counted
    assert "No ratio of DRAM bytes" in cost(material(without("standard")))


def without(trainer: str) -> dict[str, Any]:
    parts = {part: [r for r in CELL[part] if r["trainer"] != trainer] for part in ("rows", "cases")}
    return {**CELL, **parts}
