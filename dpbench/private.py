"""Train a model privately: Opacus's terms, PyTorch's loop, and the method of `FusedTrainer`.

Only PyTorch and Opacus are needed. Nothing of the benchmark is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.clipped_sums import groups_of
from dpbench.training.fused import FusedTrainer, OwnHook
from dpbench.training.noise_stream import AT_ONCE, chacha
from dpbench.training.parallel import rank_and_ranks, shared_key
from dpbench.training.phases import phase
from dpbench.workloads.base import Workload, examples_in

Losses = Callable[[Any, Any], Tensor]
"""Returns the losses of a batch's examples, ``[B]``. The arguments are the model and the batch."""

SAMPLING = -1
"""The number in place of a buffer's in the counters of random numbers for sampling."""


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    max_grad_norm: float,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: float | None = None,
    physical_batch_size: int | None = None,
    loss_reduction: str = "mean",
    accountant: str = "prv",
    seed: int | None = None,
    **loading: Any,
) -> Private:
    """Prepare private training of a model by DP-SGD with flat clipping.

    Args:
        model: the model, on its device. It is trained as it is, and not wrapped.
        optimizer: any optimizer of ``torch.optim`` with all trained parameters of the model.
        dataset: a dataset with a length. Each of its items is one example.
        batch_size: the expected number of examples in a batch, over all ranks. Each example is in a
            batch with the probability ``batch_size / len(dataset)``.
        max_grad_norm: C, the threshold to which each example's gradient is clipped.
        noise_multiplier: σ. The noise in a sum of clipped gradients has standard deviation σ·C.
        target_epsilon: the ε to reach after ``epochs``, in place of ``noise_multiplier``.
        target_delta: the δ of ``target_epsilon``.
        epochs: number of epochs for ``target_epsilon``. An epoch has ``len(private.loader)`` steps.
        physical_batch_size: the largest number of examples that `Private.step` trains at once. It
            changes memory and time only. None for no limit.
        loss_reduction: ``mean`` or ``sum``: what the loss of the usual loop is over a batch.
            `Private.step` ignores it.
        accountant: ``prv``, ``rdp`` or ``gdp``, see Opacus.
        seed: makes sampling and noise repeatable, and training therefore not private. None draws
            a key of 256 bits from the operating system, which is never saved.
        **loading: further arguments of PyTorch's ``DataLoader``, such as ``collate_fn``.

    Raises:
        ConfigurationError: an argument cannot be used, or the model cannot be trained privately.
    """
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigurationError("sampling needs a dataset with a length, and at least one example")
    if not 0 < batch_size <= len(dataset):
        raise ConfigurationError(
            f"batch_size is {batch_size}, and must be at least 1 and at most the number of "
            f"examples, {len(dataset)}"
        )
    if loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f"loss_reduction is {loss_reduction!r}, and must be mean or sum")
    rate = batch_size / len(dataset)
    targets = (target_epsilon, target_delta, epochs)
    if (noise_multiplier is None) == any(each is None for each in targets) or (
        noise_multiplier is not None and targets != (None, None, None)
    ):
        raise ConfigurationError(
            "give noise_multiplier, or all of target_epsilon, target_delta and epochs"
        )
    if noise_multiplier is None:
        steps = math.ceil(epochs * int(1 / rate))  # type: ignore[operator]
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            steps=steps,
            accountant=accountant,
        )
    return Private(
        model,
        optimizer,
        dataset,
        batch_size=batch_size,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        physical_batch_size=physical_batch_size or max(batch_size, 1),
        scales=loss_reduction == "mean",
        accountant=accountant,
        seed=seed,
        loading=loading,
    )


class Private:
    """Private training of one model. `make_private` makes it, and describes its arguments.

    Two loops train the model. The first is faster, because a GPU runs it as CUDA graphs::

        for batch in private.loader:
            loss = private.step(batch, losses)

        for inputs, labels in private.loader:
            loss = cross_entropy(private.model(inputs), labels)
            loss.backward()
            private.optimizer.step()

    Attributes:
        model: the model that was passed.
        optimizer: the optimizer, whose ``step`` adds noise. Schedulers accept it.
        loader: yields Poisson batches for one epoch. A batch may be empty, and still needs a step.
        steps: number of steps so far.
        noise_multiplier: σ.
        sample_rate: the probability with which an example is in a batch.
        trainer: does the work, see `FusedTrainer`. ``trainer.dropped`` counts examples of the last
            step that were left out, because their gradients were not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch_size: int,
        max_grad_norm: float,
        noise_multiplier: float,
        physical_batch_size: int,
        scales: bool,
        accountant: str,
        seed: int | None,
        loading: Mapping[str, Any],
    ) -> None:
        check_model(model, optimizer)
        ranks = rank_and_ranks()[1]
        if batch_size % ranks:
            raise ConfigurationError(f"batch_size must be a multiple of the {ranks} ranks")
        self.model, self.noise_multiplier, self._scales = model, noise_multiplier, scales
        self.steps, self._workload = 0, StepLosses()
        self.trainer = FusedTrainer(
            model,
            batch_size=batch_size // ranks,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            optimizer=lambda *_, **__: optimizer,
            workload=self._workload,
            sampling="poisson",
            parallel="ddp" if ranks > 1 else "none",
            seed=seed,
        )
        self.trainer.part_size = min(physical_batch_size, batch_size // ranks)
        self.optimizer = PrivateOptimizer(optimizer, self)
        self.accountant = create_accountant(accountant)
        self.sample_rate = batch_size / len(dataset)
        self._sampler = PoissonSampler(len(dataset), self.sample_rate, seed)
        collate = Collate(loading.get("collate_fn") or default_collate, dataset)
        options = {**loading, "batch_sampler": self._sampler, "collate_fn": collate}
        self.loader: DataLoader[Any] = DataLoader(dataset, **options)
        self._open = ExitStack()
        self._examples: int | None = None  # in the batch whose forward has begun
        self._steps_itself = False
        model.register_forward_pre_hook(OwnHook(self._begin), with_kwargs=True)

    def step(self, batch: Batch, losses: Losses) -> Tensor:
        """Take one private step, and return the mean loss before it; NaN for an empty batch.

        The loss is that of the batch, without noise: to publish it is not private.

        Args:
            batch: a batch of `loader`, which may be empty. It is moved to the model's device.
            losses: returns one loss for each example, ``[B]``, from the model and the batch.
        """
        self._workload.losses_of = losses
        device = self.trainer.trained[0].device
        batch = pytree.tree_map(lambda each: each.to(device, non_blocking=True), batch)
        self.discard()
        self._steps_itself = True
        try:
            loss = self.trainer.train_step(batch)
        finally:
            self._steps_itself = False
        self._count()
        return loss

    def epsilon(self, delta: float) -> float:
        """Return the ε of all steps so far, for this δ, from Opacus's accountant."""
        return float(self.accountant.get_epsilon(delta)) if self.steps else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the steps and the accountant's state, but no key.

        `PrivateOptimizer` has the same state. The model has its own, as usual.
        """
        own = {"steps": self.steps, "accountant": self.accountant.state_dict()}
        return {**self.optimizer.original.state_dict(), "private": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the ε of all steps before it."""
        if "private" not in state:
            raise ConfigurationError("this state has no private steps: load private.state_dict()")
        state = {**state}
        own = state.pop("private")
        self.optimizer.original.load_state_dict(state)
        self.accountant.load_state_dict(own["accountant"])
        self.steps = self._sampler.drawn = own["steps"]
        self.trainer.stream.rows[:, 5] = self.steps  # with a seed, no noise is drawn again

    def _count(self) -> None:
        self.steps += 1
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)

    # --- the usual loop --------------------------------------------------------------------------

    def _begin(self, model: nn.Module, given: Any, options: Any) -> None:
        """Prepare for the backward of a training forward."""
        if self._steps_itself or not (model.training and torch.is_grad_enabled()):
            return
        if self._examples is not None:
            raise ConfigurationError(
                "the model ran twice before optimizer.step(): run it under torch.no_grad() where "
                "it is not trained, or give up a batch with optimizer.zero_grad()"
            )
        leaves, structure = pytree.tree_flatten((given, options))
        where = [n for n, each in enumerate(leaves) if isinstance(each, Tensor)]
        batch = [leaves[n] for n in where]
        examples = examples_in(batch)
        self.trainer.begin_step()
        if not self.trainer.rules and examples:
            self._workload.losses_of = OutputMeans(leaves, where, structure)
            self._steps_itself = True
            try:
                self.trainer.prepare(batch)
            finally:
                self._steps_itself = False
        self._examples = self.trainer.examples = examples
        self.trainer.sizes = [examples]
        self._open.enter_context(self.trainer.without_parameter_gradients())

    def discard(self) -> None:
        """Give up a batch whose forward has begun."""
        self._open.close()
        self._examples = None
        self.trainer.seen = {}

    def step_after_backward(self) -> None:
        """Take the step of the usual loop. `PrivateOptimizer.step` calls it."""
        examples, trainer = self._examples, self.trainer
        self._open.close()
        if examples is None or (examples and not any(trainer.seen.values())):
            self.discard()
            raise ConfigurationError(
                "optimizer.step() needs a forward of the model in training mode, and one backward "
                "of its loss, before each step"
            )
        trainer.loss_scale = examples if examples and self._scales else 1
        try:
            if examples:
                with phase("clip"):
                    trainer.reduce_all(trainer.clipped(last=True))
            self.discard()
            trainer.update()
        finally:
            trainer.loss_scale = 1
        self._count()


class PrivateOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer in the usual loop. Its `step` takes a private step."""

    def __init__(self, optimizer: torch.optim.Optimizer, private: Private) -> None:
        self.original, self._private = optimizer, private

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a private optimizer cannot be copied: save private.state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the private training, see `Private.state_dict`."""
        return self._private.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the private training."""
        self._private.load_state_dict(state)

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise ConfigurationError("give all parameters to the optimizer before make_private")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Give up a batch whose forward has begun, and clear all gradients."""
        self._private.discard()
        self.original.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, add noise and update the parameters, after one forward and backward."""
        if closure is not None:
            raise ConfigurationError("a private step takes no closure")
        self._private.step_after_backward()


class StepLosses(Workload):
    """Computes losses by the function that a step was given."""

    losses_of: Losses

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batches(self, batch_size: int) -> Any:
        raise NotImplementedError

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self.losses_of(model, batch)

    def captured_with(self) -> SameFunction:
        return SameFunction(self.losses_of)


class SameFunction:
    """Equal to another object if its function has the same code, and the same objects beside it."""

    def __init__(self, function: Losses) -> None:
        self._function: Any = function  # keeps the objects alive, so that they keep their ids
        code, owner = getattr(function, "__code__", function), getattr(function, "__self__", None)
        beside = [each.cell_contents for each in getattr(function, "__closure__", None) or ()]
        beside += getattr(function, "__defaults__", None) or ()
        self._ids = [id(each) for each in (code, owner, *beside)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameFunction) and self._ids == other._ids

    __hash__ = None  # type: ignore[assignment]


class OutputMeans:
    """Computes for each example the mean of what the model returns, in place of a loss.

    In the usual loop, only the loss's value is known after the forward. So examples that the model
    mixes are noticed, and examples that the loss mixes are not.
    """

    def __init__(self, leaves: list[Any], where: list[int], structure: Any) -> None:
        self._leaves, self._where, self._structure = leaves, where, structure

    def __call__(self, model: Callable[..., Any], batch: Any) -> Tensor:
        leaves = [*self._leaves]
        for n, each in zip(self._where, batch, strict=True):
            leaves[n] = each
        given, options = pytree.tree_unflatten(leaves, self._structure)
        returned = model(*given, **options)
        examples = len(batch[0])
        tensors = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
        found = [
            each.flatten(1).mean(1) if each.dim() > 1 else each
            for each in tensors
            if each.is_floating_point() and each.shape[:1] == (examples,)
        ]
        if not found:
            raise ConfigurationError(
                "the model returns no tensor whose first dimension is the example: use private.step"
            )
        return torch.stack(found).sum(0)


class PoissonSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's sampler, with random numbers of ChaCha in place of a generator with a short seed.

    Each example is in a batch with the same probability, independent of all other examples and
    batches. Under DDP, all ranks draw the same batch, and each takes its part of it.

    Args:
        examples: number of examples in the dataset.
        sample_rate: the probability.
        seed: see `make_private`.
    """

    def __init__(self, examples: int, sample_rate: float, seed: int | None) -> None:
        super().__init__(num_samples=examples, sample_rate=sample_rate)
        self.drawn = 0
        ranks = rank_and_ranks()[1]
        device = torch.device("cpu")
        if ranks > 1 and distributed.get_backend() == "nccl":
            device = torch.device("cuda")
        key = shared_key(seed, device, "ddp" if ranks > 1 else "none").cpu()
        self._key = key.view(torch.int32)

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = rank_and_ranks()
        for _ in range(self.steps):
            self.drawn += 1
            yield self._batch(self.drawn)[rank::ranks]

    def _batch(self, step: int) -> list[int]:
        low, high = torch.tensor([step]).view(torch.int32)
        blocks, chosen = -(-self.num_samples // 8), []
        for first in range(0, blocks, AT_ONCE):
            places = torch.arange(first, min(first + AT_ONCE, blocks), dtype=torch.int32)
            rest = [torch.full_like(places, int(each)) for each in (SAMPLING, low, high)]
            words = chacha(self._key, torch.stack([places, *rest])).long() & 0xFFFFFFFF
            uniform = (words[::2] >> 5 << 26 | words[1::2] >> 6).t().flatten()  # of 53 bits
            chosen.append((uniform < self.sample_rate * 2**53).nonzero().flatten() + 8 * first)
        every = torch.cat(chosen)
        return every[every < self.num_samples].tolist()

    def __reduce__(self) -> Any:
        raise TypeError("a sampler with a secret key cannot be copied")


class Collate:
    """Joins examples to a batch. An empty batch has the form of others, with no examples."""

    def __init__(self, function: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._function, self._dataset = function, dataset

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self._function(examples)
        return pytree.tree_map(lambda each: each[:0], self._function([self._dataset[0]]))


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer lacks a trained parameter, or the model is distributed already."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigurationError("the model has no parameter that is trained")
    lacking = [name for name, p in trained.items() if p not in groups_of(optimizer)]
    if lacking:
        raise ConfigurationError(
            f"the optimizer lacks parameter {lacking[0]}: give it all trained parameters, or "
            f"freeze this one with requires_grad_(False)"
        )
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if wrapped or any(isinstance(p, DTensor) for p in trained.values()):
        raise ConfigurationError(
            "pass the plain model: under torchrun, make_private reduces gradients over the ranks "
            "itself, as DDP does; shards (FSDP) are not supported"
        )
