"""What is named as a trainer, a model or a workload and is none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dpbench import TrainerBase, Workload
from dpbench.child.build import smoke_test
from dpbench.core.case import Case
from tests.core.test_registry import refusal


class TakesNothing(TrainerBase):
    def __init__(self) -> None:
        raise AssertionError("nothing should have called it")


class Sized(Workload):
    def __init__(self, width: int) -> None:
        self.width = width


def no_trainer(model: nn.Module, **options: object) -> object:
    return object()


def no_model(size: object, attention: str, max_seq_len: int) -> str:
    return "a text"


def no_workload() -> dict[str, str]:
    return {}


class Acts:
    """Acts as soon as it is called, like `subprocess.Popen`."""

    train_step = step = None

    def __init__(self, *given: object, **options: object) -> None:
        raise AssertionError("nothing should have called it")


TRAINER = "a trainer is a subclass of dpbench.TrainerBase with a method train_step(batch)"
WORKLOAD = "a workload is a subclass of dpbench.Workload; set its parameters with --set"
OPTIMIZER = "an optimizer is a subclass of torch.optim.Optimizer, called as Optimizer(params"
MODEL = "a model is an nn.Module, called as Model(size"


@pytest.mark.parametrize(
    ("axis", "named", "said", "needs"),
    [
        ("trainer", "collections:OrderedDict", "is the class OrderedDict", TRAINER),
        ("trainer", f"{__name__}:TakesNothing", "does not accept its arguments: too many", TRAINER),
        ("trainer", f"{__name__}:no_trainer", "makes a object, which is no TrainerBase", TRAINER),
        ("trainer", f"{__name__}:Acts", "is the class Acts, which is no TrainerBase", TRAINER),
        ("trainer", "math:pi", "does not accept its arguments: 3.14", TRAINER),
        ("model", "collections:OrderedDict", "is the class OrderedDict", MODEL),
        ("model", "torch.nn:Linear", "does not accept its arguments: missing a required", MODEL),
        ("model", f"{__name__}:no_model", "makes a str, which is no Module", MODEL),
        ("model", "math:pi", "does not accept its arguments: 3.14", MODEL),
        ("model", f"{__name__}:Acts:path=x", "is the class Acts", MODEL),
        ("optimizer", f"{__name__}:Acts", "is the class Acts, which is no Optimizer", OPTIMIZER),
        ("workload", "torch.nn:Linear", "is the class Linear, which is no Workload", WORKLOAD),
        ("workload", f"{__name__}:Acts", "is the class Acts", WORKLOAD),
        ("workload", f"{__name__}:no_workload", "makes a dict, which is no Workload", WORKLOAD),
        ("workload", f"{__name__}:Sized", "does not accept its arguments: missing", WORKLOAD),
    ],
)
def test_what_is_none_is_told_what_one_is(axis: str, named: str, said: str, needs: str) -> None:
    given = {"trainer": "standard", axis: named}
    size: dict[str, Any] = {} if axis == "workload" else {"seq_len": 8, "model_size": "tiny"}
    message = refusal(lambda: smoke_test(Case(batch_size=2, **given, **size)))
    assert f"{axis} {named} {said}" in message
    assert needs in message
