"""The random numbers of noise: published words, and no numbers that are drawn twice."""

from __future__ import annotations

import copy
import io
import os
import struct
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from dpbench import DPSGDTrainer, FusedTrainer
from dpbench.core.errors import ConfigurationError
from dpbench.training import noise_stream
from dpbench.training.micro_batch import MicroBatchTrainer
from dpbench.training.noise_stream import NoiseStream, chacha, normal_numbers
from dpbench.training.noisy_updates import Scalars, noisy_update
from dpbench.training.parallel import own_generator
from dpbench.training.poisson import PoissonSampler
from tests.verify.over_ranks import Small

CPU = torch.device("cpu")
VECTORS = {
    "RFC 8439, 2.3.2": (
        20,
        bytes(range(32)).hex(),
        "01000000000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    # https://datatracker.ietf.org/doc/html/draft-strombergson-chacha-test-vectors-01, whose
    # counter has 64 bits and the IV 64 bits
    "TC1, 12 rounds": (
        12,
        "00" * 32,
        "00" * 16,
        "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f"
        "0564f879d27ae3c02ce82834acfa8c793a629f2ca0de6919610be82f411326be",
    ),
    "TC1, 12 rounds, second block": (
        12,
        "00" * 32,
        "01" + "00" * 15,
        "0bd58841203e74fe86fc71338ce0173dc628ebb719bdcbcc151585214cc089b4"
        "42258dcda14cf111c602b8971b8cc843e91e46ca905151c02744a6b017e69316",
    ),
}


def words_of(text: str) -> Tensor:
    return torch.tensor([word for (word,) in struct.iter_unpack("<i", bytes.fromhex(text))])


@pytest.mark.parametrize("name", VECTORS)
def test_words_are_those_that_were_published(name: str) -> None:
    rounds, key, counter, expected = VECTORS[name]
    counters = words_of(counter).int()[:, None]
    words = chacha(words_of(key).int(), counters.expand(4, 3).contiguous(), rounds)
    for block in words.T:
        assert torch.equal(block.long(), words_of(expected))


def test_every_step_buffer_and_key_has_numbers_of_its_own() -> None:
    length, drawn = 20_000, list[Tensor]()
    for seed in (1, 2, None, None):
        stream = NoiseStream(2, CPU, seed)
        for _ in range(2):
            drawn += [normal_numbers(each, length, torch.float32) for each in stream.next_step()]
    for one, other in combinations(drawn, 2):  # 120 pairs
        correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
        assert abs(correlation) < 6 / length**0.5  # a false alarm: 2e-9 each


def test_earlier_numbers_are_drawn_again_over_the_end_of_32_bits() -> None:
    stream = NoiseStream(1, CPU, 1)
    stream.rows[:, 5] = 2**32 - 2
    first = normal_numbers(stream.next_step()[0], 100, torch.float64)
    later = stream.next_step()[0]
    assert torch.equal(normal_numbers(later, 100, torch.float64, 1), first)
    assert not torch.equal(normal_numbers(later, 100, torch.float64), first)


def test_numbers_do_not_depend_on_how_many_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = NoiseStream(1, CPU, 1).next_step()[0]
    expected = normal_numbers(stream, 10_000, torch.float32)
    monkeypatch.setattr(noise_stream, "AT_ONCE", 256)
    assert torch.equal(normal_numbers(stream, 10_000, torch.float32), expected)
    assert torch.equal(normal_numbers(stream, 100, torch.float32), expected[:100])


def test_a_buffer_with_too_many_elements_is_refused() -> None:
    zeros = torch.zeros(()).expand(16 * 2**32 + 1)
    stream = NoiseStream(1, CPU).next_step()[0]
    with pytest.raises(ValueError, match="a buffer has 68719476737 elements"):
        noisy_update(zeros, [], zeros, stream, "plain", Scalars(1.0, 1.0))


def copies(each: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save(each, file)
    file.seek(0)
    return [copy.deepcopy(each), torch.load(file, weights_only=False)]


def test_copies_have_new_keys() -> None:
    stream, generator = NoiseStream(3, CPU, 1), own_generator(CPU, 1)
    keys = {*map(str, [stream.rows[0], *(each.rows[0] for each in copies(stream))])}
    seeds = {each.initial_seed() for each in (generator, *copies(generator))}
    assert (len(keys), len(seeds)) == (3, 3)


@pytest.mark.parametrize("kind", [FusedTrainer, MicroBatchTrainer])
def test_no_file_contains_the_key(kind: Any) -> None:
    trainer = kind(Small().model(), batch_size=2, workload=Small(), seed=7)
    file = io.BytesIO()
    torch.save([trainer, trainer.plain_optimizer.state_dict()], file)
    assert bytes(NoiseStream(1, CPU, 7).rows[0, :4].numpy()) not in file.getvalue()
    assert bytes(own_generator(CPU, 7).get_state().numpy())[:24] not in file.getvalue()


@pytest.mark.parametrize("kind", [FusedTrainer, MicroBatchTrainer, DPSGDTrainer])
def test_a_step_more_than_noise_was_scaled_for_is_refused(kind: Any) -> None:
    options = {"noise": "banded", "bands": 2, "noise_steps": 3}
    trainer = kind(model := Small().model(), batch_size=2, workload=Small(), **options)
    batch = next(iter(Small().batches(2)))
    for _ in range(3):
        trainer.train_step(batch)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConfigurationError, match="step 4 has too little correlated noise"):
        trainer.train_step(batch)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_forked_process_draws_the_same_noise_and_batches_only_from_a_seed(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, sampler = NoiseStream(2, CPU, seed), PoissonSampler(1000, 500, seed)
    forked = NoiseStream(2, CPU, seed), PoissonSampler(1000, 500, seed)
    forked[0].rows.copy_(stream.rows)
    forked[1]._key = sampler._key
    drawn = [each.clone() for each in stream.next_step()], next(iter(sampler))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    again = forked[0].next_step(), next(iter(forked[1]))
    assert torch.equal(torch.stack(drawn[0]), torch.stack(again[0])) == (seed is not None)
    assert (drawn[1] == again[1]) == (seed is not None)
    assert torch.equal(again[0][0][:4], again[0][1][:4])
    assert [int(each[5]) for each in forked[0].next_step()] == [2, 2]
