"""Train a model privately: Opacus's terms, PyTorch's loop, and the method of `FusedTrainer`.

Only PyTorch and Opacus are needed. Nothing of the benchmark is imported.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_collate

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.training.base import Batch
from dpbench.training.fused import GIVEN_UP, FusedTrainer, OwnHook
from dpbench.training.graphs import codes_in, values_of
from dpbench.training.parallel import rank_and_ranks
from dpbench.training.phases import phase
from dpbench.training.plan import OutputSums
from dpbench.training.poisson import Collate, PoissonSampler, as_plain
from dpbench.training.refusals import check_plain
from dpbench.workloads.base import Workload, examples_in

MISSING: Any = None
"""The default of an argument that `make_private` needs, so that an error can say what to write."""

Losses = Callable[[Any, Any], Tensor]
"""Returns the losses of a batch's examples, ``[B]``. The arguments are the model and the batch."""

ACCOUNTANTS = ("prv", "rdp", "gdp")

ROOM = 2
"""How many standard deviations above their mean the sizes of batches that are trained at once are.
Half of all Poisson batches are larger than the mean, and each of them would be divided into two."""


def make_private(
    model: nn.Module = MISSING,
    optimizer: torch.optim.Optimizer = MISSING,
    dataset: Any = MISSING,
    *,
    batch_size: int = MISSING,
    max_grad_norm: float = MISSING,
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
            changes memory and time only. None for room for nearly every batch, see `ROOM`.
        loss_reduction: ``mean`` or ``sum``: what the loss of the usual loop is over a batch.
            `Private.step` ignores it.
        accountant: ``prv``, ``rdp`` or ``gdp``, see Opacus.
        seed: makes sampling and noise repeatable, and training therefore not private. None draws
            a key of 256 bits from the operating system, which is never saved.
        **loading: further arguments of PyTorch's ``DataLoader``, such as ``collate_fn``.

    Raises:
        ConfigurationError: an argument cannot be used, or the model cannot be trained privately.
    """
    missing = any(each is None for each in (model, optimizer, dataset))
    if missing or isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "write make_private(model, optimizer, dataset, batch_size=…, max_grad_norm=…): model "
            "for Opacus's module=, and a dataset with batch_size for its data_loader=, see the "
            "table in docs/train.md"
        )
    check_arguments(
        dataset,
        loading,
        batch_size=batch_size,
        physical_batch_size=physical_batch_size,
        loss_reduction=loss_reduction,
        accountant=accountant,
        max_grad_norm=max_grad_norm,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        epochs=epochs,
    )
    targets = (target_epsilon, target_delta, epochs)
    if (noise_multiplier is None) == any(each is None for each in targets) or (
        noise_multiplier is not None and targets != (None, None, None)
    ):
        raise ConfigurationError(
            "give noise_multiplier, or all of target_epsilon, target_delta and epochs"
        )
    if noise_multiplier is None:
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=batch_size / len(dataset),
            steps=math.ceil(epochs * (len(dataset) // batch_size)),  # type: ignore[operator]
            accountant=accountant,
        )
    check_model(model, optimizer)
    ranks = rank_and_ranks()[1]
    if batch_size % ranks:
        raise ConfigurationError(f"batch_size must be a multiple of the {ranks} ranks")
    sampler = PoissonSampler(len(dataset), batch_size, seed)
    collate = Collate(loading.get("collate_fn") or default_collate, dataset)
    options = {**loading, "batch_sampler": sampler, "collate_fn": collate}
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    trainer = FusedTrainer(
        model,
        batch_size=batch_size // ranks,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        optimizer=lambda *_, **__: optimizer,
        workload=StepLosses(None),
        sampling="poisson",
        parallel="ddp" if ranks > 1 else "none",
        seed=seed,
    )
    usual = batch_size // ranks
    room = math.ceil(usual + ROOM * math.sqrt(usual))
    trainer.part_size = min(physical_batch_size or room, room, len(dataset))
    scales = loss_reduction == "mean"
    return Private(trainer, loader, sampler, create_accountant(accountant), scales=scales)


class Private:
    """Private training of one model. `make_private` makes it, and describes its arguments.

    Two loops train the model. The first runs as CUDA graphs on a GPU where possible, and it checks
    more, because it knows how losses are computed::

        for batch in private.loader:
            loss = private.step(batch, losses)

        for inputs, labels in private.loader:
            loss = cross_entropy(private.model(inputs), labels)
            loss.backward()
            private.optimizer.step()

    The loss of the second loop must be the mean or the sum over examples. It must not be divided by
    another number of the batch, such as its tokens, and it trains only what the model's output
    depends on. A forward without a backward is ignored. `parts` divides large batches, and leaves
    out empty ones, with which some models do not run.

    Attributes:
        model: the model that was passed.
        optimizer: the optimizer, whose ``step`` adds noise. Schedulers accept it.
        loader: yields Poisson batches for one epoch. A batch may be empty, and still needs a step.
        steps: number of steps so far.
        trainer: does the work, see `FusedTrainer`. ``trainer.dropped`` counts examples of the last
            step that were left out, because their gradients were not finite.
    """

    def __init__(
        self,
        trainer: FusedTrainer,
        loader: DataLoader[Any],
        sampler: PoissonSampler,
        accountant: Any,
        *,
        scales: bool,
    ) -> None:
        self.trainer, self.loader, self.accountant, self.steps = trainer, loader, accountant, 0
        self.model, self.optimizer = trainer.model, PrivateOptimizer(self)
        self._sampler, self._scales = sampler, scales
        self._open = ExitStack()
        self._examples: int | None = None  # in the batch whose forward has begun
        self._parted: bool | None = None  # whether all parts of a batch are clipped; None: no parts
        self._clipped = self._forwards = 0  # examples of this step, and forwards so far
        self._works = False  # whether the trainer runs the model and the optimizer
        self._checked: set[Any] = set()
        self.model.register_forward_pre_hook(PrivateHook(self._begin), with_kwargs=True)
        self.model.register_forward_hook(PrivateHook(self._watch))
        trainer.plain_optimizer.register_step_pre_hook(PrivateHook(self._check_step))

    @property
    def noise_multiplier(self) -> float:
        """σ of the trainer, which `epsilon` counts for each step."""
        return self.trainer.noise_multiplier

    @property
    def sample_rate(self) -> float:
        """The probability with which an example is in a batch."""
        return float(self._sampler.sample_rate)

    def step(self, batch: Batch, losses: Losses) -> Tensor:
        """Take one private step, and return the mean loss before it; NaN for an empty batch.

        The loss is that of the batch, without noise: to publish it is not private.

        Args:
            batch: a batch of `loader`, which may be empty. It is moved to the model's device.
            losses: returns one loss for each example, ``[B]``, from the model and the batch.
        """
        batch = self._placed(batch)
        self.discard()
        self._sampler.check(examples := examples_in(batch))
        if not callable(losses):
            raise ConfigurationError(f"losses must be a function, not a {type(losses).__name__}")
        codes = codes_in(values_of(losses))
        self.trainer.workload, self.trainer.loss_scale = StepLosses(losses), 1
        with self._working(), torch.enable_grad():
            if self.trainer.rules and not codes <= self._checked and examples:
                self.trainer.check_losses(batch)
            loss = self.trainer.take_step(batch)
        if examples:
            self._checked |= codes
        self._count(examples)
        return loss

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Divide a batch for the usual loop into parts of at most ``physical_batch_size`` examples.

        Each part has its own forward and backward, before ``optimizer.step()``. An empty batch has
        no parts. Parts are moved to the model's device.
        """
        batch = self._placed(batch)
        self._begin_batch()
        self._parted = False
        for _, part in self.trainer.parts(batch):
            yield part
            self._clip()
        self._parted = True

    def epsilon(self, delta: float) -> float:
        """Return the ε of all steps so far, for this δ, from Opacus's accountant."""
        if not 0 < delta < 1:
            raise ConfigurationError(f"delta is {delta}, and must be between 0 and 1")
        if any(sigma == 0 for sigma, _, _ in self.accountant.history):
            return math.inf
        return float(self.accountant.get_epsilon(delta)) if self.steps else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the steps and the accountant's state, but no key.

        `PrivateOptimizer` has the same state. The model has its own, as usual.
        """
        own = {"steps": self.steps, "accountant": self.accountant.state_dict()}
        return {**self.optimizer.original.state_dict(), "private": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the ε of all steps before it.

        Steps that this process took after the state was saved no longer count. Their noise is not
        drawn again.
        """
        if "private" not in state:
            raise ConfigurationError(
                "this state has no private steps: it must be of private.state_dict(), or in a "
                "checkpoint that PrivateTrainer has written"
            )
        own = state["private"]
        self.optimizer.original.load_state_dict({n: x for n, x in state.items() if n != "private"})
        self.accountant.load_state_dict(copy.deepcopy(own["accountant"]))
        self.steps = own["steps"]
        # No noise and no batch is drawn again, neither with a seed nor after a step back.
        self._sampler.drawn = max(self._sampler.drawn, self.steps)
        self.trainer.stream.rows[:, 5].clamp_(min=self.steps)

    def _count(self, examples: int) -> None:
        self.steps += 1
        self._sampler.use(examples)
        self.optimizer.original._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """In this context, the trainer may run the model and the optimizer."""
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def _placed(self, batch: Batch) -> Batch:
        """Return a batch with plain dictionaries, on the model's device."""
        batch, device = as_plain(batch), self.trainer.trained[0].device
        examples_in(batch)  # raises if it is no batch
        return pytree.tree_map(lambda each: each.to(device, non_blocking=True), batch)

    def _check_step(self, *_: Any) -> None:
        if not self._works:
            raise ConfigurationError(
                "this optimizer trains privately now: call private.optimizer.step() or "
                "private.step(batch, losses), not its own step"
            )

    # --- the usual loop --------------------------------------------------------------------------

    def _begin_batch(self) -> None:
        self.discard()
        self._clipped = 0
        self.trainer.begin_step()

    def _begin(self, model: nn.Module, given: Any, options: Any) -> None:
        """Prepare for the backward of a training forward."""
        if self._works or not (model.training and torch.is_grad_enabled()):
            return
        if self.heard():
            raise ConfigurationError(
                "the model ran again after a backward, before private.optimizer.step(): take one "
                "step for each backward, divide a batch by private.parts(batch), or give it up "
                "with private.optimizer.zero_grad()"
            )
        leaves, structure = pytree.tree_flatten((given, options))
        where = [n for n, each in enumerate(leaves) if isinstance(each, Tensor)]
        batch = [leaves[n] for n in where]
        examples = examples_in(batch)
        if self._parted is None:
            self._begin_batch()
        self._forget()
        if examples and not self.trainer.is_prepared(batch):
            sums = OutputSums(leaves, where, structure, scales=self._scales)
            self.trainer.workload = StepLosses(sums)
            with self._working():
                sums.check_loss(model, batch)
                self.trainer.prepare(batch)
        self._examples = self.trainer.examples = examples
        if examples:
            self._open.enter_context(self.trainer.without_parameter_gradients())

    def _watch(self, model: nn.Module, given: Any, returned: Any) -> None:
        """Let a backward raise if its forward was given up."""
        if self._examples is None or self._works:
            return
        number = self._forwards

        def check(_: Tensor) -> None:
            if number != self._forwards:
                raise ConfigurationError(GIVEN_UP)

        for each in pytree.tree_leaves(returned):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(check)

    def heard(self) -> bool:
        """Return True if a backward has begun, for which no step was taken."""
        begun = self._examples is not None and any(self.trainer.seen.values())
        return begun or bool(self._parted)

    def _forget(self) -> None:
        """Give up a forward."""
        self._open.close()
        self._examples, self.trainer.seen = None, {}
        self._forwards += 1

    def discard(self) -> None:
        """Give up a batch whose forward or backward has begun."""
        self._forget()
        self._parted = None

    def _clip(self) -> None:
        """Add the clipped gradients of a forward and backward to the sums."""
        examples, trainer = self._examples, self.trainer
        if examples is None or (examples and not self.heard()):
            self.discard()
            raise ConfigurationError(
                "private.optimizer.step() needs a forward of the model in training mode, and one "
                "backward of its loss, before each step"
            )
        self._open.close()
        if examples:
            trainer.loss_scale = examples if self._scales else 1
            with self._working(), phase("clip"):  # a module without a rule runs once more
                trainer.reduce_all(trainer.clipped(last=self._parted is None))
            self._clipped += examples
        self._forget()

    def step_after_backward(self) -> None:
        """Take the step of the usual loop. `PrivateOptimizer.step` calls it."""
        if self._parted is False:
            raise ConfigurationError("private.parts(batch) has more parts: train all, then step")
        if not self._parted:
            self._clip()
        self.discard()
        self._sampler.check(self._clipped)
        with self._working():
            self.trainer.update()
        self.optimizer.original.zero_grad()
        self._count(self._clipped)


class PrivateHook(OwnHook):
    """A hook of a model or optimizer that trains privately."""

    changes_nothing = True
    """So that the optimizer's step may be merged with the noise."""


class PrivateOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer in the usual loop. Its `step` takes a private step."""

    def __init__(self, private: Private) -> None:
        self.original, self._private = private.trainer.plain_optimizer, private

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

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
        """Give up a backward. A forward stays, as the usual order is forward, this, backward."""
        if self._private.heard():
            self._private.discard()
        self.original.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, add noise and update the parameters, after one forward and backward."""
        if closure is not None:
            raise ConfigurationError("a private step takes no closure")
        self._private.step_after_backward()


class StepLosses(Workload):
    """Computes losses by the function that a step was given."""

    losses_name = "losses"

    def __init__(self, losses: Losses | None) -> None:
        self._losses = losses

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batches(self, batch_size: int) -> Any:
        raise NotImplementedError

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        assert self._losses
        return self._losses(model, batch)

    def captured_with(self) -> object:
        return values_of(self._losses)


OWN_OPTIONS = ("shuffle", "sampler", "batch_sampler", "drop_last", "dataset")
"""Arguments of ``DataLoader`` that Poisson sampling sets."""


def check_arguments(dataset: Any, loading: Mapping[str, Any], **named: Any) -> None:
    """Raise if an argument of `make_private` cannot be used."""
    if wrong := [name for name in OWN_OPTIONS if name in loading]:
        raise ConfigurationError(f"make_private draws Poisson batches itself: leave out {wrong[0]}")
    known = {*signature(make_private).parameters, *signature(DataLoader).parameters}
    if wrong := [name for name in loading if name not in known]:
        raise unknown("argument of make_private", wrong[0], sorted(known - {"loading"}))
    kept = all(hasattr(dataset, each) for each in ("__len__", "__getitem__"))
    if isinstance(dataset, IterableDataset) or not kept or not len(dataset):
        raise ConfigurationError(
            f"sampling needs a dataset of examples with a length above 0 and items by number, and "
            f"got a {type(dataset).__name__}"
        )
    most = len(dataset)
    for name, right, must in (
        ("batch_size", named["batch_size"] in range(1, most + 1),
         f"be at least 1 and at most the number of examples, {most}"),
        ("loss_reduction", named["loss_reduction"] in ("mean", "sum"), "be mean or sum"),
        ("max_grad_norm", isinstance(named["max_grad_norm"], (int, float)), "be one number"),
        ("target_delta", (delta := named["target_delta"]) is None or 0 < delta < 1,
         "be between 0 and 1"),
        *((name, named[name] is None or named[name] > 0, "be above 0")
          for name in ("physical_batch_size", "target_epsilon", "epochs")),
        ("accountant", named["accountant"] in ACCOUNTANTS, f"be one of {', '.join(ACCOUNTANTS)}"),
    ):  # fmt: skip
        if not right:
            raise ConfigurationError(f"{name} is {named[name]!r}, and must {must}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        raise ConfigurationError("under torchrun, call torch.distributed.init_process_group first")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the model trains privately already, or the optimizer does not fit it."""
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(each, PrivateHook) and each.acts for each in hooks):
        raise ConfigurationError(
            "make_private was called for this model before: go on with what it returned, whose ε "
            "counts all steps, or pass copy.deepcopy(model) with a new optimizer"
        )
    check_plain(model, optimizer)
