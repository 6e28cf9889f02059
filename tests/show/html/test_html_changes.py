"""What the page says of two runs, and where bytes come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plotly.offline import get_plotlyjs

from dpbench.core.case import Case
from dpbench.instruments.logical.counter import logical_rows
from dpbench.results.kernels import OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.run import Run
from dpbench.show.html.charts import OUTSIDE_MODULES, flames
from dpbench.show.html.data import PageData
from dpbench.show.html.page import changes, render

CASE = Case("dpsgd", 8, 256)


def operator(name: str, size: int, phase: str = "clip", **place: Any) -> OperatorCount:
    return OperatorCount(phase, name, 1, size, 0, 0, **place)


def run(name: str, *operators: OperatorCount, case: Case = CASE, **environment: Any) -> Run:
    rows = logical_rows(case, operators, dict.fromkeys((o.phase for o in operators), 0))
    of_bytes = tuple(row for row in rows if "peak" not in row.metric)
    return Run.of(name, [Outcome(case, of_bytes, operators=operators)], environment)


UP = {"module": "blocks.*.up", "line": "model.py:24 forward"}
MUL, CLONE = operator("aten.mul", 10**9, **UP), operator("aten.clone", 10**9, **UP)


def lines(of: list[Any]) -> list[list[str]]:
    [change] = of
    return [line[:-1] for line in change.grown.cells]


def test_the_largest_change_comes_first_with_its_module_and_line() -> None:
    before = run("a", MUL, CLONE)
    after = run("b", replace(MUL, read_bytes=5 * 10**9), replace(CLONE, read_bytes=10**8))
    assert lines(changes([before, after])) == [
        ["+4.00 GB", "+400.0%", "clip", "aten.mul", *UP.values(), "1.00 GB", "5.00 GB"],
        ["-900.0 MB", "-90.0%", "clip", "aten.clone", *UP.values(), "1.00 GB", "100.0 MB"],
    ]


def layer(number: int, size: int) -> OperatorCount:
    return operator("aten.mul", size, module=f"blocks.{number}.up", line="model.py:24 forward")


def test_layers_that_changed_alike_are_one_line_and_one_that_did_alone_keeps_its_number() -> None:
    before = run("a", *(layer(n, 10) for n in range(12)))
    alone = [layer(n, 30 if n == 3 else 10) for n in range(12)]
    [line] = lines(changes([before, run("b", *alone)]))
    assert line[4] == "blocks.3.up"
    [line] = lines(changes([before, run("b", *(layer(n, 30) for n in range(12)))]))
    assert (line[4], line[6:]) == ("blocks.0-11.up", ["0.1200 kB", "0.3600 kB"])


def test_layers_of_a_run_from_before_they_had_numbers_are_compared() -> None:
    before = run("a", operator("aten.mul", 20, module="blocks.*.up", line="model.py:24 forward"))
    assert lines(changes([before, run("b", layer(0, 10), layer(1, 10))])) == []
    [line] = lines(changes([before, run("b", layer(0, 10), layer(1, 15))]))
    assert line[4] == "blocks.*.up"


def test_two_runs_begin_with_what_changed() -> None:
    before, after = run("a", MUL), run("b", replace(MUL, read_bytes=5 * 10**9))
    page = render(PageData([before, after]))
    said = "a → b: the logical bytes of dpsgd-bs8-seq256-1b-fp32 changed by +400.00%, "
    said += "1.00 GB → 5.00 GB; most by aten.mul +4.00 GB, in blocks.*.up (model.py:24 forward)."
    places = [page.index(part) for part in (said, 'id="changes"', 'id="overview"')]
    assert places == sorted(places)


def test_an_operator_that_only_moved_to_another_line_has_not_changed() -> None:
    moved = replace(CLONE, line="model.py:25 forward")
    [change] = changes([run("a", CLONE, MUL), run("b", moved, MUL)])
    assert change.grown.cells == []
    assert "No operator" in change.grown.notes[0]


def test_runs_without_modules_are_compared_by_operator() -> None:
    older = run("a", replace(CLONE, module="", line=""))
    [found] = lines(changes([older, run("b", replace(CLONE, read_bytes=3 * 10**9))]))
    assert found[1:6] == ["+200.0%", "clip", "aten.clone", "", "model.py:24 forward"]


def test_what_else_differs_is_listed() -> None:
    [change] = changes([run("a", MUL, python="3.11"), run("b", MUL, python="3.12")])
    assert change.differences == ["Python 3.11 -> 3.12"]
    page = render(PageData([run("a", MUL, python="3.11"), run("b", MUL, python="3.12")]))
    assert "Python 3.11 -&gt; 3.12" in page


def test_runs_without_a_number_in_common_have_no_changes() -> None:
    assert changes([run("a", MUL), run("b", MUL, case=Case("dpsgd", 16, 256))]) == []
    assert changes([run("a", MUL)]) == []


def test_a_box_is_as_wide_as_the_bytes_within_it() -> None:
    other = operator("aten.mm", 2 * 10**9, "forward")
    chart = flames(PageData([run("a", MUL, CLONE, other)]))
    assert chart
    [figure] = chart.panels.values()
    [trace] = figure["data"]
    size = dict(zip(trace["ids"], trace["values"], strict=True))
    inside: dict[str, float] = {}
    for parent, value in zip(trace["parents"], trace["values"], strict=True):
        inside[parent] = inside.get(parent, 0) + value
    assert inside.pop("") == 4 * 10**9
    assert all(size[parent] == total for parent, total in inside.items())
    labels = dict(zip(trace["labels"], trace["values"], strict=False))
    assert labels[OUTSIDE_MODULES] == labels["forward"] == 2 * 10**9
    assert labels["blocks.*.up"] == labels["clip"] == 2 * 10**9


def test_a_numbered_layer_has_a_box_of_its_name() -> None:
    chart = flames(PageData([run("a", *(layer(n, 10) for n in range(12)))]))
    assert chart
    [figure] = chart.panels.values()
    [trace] = figure["data"]
    size = dict(zip(trace["labels"], trace["values"], strict=False))
    assert [size[name] for name in ("blocks", "blocks.3", "blocks.3.up")] == [120, 10, 10]


def test_small_boxes_are_left_out() -> None:
    chart = flames(PageData([run("a", MUL, operator("aten.add", 10**5, **UP))]))
    assert chart
    assert "aten.mul" in str(chart.panels)
    assert "aten.add" not in str(chart.panels)


def test_operators_without_places_have_no_flame_graph() -> None:
    assert flames(PageData([run("a", operator("aten.mul", 10**9))])) is None


def test_a_page_of_twenty_cases_is_small_beside_plotly() -> None:
    """At most 1.5 MB, with as many operators and modules as a transformer has."""
    places = [
        operator(
            f"aten.op{n}", 10**9, phase, module=f"blocks.*.layer{m}", line=f"model.py:{m} forward"
        )
        for phase in ("forward", "backward", "clip")
        for m in range(8)
        for n in range(5)
    ]
    runs = [run(f"r{n}", *places, case=Case("dpsgd", n + 1, 256)) for n in range(20)]
    page = render(PageData([Run.of("all", [o for each in runs for o in each.outcomes])]))
    assert len(page.encode()) - len(get_plotlyjs().encode()) < 1.5e6
