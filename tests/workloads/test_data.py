"""Random token batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpbench.workloads.transformer import get_random_dataloader

SHAPE: dict[str, int] = {"batch_size": 4, "seq_len": 16, "vocab_size": 1_000}


def batches(**options: Any) -> list[list[Tensor]]:
    return list(get_random_dataloader(**{**SHAPE, **options}))


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for pair, other_pair in zip(one, other, strict=True)
        for a, b in zip(pair, other_pair, strict=True)
    )


@settings(deadline=None, max_examples=25)
@given(
    batch_size=st.integers(1, 9),
    seq_len=st.integers(1, 20),
    vocab_size=st.integers(1, 50),
    num_batches=st.integers(1, 4),
)
def test_every_batch_is_full_and_has_two_int64_matrices(
    batch_size: int, seq_len: int, vocab_size: int, num_batches: int
) -> None:
    found = batches(
        batch_size=batch_size, seq_len=seq_len, vocab_size=vocab_size, num_batches=num_batches
    )
    assert len(found) == num_batches
    for input_ids, labels in found:
        for tokens in (input_ids, labels):
            assert tokens.shape == (batch_size, seq_len)
            assert tokens.dtype == torch.int64
            assert tokens.min() >= 0
            assert tokens.max() < vocab_size


def test_label_is_the_token_that_follows() -> None:
    for input_ids, labels in batches():
        assert torch.equal(labels[:, :-1], input_ids[:, 1:])


def test_last_label_is_a_new_token() -> None:
    input_ids, labels = batches(batch_size=64)[0]
    assert not torch.equal(labels[:, -1], input_ids[:, -1])
    assert not torch.equal(labels[:, -1], input_ids[:, 0])


def test_tokens_fill_the_vocabulary() -> None:
    tokens = torch.cat([input_ids for input_ids, _ in batches(batch_size=64, vocab_size=10)])
    assert set(tokens.flatten().tolist()) == set(range(10))


def test_seed_decides_the_tokens() -> None:
    assert same(batches(seed=1), batches(seed=1))
    assert not same(batches(seed=1), batches(seed=2))


def test_tokens_do_not_depend_on_the_state_of_the_process() -> None:
    torch.manual_seed(1)
    first = batches()
    torch.manual_seed(2)
    assert same(first, batches())


def test_making_batches_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    get_random_dataloader(**SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_gives_the_same_batches_each_time() -> None:
    loader = get_random_dataloader(**SHAPE)
    assert same(list(loader), list(loader))


def test_batches_differ_from_each_other() -> None:
    (first, _), (second, _) = batches(num_batches=2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("meta")])
def test_batches_lie_on_the_device(device: str | torch.device) -> None:
    for pair in batches(device=device):
        assert [tokens.device.type for tokens in pair] == [torch.device(device).type] * 2


def test_batches_are_the_same_under_another_default_device() -> None:
    with torch.device("meta"):
        loader = get_random_dataloader(**SHAPE, device="cpu")
    assert same(list(loader), batches())
