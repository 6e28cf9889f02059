"""The floor of flat clipping, against layers whose sizes are known."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.advice.choice import advise
from dpbench.advice.footprint import norm_reads
from dpbench.core.case import Case

LINEAR = Case("dpsgd", 4, workload="layer", set="layer=linear,width=16,length=0")
TINY = Case("dpsgd", 2, 8, model_size="99x16x1x2")


def test_norms_of_a_linear_layer_read_its_input_and_its_outputs_gradient() -> None:
    assert norm_reads(LINEAR) == (4 * 16 + 4 * 16) * 4


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"activation_checkpointing": "on"}])
def test_norms_read_each_layer_once_however_it_is_trained(options: dict[str, Any]) -> None:
    assert norm_reads(Case("dpsgd", 2, 8, model_size="99x16x1x2", **options)) == norm_reads(TINY)


def test_a_frozen_layer_has_no_norm() -> None:
    one = Case("dpsgd", 2, 8, model_size="99x16x1x2", trainable="*head*")
    assert 0 < norm_reads(one) < norm_reads(TINY)


def test_norms_read_each_examples_gradient_where_that_is_less() -> None:
    """A layer norm has 2 · 16 parameters, and 16 positions of 16 numbers go in and come out."""
    case = Case("dpsgd", 4, workload="layer", set="layer=layernorm,width=16,length=16")
    assert norm_reads(case) == 4 * (2 * 16) * 4


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
    {"optimizer": "adamw:fused=true", "precision": "bf16"},
    {"activation_checkpointing": "on", "micro_batches": 2},
    *(
        {"seq_len": 0, "model_size": "", "workload": "layer", "set": f"layer={layer},width=16"}
        for layer in ("linear", "conv", "layernorm", "groupnorm", "embedding")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_no_private_method_is_below_the_floor(axes: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "model_size": "100x16x1x2"}
    case = Case("dpsgd", **usual | axes)
    above = advise(case).frame.set_index("trainer").above_floor_bytes
    assert "dpsgd_ghost" in above
    private = above.drop("standard")
    assert private[private < 0].empty, private
