"""Noise that is kept in memory for later steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpbench.instruments.logical.logical import Logical
from dpbench.training import gradient_sums
from dpbench.training.correlated_noise import Mechanism, mechanism
from dpbench.training.kept_noise import KeptNoise
from tests.instruments.logical.cases import moved, parameters, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_noise_adds_the_last_ones_with_their_weights(dtype: torch.dtype) -> None:
    weights = (1.0, -0.5, 0.25)
    kept, generator = KeptNoise(Mechanism(weights)), torch.Generator().manual_seed(0)
    again = torch.Generator().manual_seed(0)
    drawn: list[Tensor] = []
    for _ in range(7):
        total = torch.ones(3, 5, dtype=dtype)
        kept.add_to(total, 2.0, "one", generator)
        drawn.insert(0, torch.empty(15).normal_(std=2.0, generator=again))
        noise = torch.zeros(15)
        for weight, each in zip(weights, drawn, strict=False):
            noise += weight * each
        torch.testing.assert_close(total, (1 + noise).to(dtype).view(3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_make_the_noise_of_all_weights(dtype: torch.dtype) -> None:
    chosen = mechanism("blt", buffers=3, steps=7)
    kept, generator, again = KeptNoise(chosen), *(torch.Generator().manual_seed(0) for _ in "ab")
    drawn: list[Tensor] = []
    for _ in range(7):
        total = torch.ones(3, 5, dtype=dtype)
        kept.add_to(total, 2.0, "one", generator)
        drawn.insert(0, torch.empty(15).normal_(std=2.0, generator=again))
        noise = sum((w * z for w, z in zip(chosen.weights, drawn, strict=False)), torch.zeros(15))
        torch.testing.assert_close(total, (1 + noise).to(dtype).view(3, 5))


def test_tensors_have_noise_of_their_own() -> None:
    kept, totals = KeptNoise(mechanism("banded", 3)), torch.zeros(2, 10)
    for _ in range(4):
        for key, total in enumerate(totals):
            kept.add_to(total, 1.0, key)
    assert len({*totals.view(-1).tolist()}) == 20


@pytest.fixture
def noise_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], float]:
    """Counts the bytes of a step's noise, read and written, in copies of the model."""
    monkeypatch.setattr(gradient_sums, "LARGE", 0)  # no parameters share a buffer

    def copies(trainer: str) -> float:
        counted = Logical().count(tiny(trainer))
        return sum(moved(counted, "noise")) / 4 / sum(parameters(tiny()))

    return copies


@pytest.mark.parametrize("rows", [1, 4])
def test_a_copy_more_is_read_once_and_only_the_oldest_is_written(
    rows: int, noise_bytes: Callable[[str], float]
) -> None:
    more = noise_bytes(f"lean:noise=banded,bands={rows + 1}") - noise_bytes("lean")
    assert more == pytest.approx(rows + 1, rel=0.02)


def test_a_buffer_is_read_and_written_once(noise_bytes: Callable[[str], float]) -> None:
    more = noise_bytes("lean:noise=blt,buffers=4") - noise_bytes("lean")
    assert more == pytest.approx(2 * 4, rel=0.02)
