"""Pages of runs that lack something: counts, a baseline, a data sheet, results."""

from __future__ import annotations

from dpbench.results.run import Run
from dpbench.show.html import charts
from dpbench.show.html.page import cost, draw, render
from tests.show.html.test_html_page import (
    ALONE,
    COUNTED,
    ROOT,
    TRAINERS,
    cell,
    drawn,
    figures_of,
    material,
    page_of,
)


def test_a_page_without_counts_says_what_it_lacks() -> None:
    assert {chart.id for chart in draw(ALONE)} == {"ratios", "phases", "times", "time"}
    assert "dpbench run --instrument logical counts them" in cost(ALONE)


def test_phases_that_were_not_timed_have_no_time_breakdown() -> None:
    document = cell()
    document["rows"] = [r for r in document["rows"] if r["metric"] != "step_time_seconds"]
    assert charts.time(material(document, COUNTED)) is None


def test_what_nsight_systems_recorded_is_a_section_of_its_own() -> None:
    page = page_of(material(Run.load(ROOT / "tests/data/saved/nsys.json").document)).text
    title = "dpsgd, 1b bf16, batch 8, sequence 256, NVIDIA H200: Nsight Systems, per step"
    assert {"Recorded by profilers", title} <= {*page}
    assert "Recorded by profilers" not in page_of(ALONE).text


def test_zero_bytes_make_a_page() -> None:
    document = cell()
    for row in document["rows"]:
        row["value"] = 0.0
    assert "NaN" not in "".join(page_of(material(document)).scripts[:1])


def test_bytes_that_stay_in_the_cache_come_with_a_warning() -> None:
    small = cell()
    for row in small["rows"]:
        row["value"] /= 1e6
    assert charts.IN_CACHE in drawn(charts.bytes_by_phase, material(small)).table.notes
    assert charts.IN_CACHE not in drawn(charts.bytes_by_phase, ALONE).table.notes


def test_counted_runs_say_so_in_every_chart() -> None:
    chart = drawn(charts.bytes_by_phase, material(COUNTED))
    assert chart.table.title.startswith("Logical bytes")
    assert "not measured" in chart.basis
    assert figures_of(chart)[0]["layout"]["xaxis"]["title"]["text"] == (
        "logical GB per step (counted)"
    )


def test_case_without_a_result_stands_where_its_bar_would() -> None:
    error = "CaseOutOfMemory"
    document = cell()
    document["rows"] = [r for r in document["rows"] if r["trainer"] != "dpsgd"]
    for case in document["cases"]:
        if case["trainer"] == "dpsgd":
            case |= {"error": error, "message": "Tried to allocate 61 GiB"}
    [figure] = figures_of(drawn(charts.bytes_by_phase, material(document)))
    labels = figure["data"][-1]
    assert dict(zip(labels["y"], labels["text"], strict=True))["dpsgd"] == f" failed: {error}"
    page = page_of(material(document))
    assert f"{error}: Tried to allocate 61 GiB" in page.text
    assert "1 case failed." in "".join(page.text)


def test_a_case_that_failed_in_two_runs_is_said_once() -> None:
    document = cell()
    document["rows"] = [r for r in document["rows"] if r["trainer"] != "dpsgd"]
    for case in document["cases"]:
        if case["trainer"] == "dpsgd":
            case["error"] = "CaseOutOfMemory"
    alike = {**document, "rows": []}
    [figure] = figures_of(drawn(charts.bytes_by_phase, material(document, alike)))
    assert figure["data"][-1]["y"] == [*TRAINERS]


def test_nothing_measured_is_a_page_all_the_same() -> None:
    document = {"schema": 2, "rows": [], "cases": []}
    assert "No number was measured or counted" in render(material(document))
