"""Draws Poisson batches of a dataset, with random numbers that nobody can predict."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, distributed

from dpbench.core.errors import ConfigurationError
from dpbench.training.noise_stream import AT_ONCE, chacha
from dpbench.training.parallel import rank_and_ranks, shared_key

SAMPLING = -1
"""The number in place of a buffer's in the counters of random numbers for sampling."""


class PoissonSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's sampler, with random numbers of ChaCha in place of a generator with a short seed.

    Each example is in a batch with the same probability, independent of all other examples and
    batches. Under DDP, all ranks draw the same batch, and each takes its part of it.

    Attributes:
        drawn: the number of the last batch.
        unused: sizes of batches for which no step was taken yet.

    Args:
        examples: number of examples in the dataset.
        batch_size: the expected number of examples in a batch.
        seed: see `make_private`.
    """

    def __init__(self, examples: int, batch_size: int, seed: int | None) -> None:
        rate = batch_size / examples
        super().__init__(num_samples=examples, sample_rate=rate, steps=examples // batch_size)
        self.drawn, self.unused = 0, list[int]()
        ranks = rank_and_ranks()[1]
        device = torch.device("cpu")
        if ranks > 1 and distributed.get_backend() == "nccl":
            device = torch.device("cuda")
        key = shared_key(seed, device, "ddp" if ranks > 1 else "none").cpu()
        self._key = key.view(torch.int32)
        self._process, self._is_alone = os.getpid(), seed is None and ranks == 1

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = rank_and_ranks()
        self.unused = [size for size in self.unused if size]  # of a loop that ended early
        for _ in range(self.steps):
            if self._is_alone and self._process != os.getpid():  # a fork draws other batches
                self._process = os.getpid()
                self._key = shared_key(None, torch.device("cpu"), "none").view(torch.int32)
            self.drawn += 1
            chosen = self._batch(self.drawn)[rank::ranks]
            self.unused.append(len(chosen))
            yield chosen

    def check(self, examples: int) -> None:
        """Raise unless a batch of this size waits for its step."""
        if examples not in self.unused:
            waiting = f"the next batch has {self.unused[0]}" if self.unused else "none was drawn"
            raise ConfigurationError(
                f"a step has {examples} examples, but {waiting}, so its ε would be unknown: take "
                f"one step for each batch of private.loader, in which each example is one row"
            )
        given_up = self.unused[: self.unused.index(examples)]
        if given_up and not any(given_up):
            raise ConfigurationError(
                "an empty batch of private.loader got no step, so ε would be too low: a step "
                "without examples has noise too, so pass each batch, and do not skip losses of NaN"
            )

    def use(self, examples: int) -> None:
        """Note that a step was taken. Batches that were drawn before this one are given up."""
        del self.unused[: self.unused.index(examples) + 1]

    def _batch(self, number: int) -> list[int]:
        blocks, chosen = -(-self.num_samples // 8), []
        for first in range(0, blocks, AT_ONCE):
            places = torch.arange(first, min(first + AT_ONCE, blocks))
            chosen.append(self._chosen(places, torch.tensor([number])).nonzero().flatten())
            chosen[-1] += 8 * first
        every = torch.cat(chosen)
        return every[every < self.num_samples].tolist()

    def _chosen(self, places: Tensor, number: Tensor) -> Tensor:
        """Return whether each example is in the batch of a number, for 8 examples at each place."""
        low, high = number.view(-1, 1).view(torch.int32).t()
        counter = [places.int(), torch.full_like(places, SAMPLING).int(), low, high]
        counters = torch.stack([each.expand_as(places) for each in counter])
        words = chacha(self._key, counters).long() & 0xFFFFFFFF
        uniform = (words[::2] >> 5 << 26 | words[1::2] >> 6).t().flatten()  # of 53 bits
        return uniform.lt(math.ceil(self.sample_rate * 2**53))  # exact, unlike float32

    def __reduce__(self) -> Any:
        raise TypeError("a sampler with a secret key cannot be copied")


class Collate:
    """Joins examples to a batch. An empty batch has the form of others, with no examples."""

    def __init__(self, function: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._function, self._dataset = function, dataset

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self._function(examples)
        return without_examples(self._function([self._dataset[0]]))


def without_examples(batch: Any) -> Any:
    """Return a batch of the same form, in which tensors and lists of strings have no examples."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, (list, tuple)):
        kept = [without_examples(each) for each in batch if not isinstance(each, (str, bytes))]
        return type(batch)(*kept) if hasattr(batch, "_fields") else type(batch)(kept)
    made = copy.copy(batch)
    if isinstance(batch, MutableMapping):
        for name in batch:
            made[name] = without_examples(batch[name])
    elif dataclasses.is_dataclass(batch):
        for name, each in vars(batch).items():
            object.__setattr__(made, name, without_examples(each))
    return made


def as_plain(batch: Any) -> Any:
    """Replace mappings of other packages in a batch by dictionaries."""
    if isinstance(batch, Mapping):
        return {name: as_plain(each) for name, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(as_plain, batch))
    return batch
