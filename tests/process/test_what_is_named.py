"""What is named as a trainer, a model or a workload and is none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dpbench import TrainerBase
from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.process.build import smoke_test


class TakesNothing(TrainerBase):
    def __init__(self) -> None:
        raise AssertionError("nothing should have called it")


def no_trainer(model: nn.Module, **options: object) -> object:
    return object()


def no_model(size: object, attention: str, max_seq_len: int) -> str:
    return "a text"


def refusal(**axes: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        smoke_test(Case(**{"trainer": "standard", "batch_size": 2} | axes))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("collections:OrderedDict", "is the class OrderedDict, without train_step"),
        (f"{__name__}:TakesNothing", "cannot be called so: too many positional arguments"),
        (f"{__name__}:no_trainer", "makes a object, without train_step or model"),
        ("math:pi", "is of type float"),
    ],
)
def test_what_is_no_trainer_is_told_what_one_is(named: str, said: str) -> None:
    message = refusal(trainer=named, seq_len=8, model_size="tiny")
    assert f"trainer {named} {said}" in message
    assert "a trainer is a subclass of dpbench.TrainerBase, called as Trainer(model" in message


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("collections:OrderedDict", "is a OrderedDict"),
        ("torch.nn:Linear", "cannot be called so: missing a required argument: 'out_features'"),
        (f"{__name__}:no_model", "makes a str"),
        ("math:pi", "is of type float"),
    ],
)
def test_what_is_no_model_is_told_what_one_is(named: str, said: str) -> None:
    message = refusal(model=named, seq_len=8, model_size="tiny")
    assert f"model {named} {said}" in message
    assert "a model is an nn.Module, called as Model(size" in message


def test_a_class_with_arguments_that_is_no_workload_is_said_to_be_none() -> None:
    message = refusal(workload="torch.nn:Linear")
    assert "workload torch.nn:Linear must be a subclass of dpbench.Workload" in message
