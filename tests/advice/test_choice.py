"""What is recommended, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dpbench
from dpbench.advice.choice import _choice, _over_standard, advise, with_measured
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS
from dpbench.results.run import Run

TINY = Case("standard", 4, 8, model_size="100x16x1x2")


def frame(**methods: dict[str, Any]) -> pd.DataFrame:
    """A frame of methods, whose numbers are 1 unless given."""
    usual = dict.fromkeys(
        (
            *("logical_bytes", "flops", "launches", "peak_memory_bytes", "predicted_seconds"),
            "launch_seconds",
        ),
        1.0,
    )
    usual |= {"fits": True, "largest_batch": 100}
    rows = [{"trainer": name, **usual, **own} for name, own in {"standard": {}, **methods}.items()]
    return _over_standard(pd.DataFrame(rows))


def test_the_fastest_private_method_is_named_and_the_next_beside_it() -> None:
    methods = frame(
        dpsgd_fgc={"predicted_seconds": 1.1, "peak_memory_bytes": 4.0},
        dpsgd_ghost={"predicted_seconds": 2.4},
        dpsgd={"predicted_seconds": 2.2, "logical_bytes": 1.6},
    )
    name, reason = _choice(methods, 8, 80e9, "H200")
    assert name == "dpsgd_fgc"
    assert reason.startswith(
        "Use `dpsgd_fgc`: its step should take 1100.0 ms on H200, 1.10 times a stan"
    )
    assert "with 1.00 times the counted bytes and 4.00 times the counted peak memory" in reason
    assert reason.endswith("; next is `dpsgd` with 2.20, 1.60 and 1.00 times.")


def test_a_private_step_that_is_shorter_than_a_standard_step_has_a_reason() -> None:
    for seconds, launches, said in ((0.8, 0.0, True), (0.8, 0.5, False), (1.2, 0.0, False)):
        methods = frame(fused={"predicted_seconds": seconds, "launch_seconds": launches})
        assert ("it is shorter because" in _choice(methods, 8, 80e9, "H200")[1]) == said


def test_what_is_close_is_said() -> None:
    methods = frame(
        dpsgd_fgc={"predicted_seconds": 1.0},
        fused={"predicted_seconds": 1.03},
        dpsgd={"predicted_seconds": 1.2},
    )
    name, reason = _choice(methods, 8, 80e9, "H200")
    assert name == "dpsgd_fgc"
    assert "`fused` is within 3%" in reason


def test_a_method_that_does_not_fit_is_not_named() -> None:
    methods = frame(
        dpsgd_fgc={"predicted_seconds": 1.0, "fits": False},
        dpsgd_ghost={"predicted_seconds": 2.0},
    )
    name, reason = _choice(methods, 8, 80e9, "H200")
    assert name == "dpsgd_ghost"
    assert "2.00 times a standard step" in reason
    assert "; `dpsgd_fgc` does not fit" in reason


def test_a_method_for_larger_batches_is_said_where_they_are_near() -> None:
    methods = frame(
        dpsgd_fgc={"largest_batch": 10}, micro_batch={"predicted_seconds": 9.0, "largest_batch": 99}
    )
    assert "for batches above 10, use `micro_batch`" in _choice(methods, 8, 80e9, "H200")[1]
    assert "for batches" not in _choice(methods, 4, 80e9, "H200")[1]


def test_where_none_fits_the_one_with_the_largest_batch_is_said() -> None:
    none = {"fits": False}
    methods = frame(
        dpsgd_fgc={**none, "largest_batch": 2}, micro_batch={**none, "largest_batch": 5}
    )
    name, reason = _choice(methods, 8, 80e9, "H200")
    assert name is None
    assert reason == ("No private method fits 80 GB at batch 8; `micro_batch` fits up to batch 5.")
    alone = frame(dpsgd_fgc={**none, "largest_batch": 0})
    assert "even one example does not fit" in _choice(alone, 8, 80e9, "H200")[1]


def test_methods_are_listed_by_time_after_the_standard_step() -> None:
    listed = frame(dpsgd={"predicted_seconds": 3.0}, dpsgd_fgc={"predicted_seconds": 2.0})
    assert [*listed.trainer] == ["standard", "dpsgd_fgc", "dpsgd"]
    assert [*listed.predicted_ratio] == [1, 2, 3]


def test_advice_of_a_case() -> None:
    advice = dpbench.advise(TINY, trainers=["dpsgd", "dpsgd_fgc"], memory=2e9)
    assert isinstance(advice, dpbench.Advice)
    assert advice.trainer in ("dpsgd", "dpsgd_fgc")
    table = advice.frame.set_index("trainer")
    assert {*table.index} == {"standard", "dpsgd", "dpsgd_fgc"}
    assert (table.roofline_seconds < table.predicted_seconds).all()
    assert table.bytes_ratio["standard"] == 1
    assert (table.largest_batch > 1).all()


@pytest.mark.slow
def test_a_method_that_refuses_is_told_with_its_reason_and_never_named() -> None:
    ranks = Case("standard", 4, 8, model_size="100x16x1x2", parallel="fsdp2", gpus=2)
    advice = advise(ranks, trainers=["dpsgd_fgc", "dpsgd_ghost"])
    assert advice.trainer == "dpsgd_ghost"
    assert "does not train under parallel=fsdp2" in advice.refused["dpsgd_fgc"]
    assert "dpsgd_fgc" not in {*advice.frame.trainer}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu": "h300"}, "unknown card 'h300'; choose from"),
        ({"gpu": "b200"}, "the memory of NVIDIA B200 is unknown: add --memory"),
        ({"trainers": ["dpsdg"]}, "unknown trainer 'dpsdg'"),
    ],
)
def test_what_is_unknown_is_refused_in_a_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        advise(TINY, **options)


def test_what_was_measured_stands_beside_it() -> None:
    """Of two instruments, the one that a metric prefers."""
    run = Run.load(Path(__file__).parents[1] / "data/saved/cupti-and-ncu.json")
    with METRICS.including(run.metrics):
        [case] = {o.case for o in run.outcomes if o.case.trainer == "dpsgd"}
        rows = run.summary
    methods = pd.DataFrame({"trainer": ["standard", "dpsgd", "dpsgd_fgc"]})
    shown = with_measured(methods, rows, case).set_index("trainer")
    ratios = rows[(rows.metric == "dram_ratio") & (rows.phase == "step") & (rows.case == case)]
    by = ratios.set_index("instrument").value
    assert by["ncu"] != by["cupti"]
    assert shown.measured_bytes_ratio["dpsgd"] == by["ncu"]
    assert pd.isna(shown.measured_seconds["dpsgd_fgc"])
