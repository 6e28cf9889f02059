"""The chart of what a rank sends, which is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.results.outcome import Outcome, document
from dpbench.results.run import Run
from dpbench.show.html import charts
from dpbench.show.html.data import PageData
from dpbench.show.html.figures import PHASE_COLOURS
from dpbench.show.html.page import draw, render
from tests.instruments.logical.cases import count

SENDING = Case("dpsgd_ghost", 8, 8, "99x16x1x2", parallel="fsdp2", gpus=2)


def material(*outcomes: Outcome) -> PageData:
    return PageData([Run(Path("run"), document(outcomes, {}))])


def bars(figure: Any) -> dict[str, list[float]]:
    return {bar["name"]: bar["x"] for bar in figure["data"] if bar["type"] == "bar"}


@pytest.mark.slow
def test_what_a_rank_sends_is_drawn_by_phase() -> None:
    outcomes = [count(case) for case in (SENDING.baseline, SENDING)]
    chart = charts.sent(material(*outcomes))
    assert chart
    [figure] = chart.panels.values()
    by_phase = {
        (row.case.trainer, row.phase): row.value / 1e9
        for outcome in outcomes
        for row in outcome.rows
        if row.metric == "collective_bytes"
    }
    assert bars(figure) == {
        phase: [pytest.approx(by_phase[name, phase]) for name in ("standard", "dpsgd_ghost")]
        for phase in ("forward", "backward")
    }
    assert figure["data"][0]["marker"]["color"] == PHASE_COLOURS["forward"]
    assert "Bytes that a rank sends" in render(material(*outcomes))


def test_one_gpu_alone_has_no_chart_of_ranks() -> None:
    alone = material(count(Case("standard", 8, 8, "99x16x1x2")))
    assert "sent" not in {chart.id for chart in draw(alone)}
