"""The precision of a case on a GPU, whatever a model's own code switches on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpbench import MODELS, Case
from dpbench.child.build import build

pytestmark = pytest.mark.gpu


def model_in_tf32(*size: Any, **options: Any) -> nn.Module:
    torch.set_float32_matmul_precision("high")  # as many training scripts do
    model: nn.Module = MODELS["simple"](*size, **options)
    return model


@pytest.mark.parametrize(("precision", "products"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_a_model_does_not_change_the_precision_of_its_case(precision: str, products: str) -> None:
    MODELS.register("model_in_tf32", model_in_tf32)
    case = Case("standard", 4, 16, "tiny", precision, model="model_in_tf32")
    build(case, torch.device("cuda"), 1)
    assert torch.backends.cuda.matmul.fp32_precision == products
