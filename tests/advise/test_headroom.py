"""The floor of flat clipping, against layers whose sizes are known."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dpbench.advise.headroom import by_phase, floor, measured, read_by_norms
from dpbench.child.failures import CaseFailed, CaseRefused
from dpbench.core.case import PHASES, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS
from dpbench.core.registry import TRAINERS
from dpbench.results.run import Run

LINEAR = Case("dpsgd", 4, workload="layer", set="layer=linear,width=16,length=0")
TINY = Case("dpsgd", 2, 8, model_size="99x16x1x2")


def test_norms_of_a_linear_layer_read_its_input_and_its_outputs_gradient() -> None:
    assert read_by_norms(LINEAR) == (4 * 16 + 4 * 16) * 4


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"activation_checkpointing": "on"}])
def test_norms_read_each_layer_once_however_it_is_trained(options: dict[str, object]) -> None:
    assert read_by_norms(Case("dpsgd", 2, 8, model_size="99x16x1x2", **options)) == read_by_norms(
        TINY
    )


def test_a_frozen_layer_has_no_norm() -> None:
    one = Case("dpsgd", 2, 8, model_size="99x16x1x2", trainable="*head*")
    assert 0 < read_by_norms(one) < read_by_norms(TINY)


def test_the_floor_is_a_standard_step_and_the_norms() -> None:
    lowest = floor(TINY)
    standard = by_phase(Case("standard", 2, 8, model_size="99x16x1x2"))
    assert sum(lowest.values()) == standard["step"]["bytes"] + read_by_norms(TINY)
    assert {*lowest} <= {*PHASES}
    assert by_phase(TINY)["step"]["bytes"] > sum(lowest.values())


def test_norms_read_each_examples_gradient_where_that_is_less() -> None:
    """A layer norm has 2 · 16 parameters, and 16 positions of 16 numbers go in and come out."""
    case = Case("dpsgd", 4, workload="layer", set="layer=layernorm,width=16,length=16")
    assert read_by_norms(case) == 4 * (2 * 16) * 4


PRIVATE = [name for name in TRAINERS if name != "standard"]
AXES: list[dict[str, Any]] = [
    {},
    {"micro_batches": 4},
    {"parallel": "ddp", "gpus": 2},
    {"parallel": "ddp", "gpus": 2, "micro_batches": 2},
    {"parallel": "fsdp2", "gpus": 2},
    {"trainable": "*.bias"},
    {"trainable": "lora:2"},
    {"seq_len": 512},
    {"batch_size": 1},
    {"optimizer": "adamw", "precision": "bf16"},
    {"activation_checkpointing": "on", "micro_batches": 2},
    *(
        {"seq_len": 0, "model_size": "", "workload": "layer", "set": f"layer={layer},width=16"}
        for layer in ("linear", "conv", "layernorm", "groupnorm", "embedding")
    ),
]


@pytest.mark.usefixtures("counted_here")
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_no_private_method_is_below_the_floor(axes: dict[str, Any]) -> None:
    case = Case("dpsgd", **{"batch_size": 4, "seq_len": 8, "model_size": "100x16x1x2"} | axes)
    least = sum(floor(case).values())
    counted = {}
    for name in PRIVATE:
        with suppress(CaseFailed, CaseRefused, ConfigurationError):  # it does not train so
            counted[name] = by_phase(case.with_trainer(name))["step"]["bytes"]
    assert "dpsgd_ghost" in counted
    assert {name: size for name, size in counted.items() if size < least} == {}


def test_of_two_instruments_the_one_that_a_metric_prefers_is_shown() -> None:
    run = Run.load(Path(__file__).parents[1] / "data/saved/cupti-and-ncu.json")
    with METRICS.including(run.metrics):
        [case] = {o.case for o in run.outcomes if o.case.trainer == "dpsgd"}
        numbers = run.summary
        steps = numbers[(numbers.trainer == "dpsgd") & (numbers.phase == "step")]
        dram = steps[steps.metric == "dram_bytes"].set_index("instrument").value
        shown = measured(numbers.sort_values("instrument"), [case])[case]
    assert dram["ncu"] != dram["cupti"]
    assert shown["dram_bytes"] == dram["ncu"]
