"""The random numbers of a trainer's noise: ChaCha with 12 rounds, and normal numbers of its words.

ChaCha (Bernstein, "ChaCha, a variant of Salsa20", 2008) turns a key of 256 bits and a counter into
a block of 16 words of 32 bits. Whoever lacks the key cannot tell these words from random words. The
best known attacks reach 7 rounds (Aumasson, "Too Much Crypto", 2019,
https://eprint.iacr.org/2019/1492). The state has the layout of RFC 8439: four constants, the key,
and the counter. The four words of the counter are the block's position in its buffer, the number
of the buffer, and the step, 64 bits. So no counter is used for two noises. Triton kernels and
PyTorch compute the same words. The method of Box and Muller turns each pair of words into a pair of
normal numbers, with float32 rounding.

Noise is not private in these cases:

- The key is derived from a seed. Whoever knows the seed knows all noise, and after a restart the
  same noise is added to other gradients, so that a difference contains no noise.
- Somebody reads the memory of a process that trains.
- Somebody uses the rounding of floating-point numbers. Sums of gradients and noise are only some of
  all floating-point numbers, and which of them can occur depends on the gradients. This was shown
  for Laplace noise (Mironov, "On Significance of the Least Significant Bits for Differential
  Privacy", 2012) and for Gaussian noise, also of DP-SGD (Jin et al., "Are We There Yet?", 2022,
  https://arxiv.org/abs/2112.05307). A sum of several draws makes the attack expensive (Holohan and
  Braghin, "Secure Random Sampling in Differential Privacy", 2021,
  https://arxiv.org/abs/2107.10138). Opacus adds four draws and halves the sum if ``secure_mode`` is
  on. dpbench draws once.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from dpbench.training.parallel import rank_and_ranks, shared_key

ROUNDS = 12
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""The first words of ChaCha's state, for keys of 256 bits."""

BLOCK = 256
"""Number of blocks of ChaCha in one program of the Triton kernel. Element ``16 × BLOCK × p +
BLOCK × i + j`` of a buffer has number i of the block at position ``BLOCK × p + j``."""

AT_ONCE = 2**13
"""Number of blocks that PyTorch computes at the same time. They fit into the cache of a CPU."""

MOST_ELEMENTS = 16 * 2**32
"""Largest number of elements of a buffer, for whose blocks there are different positions."""


class NoiseStream:
    """A key, and the counters of the next step for each buffer.

    The key is in no ``state_dict``. A copy of the stream, also one from a file or in a forked
    process, has a new key, because two trainers must not draw the same noise.

    Args:
        buffers: number of buffers.
        device: device of the buffers.
        seed: see `dpbench.training.base.TrainerBase`.
        parallel: how ranks share a step. Under FSDP2, the buffers of all ranks have different
            numbers. Otherwise, all ranks draw the same noise.
    """

    def __init__(
        self, buffers: int, device: torch.device, seed: int | None = None, parallel: str = "none"
    ) -> None:
        first = rank_and_ranks()[0] * buffers if parallel == "fsdp2" else 0
        numbers = torch.arange(first, first + buffers, device=device)[:, None]
        key = shared_key(seed, device, parallel).expand(buffers, 4)
        self.rows = torch.cat([key, numbers, torch.zeros_like(numbers)], 1)
        """``[buffers, 6]`` int64: for each buffer the key, the buffer's number and the step."""
        self._process = os.getpid()
        self._is_alone = seed is None and parallel == "none"

    def next_step(self) -> tuple[Tensor, ...]:
        """Begin a step, and return the argument ``stream`` of operators for each buffer."""
        if self._is_alone and self._process != os.getpid():
            self._process = os.getpid()
            self.rows[:, :4] = shared_key(None, self.rows.device, "none")
        self.rows[:, 5] += 1
        return self.rows.unbind()

    def __reduce__(self) -> tuple[Any, ...]:
        return NoiseStream, (len(self.rows), self.rows.device)


def chacha(key: Tensor, counters: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return a block of 16 words for each counter, ``[16, n]`` int32.

    Args:
        key: ``[8]`` int32.
        counters: words 12 to 15 of the state, ``[4, n]`` int32.
        rounds: number of rounds, even.
    """
    n = counters.shape[1]
    fixed = torch.cat([key.new_tensor(CONSTANTS), key])
    words = torch.cat([fixed[:, None].expand(12, n), counters])
    a, b, c, d = words.clone().view(4, 4, n).unbind()
    for number in range(rounds):
        for by in (16, 12, 8, 7):
            a.add_(b)
            high = d.bitwise_xor_(a) << by
            d.bitwise_right_shift_(32 - by).bitwise_and_((1 << by) - 1).bitwise_or_(high)
            a, b, c, d = c, d, a, b
        turn = 1 if number % 2 else -1  # the next round mixes diagonals, or columns again
        b, c, d = b.roll(turn, 0), c.roll(2 * turn, 0), d.roll(3 * turn, 0)
    return words.add_(torch.cat([a, b, c, d]))


def normal_numbers(stream: Tensor, length: int, dtype: torch.dtype, age: int = 0) -> Tensor:
    """Return the normal numbers of a buffer, ``[length]``.

    Args:
        stream: the buffer's element of `NoiseStream.next_step`.
        length: number of the buffer's elements.
        dtype: float32 or float64, in which numbers are computed.
        age: number of steps since the numbers were first drawn.
    """
    key, buffer = stream[:4].view(torch.int32), stream[4]
    low, high = (stream[5:] - age).view(torch.int32).unbind()
    blocks = -(-length // (16 * BLOCK)) * BLOCK
    parts = []
    for first in range(0, blocks, AT_ONCE):
        places = torch.arange(first, min(first + AT_ONCE, blocks), device=stream.device)
        counters = torch.stack([places, *(each.expand_as(places) for each in (buffer, low, high))])
        parts.append(_normal(chacha(key, counters.to(torch.int32)), dtype))
    return torch.cat(parts)[:length] if parts else stream.new_empty(0, dtype=dtype)


def _normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn blocks of words, ``[16, n]``, into normal numbers in the order of a buffer's elements.

    The kernel's `dpbench.training.triton_kernels.normal_pair` has the same formula.
    """
    uniform = words.view(torch.uint32).to(dtype).mul_(2.0**-32).add_(2.0**-33)
    radius, angle = uniform[::2].log().mul_(-2).sqrt_(), uniform[1::2] * (2 * math.pi)
    pairs = torch.stack([radius * angle.sin(), radius * angle.cos()], 1)
    return pairs.view(16, -1, BLOCK).transpose(0, 1).flatten()
