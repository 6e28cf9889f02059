"""Remembered calls equal PyTorch's own in results, bytes, FLOPs and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dpbench.instruments.logical import memo
from dpbench.instruments.logical.counter import without_data
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.logical.memory import tensors
from dpbench.training.phases import observed_step
from tests.instruments.logical.cases import count, tiny


def transpose_in_place(x: Tensor) -> list[Tensor]:
    first = x.clone()
    second = first.sum(1)
    first.t_()
    return [second, first.sum(1), first]


def share_memory_or_not(x: Tensor) -> list[Tensor]:
    other = x.clone()
    return [torch.mm(x, x.t()), torch.mm(x, other.t()), x.add_(x), x.add_(other)]


def resize(x: Tensor) -> list[Tensor]:
    small, large = x.new_empty(2), x.new_empty(0)
    return [small.resize_(3), large.resize_(3), small + large]


def write_where_told(x: Tensor) -> list[Tensor]:
    outs = [x.new_empty(0), x.new_empty(4, 6)]
    return [torch.add(x, 1, out=out) for out in outs]


def in_inference_mode(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        inside = x.clone()
    return [x.clone() * 2, inside]


def imaginary(x: Tensor) -> list[Tensor]:
    pairs = torch.view_as_complex(x.reshape(4, 3, 2))
    return [pairs.conj().imag.clone(), pairs.imag.clone(), pairs.conj().resolve_conj()]


STEPS: list[Callable[[Tensor], Any]] = [
    transpose_in_place,
    share_memory_or_not,
    resize,
    write_where_told,
    in_inference_mode,
    imaginary,
    lambda x: [x * 1, x * 1.0, x > 1, (x > 1) * 2, (x > 1) * 2.0],  # equal, of another type
    lambda x: [*x.split(2), *x.unbind(1), x[1:, ::2], x[1:, ::2].contiguous(), x.expand(2, 4, 6)],
    lambda x: torch._foreach_norm([x, x[0], x[1]]) + torch._foreach_mul([x, x], 2.0),
    lambda x: torch._foreach_add_([x, x[0]], 1.0),
    lambda x: [x.view(torch.int32), x.double(), x.to(torch.bfloat16).sum(), x.new_zeros(3)],
    lambda x: [x.max(), *x.max(1), *x.sort(), *torch.var_mean(x, 0)],
    lambda x: [torch.as_strided(x, (2,), (3,), 1), torch.empty_strided((2, 2), (5, 1)) + 1],
    lambda x: [x.unique(), x[x > 0], torch.tensor([1.0, 2.0]) + 1],
]


def describe(t: Tensor) -> tuple[Any, ...]:
    what = type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device
    return *what, t.untyped_storage().nbytes(), t.is_inference(), t.is_neg(), t.is_conj()


def observed(step: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """The result and the counts of a step when it runs for the second time."""
    with without_data() as counter:
        for _ in range(2):
            out, x = None, torch.empty(4, 6)
            with observed_step(counter):
                out = step(x)
        return [*map(describe, tensors(out))], counter.operators, counter.peaks, counter.notes


@pytest.mark.parametrize("step", STEPS)
def test_what_is_remembered_is_what_pytorch_answers(
    step: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = observed(step)
    monkeypatch.setattr(memo, "is_memoizable", lambda func: False)
    assert observed(step) == remembered


def test_cases_count_the_same_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny("dpsgd_ghost")
    remembered = count(case)
    monkeypatch.setattr(memo, "is_memoizable", lambda func: False)
    assert Logical().count(case) == remembered


@pytest.mark.slow
def test_pytorch_answers_no_more_for_a_deeper_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter[int]()
    dispatch = FakeTensorMode.dispatch

    def note(mode: FakeTensorMode, *call: Any) -> Any:
        asked[layers] += 1
        return dispatch(mode, *call)

    monkeypatch.setattr(FakeTensorMode, "dispatch", note)
    for layers in (2, 5):
        Logical().count(replace(tiny("dpsgd_ghost"), model_size=f"200x32x{layers}x2"))
    assert 0 < asked[5] <= asked[2]
