"""The floor of flat clipping, against layers whose sizes are known."""

from __future__ import annotations

import pytest

from dpbench.case import PHASES, Case
from dpbench.headroom import by_phase, floor, read_by_norms

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
