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


def test_a_label_is_the_token_that_follows_and_the_last_is_new() -> None:
    input_ids, labels = batches(batch_size=64, vocab_size=10)[0]
    assert torch.equal(labels[:, :-1], input_ids[:, 1:])
    assert not torch.equal(labels[:, -1], input_ids[:, -1])
    assert set(input_ids.flatten().tolist()) == set(range(10))


def test_the_seed_alone_decides_the_tokens() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = get_random_dataloader(**SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    first = list(loader)
    torch.manual_seed(2)
    with torch.device("meta"):
        again = get_random_dataloader(**SHAPE, device="cpu")
    assert same(first, list(loader))
    assert same(first, list(again))
    assert not same(first, batches(seed=2))
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("meta")])
def test_batches_lie_on_the_device(device: str | torch.device) -> None:
    for pair in batches(device=device):
        assert [tokens.device.type for tokens in pair] == [torch.device(device).type] * 2
