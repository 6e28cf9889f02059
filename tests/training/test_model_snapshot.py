"""A model that is changed once a trainer has it: refused by name, before anything is updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS
from dpbench.core.errors import ConfigurationError
from tests.training.test_fused_layers import BOTH, EXAMPLES, PLAIN, TOKENS, Given, between, frozen

WORKLOAD = Given(lambda: frozen(between(nn.Linear(6, 6)), "0.weight"), TOKENS)


def made(trainer: str, **options: Any) -> Any:
    return TRAINERS[trainer](WORKLOAD.model(), batch_size=EXAMPLES, workload=WORKLOAD, **options)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assign(model: nn.Module) -> None:
    model.load_state_dict(
        {name: each + 1 for name, each in model.state_dict().items()}, assign=True
    )


def freeze(model: nn.Module) -> None:
    model.get_parameter("2.bias").requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model.get_parameter("0.weight").requires_grad_()


def replace_layer(model: nn.Module) -> None:
    model.append(nn.Tanh())
    model[4] = nn.Linear(6, 2)


def move(model: nn.Module) -> None:
    weight = model.get_parameter("2.weight")
    weight.data = weight.data + 1


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(6, 6))


def add_to_layer(model: nn.Module) -> None:
    model[2].register_parameter("scale", nn.Parameter(torch.ones(6)))


CHANGES = [
    (assign, "parameter 0.weight was replaced*load_state_dict without assign"),
    (freeze, "parameter 2.bias was frozen*do this before making it"),
    (thaw, "parameter 0.weight was unfrozen*do this before making it"),
    (replace_layer, "layer 4 was replaced*or make a new trainer"),
    (add_layer, "layer 5 was added*do this before making it"),
    (add_to_layer, "parameter 2.scale was added*do this before making it"),
]


@pytest.mark.parametrize(
    ("trainer", "change", "said"),
    [
        *[(t, *each) for t in (*BOTH, "micro_batch") for each in CHANGES],
        ("fused", move, "parameter 2.weight was moved to other memory*parameter.copy_(values)"),
    ],
)
def test_a_change_is_refused_by_name_before_anything_is_updated(
    trainer: str, change: Callable[[nn.Module], None], said: str
) -> None:
    trains = made(trainer)
    trains.train_step(TOKENS)
    change(trains.model)
    before = values(trains.model)
    with pytest.raises(ConfigurationError) as caught:
        trains.train_step(TOKENS)
    begin, _, end = said.partition("*")
    assert str(caught.value).startswith(begin)
    assert end in str(caught.value)
    assert all(map(torch.equal, values(trains.model), before))


@pytest.mark.parametrize("trainer", [PLAIN, "micro_batch"])
def test_where_no_buffer_holds_parameters_they_may_move(trainer: str) -> None:
    trains = made(trainer)
    trains.train_step(TOKENS)
    move(trains.model)
    before = values(trains.model)
    trains.train_step(TOKENS)
    assert not torch.equal(values(trains.model)[1], before[1])


@pytest.mark.parametrize("trainer", [*BOTH, "micro_batch"])
def test_values_that_are_loaded_in_place_are_trained_on(trainer: str) -> None:
    def trained(*, restores: bool) -> list[Tensor]:
        trains = made(trainer, noise_multiplier=0.0)
        state = {name: each.clone() for name, each in trains.model.state_dict().items()}
        trains.train_step(TOKENS)
        if restores:
            trains.model.load_state_dict(state)
            trains.train_step(TOKENS)
        return values(trains.model)

    assert all(map(torch.equal, trained(restores=True), trained(restores=False)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("trainer", [*BOTH, "micro_batch"])
def test_a_parameter_that_the_optimizer_gets_later_is_refused(trainer: str, optimizer: Any) -> None:
    trains = made(trainer, optimizer=optimizer)
    trains.train_step(TOKENS)
    hidden = nn.Linear(6, 6)  # in a list, which is no part of the model
    trains.plain_optimizer.add_param_group({"params": [*hidden.parameters()]})
    before = values(hidden)
    with pytest.raises(ConfigurationError, match=r"not the model's, in group 1 .* was added"):
        trains.train_step(TOKENS)
    assert all(map(torch.equal, values(hidden), before))


def test_opacus_raises_for_a_layer_that_is_added_later() -> None:
    """With per-sample gradients. Its ghost clipping trains the layer, and `verify` says so."""
    trains = made("dpsgd")
    trains.train_step(TOKENS)
    late = nn.Linear(2, 2)
    trains.model.append(late)
    trains.plain_optimizer.add_param_group({"params": [*late.parameters()]})
    before = values(late)
    with pytest.raises(ValueError, match="Per sample gradient not found"):
        trains.train_step(TOKENS)
    assert all(map(torch.equal, values(late), before))
