"""Run by `tests.training.test_triton_kernels` in a process in which Triton interprets kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton.language as tl

from dpbench.training import triton_kernels
from dpbench.training.noise_stream import BLOCK, NoiseStream
from dpbench.training.noisy_updates import Scalars, noisy_update

LENGTH = 2 * 16 * BLOCK + 100


class Libdevice:
    """In place of fast instructions, which the interpreter does not have."""

    @staticmethod
    def fast_sinf(x: Any) -> Any:
        return tl.sin(x)

    @staticmethod
    def fast_cosf(x: Any) -> Any:
        return tl.cos(x)


def main() -> None:
    kernels: Any = triton_kernels
    kernels.libdevice = Libdevice
    stream = NoiseStream(3, torch.device("cpu"), seed=5)
    stream.rows[:, 5] = 2**32 - 1  # earlier steps differ in both halves
    row = stream.next_step()[2]
    scalars, weights = Scalars(3.0, 1.0, rate=-1.0, beta1=0.5), torch.tensor([1.0, -0.5, 0.25])
    for formula, bands in product(("plain", "adam"), (1, 3)):
        ours, theirs = (torch.zeros(4, LENGTH).unbind() for _ in range(2))
        kernels.noisy_update[3,](*ours, LENGTH, row, weights, *scalars, formula, BLOCK, bands)
        p, first, second, gradient = theirs
        moments = [first, second] if formula == "adam" else []
        band_weights = weights if bands > 1 else None
        noisy_update(p, moments, gradient, row, formula, scalars, band_weights)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
