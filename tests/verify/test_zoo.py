"""Wrong trainers fail verify, and right ones pass."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.registry import resolve
from dpbench.verify.trainer_checks import verify
from tests.verify import wrong

SMALL = "tests.verify.over_ranks:Small"
OWN = "tests.verify.faulty"
PLAIN = "fused:graphs=false,kernels=false"

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {}),
    ("dpsgd", {"micro_batches": 1}),
    ("dpsgd", {"micro_batches": 4}),
    ("dpsgd", {"batch_size": 6, "micro_batches": 3}),
    ("dpsgd", {"batch_size": 1, "micro_batches": 1}),
    ("dpsgd", {"precision": "bf16"}),
    ("dpsgd", {"precision": "bf16-amp"}),
    ("dpsgd", {"optimizer": "momentum"}),
    ("dpsgd", {"optimizer": "adamw"}),
    ("dpsgd", {"trainable": "lora:2"}),
    ("dpsgd", {"trainable": "*.bias"}),
    ("dpsgd", {"workload": "layer:layer=layernorm,width=2,length=3"}),
    ("dpsgd", {"workload": "layer:layer=conv,width=8,length=6"}),
    ("dpsgd:clip=per_layer", {}),
    ("dpsgd:clip=per_layer", {"precision": "bf16"}),
    ("dpsgd:grad_sample=functorch", {}),
    ("dpsgd:grad_sample=ew", {}),
    ("dpsgd_fgc", {}),
    ("dpsgd_fgc", {"trainable": "*.bias"}),
    ("fused", {}),
    ("fused", {"precision": "bf16", "micro_batches": 4}),
    ("fused", {"workload": "layer:layer=groupnorm"}),
    ("micro_batch", {}),
    ("micro_batch", {"precision": "bf16"}),
    (PLAIN, {}),
    (PLAIN, {"trainable": "lora:2", "optimizer": "adamw"}),
    (f"{OWN}:Looped", {}),
    (f"{OWN}:Looped", {"micro_batches": 1, "optimizer": "momentum"}),
    (f"{OWN}:ByLayer", {}),
    (f"{OWN}:WithoutClosure", {"optimizer": "adamw"}),
    ("tests.verify.right:RefusesNaN", {}),
    ("tests.verify.right:LeavesNaNOut", {}),
    ("tests.verify.right:MeanOfNoisyParameters", {}),
]
NORMS_BY_PRODUCTS = (PLAIN, "fused")
"""Trainers with norms by products, whose clipping norm is an upper bound of the true one."""


def names_of_failed(trainer: str, **axes: Any) -> list[str]:
    case = Case(trainer, **({"batch_size": 4, "micro_batches": 2, "workload": SMALL} | axes))
    return [check.name for check in verify(resolve(case), "cpu") if not check.passed]


@pytest.mark.slow  # one of each kind is in test_the_check_that_names_the_fault_fails
@pytest.mark.parametrize("name", wrong.ALL)
def test_a_wrong_trainer_fails(name: str) -> None:
    assert names_of_failed(f"{wrong.__name__}:{name}")


@pytest.mark.slow  # others pass in test_verify.py
@pytest.mark.parametrize(("trainer", "axes"), RIGHT, ids=str)
def test_a_right_trainer_passes(trainer: str, axes: dict[str, Any]) -> None:
    assert not names_of_failed(trainer, **axes)


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("SecondHalfAgain", "noise: elements"),
        ("ThreeInTurn", "noise: parameters, steps, runs"),
        ("FiftyInTurn", "noise: 240 steps"),
        pytest.param("EndsAfterHundred", "noise: 240 steps", marks=pytest.mark.slow),
        pytest.param("FourSigmaCut", "noise: 240 steps", marks=pytest.mark.slow),
        pytest.param("SigmaRounded", "noise: deviation", marks=pytest.mark.slow),
        pytest.param("LargestNormForThreshold", "noise: deviation", marks=pytest.mark.slow),
        pytest.param("WholeUnclippedWithNoise", "noise: deviation", marks=pytest.mark.slow),
        ("ThrownAwayWithNoise", "noise beside gradients"),
        ("MiddlePartUnclipped", "gradient of 3 in 3 parts, all clipped"),
        ("KeepsData", "buffers hold no data"),
        pytest.param("NormIsNaNSoUnclipped", "norms not finite", marks=pytest.mark.slow),
        ("NaNIsNoNorm", "norms not finite"),
    ],
)
def test_the_check_that_names_the_fault_fails(name: str, check: str) -> None:
    assert check in names_of_failed(f"{wrong.__name__}:{name}")


@pytest.mark.parametrize(
    "precision",
    ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "bf16-amp"))],
)
def test_opacus_ghost_clipping_fails_tokens_that_are_alike(precision: str) -> None:
    assert names_of_failed("dpsgd_ghost", precision=precision) == ["tokens alike"]


def test_opacus_fast_gradient_clipping_fails_them_in_16_bits() -> None:
    assert names_of_failed("dpsgd_fgc", precision="bf16") == ["tokens alike"]


@pytest.mark.repeats
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trainer", NORMS_BY_PRODUCTS)
def test_norms_by_products_that_are_bounds_pass(trainer: str, precision: str) -> None:
    assert not names_of_failed(trainer, precision=precision)
