"""The list with which a failed comparison ends."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.subject import Script, Subject
from dpbench.show.comparison import exceeded_lines


def regression(case: Subject, before: float, after: float, phase: str = "clip") -> dict[str, Any]:
    row = {"metric": "logical_bytes", "phase": phase, "unit": "B", "before": before, "after": after}
    relative = (after - before) / before if before else None
    return {**case.columns, **row, "relative": relative, "threshold": "logical_bytes@clip:5%"}


def test_each_line_has_case_and_phase_and_the_largest_change_comes_first() -> None:
    case = Case("dpsgd", 8, 256)
    rows = [
        regression(case, 1e9, 2e9),
        regression(Script("train"), 2e9, 1e9, "step"),
        regression(case, 0, 1e9, "noise"),
        regression(case, 1e9, 5e9, "step"),
    ]
    assert exceeded_lines(rows) == [
        f"logical_bytes@noise of {case.id}: 0 GB -> 1.00 GB, -, limit 5%",
        f"logical_bytes@step of {case.id}: 1.00 GB -> 5.00 GB, +400.00%, limit 5%",
        f"logical_bytes@clip of {case.id}: 1.00 GB -> 2.00 GB, +100.00%, limit 5%",
        "logical_bytes@step of train: 2.00 GB -> 1.00 GB, -50.00%, limit 5%",
    ]


def test_a_line_names_the_operator_that_grew_most_with_its_module_and_source_line() -> None:
    grew = {"trainer": "dpsgd", "phase": "clip", "name": "aten.clone", "bytes": 5e8}
    grew |= {"module": "blocks.*.up", "line": "model.py:24 forward"}
    less = grew | {"name": "aten.mul", "bytes": -1e3, "module": "", "line": ""}
    for changes, words in (
        ([grew, less], "; most by aten.clone +500.0 MB, in blocks.*.up (model.py:24 forward)"),
        ([less], "; most by aten.mul -1.00 kB"),
        ([less | {"module": "1"}], "; most by aten.mul -1.00 kB, in module 1"),
        ([less | {"module": "*"}], "; most by aten.mul -1.00 kB, in several modules"),
    ):
        [line] = exceeded_lines(
            [regression(Case("dpsgd", 8, 256), 1e9, 2e9) | {"largest_changes": changes}]
        )
        assert line.endswith(f"limit 5%{words}")


@pytest.mark.parametrize(("number", "lines"), [(0, 0), (40, 40), (200, 40)])
def test_it_has_at_most_40_lines(number: int, lines: int) -> None:
    found = exceeded_lines(regression(Script(str(n)), 1e9, 2e9) for n in range(number))
    assert len(found) == lines
    if number > lines:
        assert found[-1] == "and 161 more"
    assert not any("more" in line for line in found[:-1])
