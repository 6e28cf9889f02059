"""Opacus's flat clipping without the bytes that it moves needlessly.

Each change leaves the arithmetic of a step as it is, is small enough to go upstream (Opacus 1.6.0,
https://github.com/meta-pytorch/opacus), and can be had alone: ``lean:changes=kept``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample import grad_sample_module as hooks
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed, nn

from dpbench.core.errors import unknown
from dpbench.training.base import DRAWN_BY, Batch
from dpbench.training.dpsgd import OpacusTrainer
from dpbench.training.gradient_sums import in_buffers, one_buffer, rounded_down
from dpbench.training.norm_bounds import clipping_factors, squared_norms_of_samples, total
from dpbench.training.parallel import own_generator, own_part, summed
from dpbench.training.phases import phase

T = TypeVar("T", bound=Tensor)

CHANGES = ("kept", "summed", "unused", "noise", "reduce")


def chosen(changes: str, known: Collection[str]) -> frozenset[str]:
    """The names in a text such as ``kept+noise``; ``all`` of them, or none in an empty text."""
    names = known if changes == "all" else changes.split("+")
    for name in names:
        if name not in known:
            raise unknown("change", name, known)
    return frozenset(names)


class LeanTrainer(OpacusTrainer):
    """`DPSGDTrainer` with hooks and flat clipping, and these changes to it.

    - ``kept``: a per-sample gradient stays as the hook made it, where a parameter is used once;
      Opacus copies it into zeros.
    - ``summed``: the loss is a sum; Opacus multiplies what each layer gets back from its mean.
    - ``unused``: no ordinary gradient is computed; Opacus's are replaced before they are read.
    - ``noise``: of all parameters it is drawn at once and added in place, to a sum that the
      clipping factors make a mean; per-sample gradients are freed as they are summed. In parallel
      each rank draws it for its share; of Opacus's, rank 0 for all.
    - ``reduce``: under DDP small parameters are reduced together, and none is waited for before
      the next begins; Opacus reduces one after the other. With ``noise`` each is as soon as its
      gradient is summed, while the next is.

    Args:
        changes: the names of some, joined by ``+``; all by default.
        options: as `TrainerBase`.
    """

    mode = "hooks"

    def __init__(
        self, model: nn.Module, *, batch_size: int, changes: str = "all", **options: Any
    ) -> None:
        self.changes = chosen(changes, CHANGES)
        super().__init__(model, batch_size=batch_size, **options)

    def wrapped(self) -> nn.Module:
        reduction = "sum" if "summed" in self.changes else "mean"
        module: nn.Module = GradSampleModule(self.model, loss_reduction=reduction)
        if "unused" in self.changes:
            leave_out_ordinary_gradients(module)
        return module

    def private_optimizer(self) -> DPOptimizer:
        if "noise" in self.changes:
            self.optimizer_class = derived(LeanOptimizer, self.optimizer_class)
        return changed_optimizer(self, super().private_optimizer(), self.changes)

    def train_step(self, batch: Batch) -> Tensor:
        store = keep if "kept" in self.changes else copy_into_zeros
        with patch.object(hooks, STORE, store):
            return super().train_step(batch)

    def backward(self, loss: Any) -> None:
        examples = self.batch_size // self.micro_batches
        (loss * examples if "summed" in self.changes else loss).backward()


STORE = "create_or_accumulate_grad_sample"
copy_into_zeros = getattr(hooks, STORE)


def keep(*, param: Any, grad_sample: Tensor, max_batch_len: int) -> None:
    """Keep a per-sample gradient as it is, where Opacus copies it into a tensor of zeros.

    A batch shorter than ``max_batch_len`` needs that, and a parameter that is used again: what is
    kept may be the gradient of what the layer returned, to which nothing may be added in place.
    """
    used_once = param.requires_grad and param._forward_counter == 1
    used_once = used_once and not hasattr(param, "_current_grad_sample")
    if used_once and len(grad_sample) == max_batch_len:
        param._current_grad_sample = grad_sample
    else:
        copy_into_zeros(param=param, grad_sample=grad_sample, max_batch_len=max_batch_len)


def leave_out_ordinary_gradients(module: Any) -> None:
    """Let autograd take the parameters of layers for constants: hooks make their gradients."""
    for layer in module.iterate_submodules(module._module):
        if type(layer) in module.GRAD_SAMPLERS:  # functorch's parameters are not the layer's
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            layer.register_forward_pre_hook(partial(_become_constants, own))
            layer.register_forward_hook(partial(_become_parameters, own), prepend=True)


def _become_constants(own: list[nn.Parameter], *_: object) -> None:
    for parameter in own:
        parameter.requires_grad_(False)


def _become_parameters(
    own: list[nn.Parameter], _layer: nn.Module, _given: object, returned: Any
) -> None:
    for parameter in own:
        parameter.requires_grad_()
    if torch.is_grad_enabled() and isinstance(returned, Tensor) and not returned.requires_grad:
        returned.requires_grad_()  # else backward would end before this layer's hook


def derived(changed: type[DPOptimizer], of_opacus: type[DPOptimizer]) -> type[DPOptimizer]:
    """An optimizer of Opacus with what another does in its own way."""
    return type(changed.__name__, (changed, of_opacus), {})


def kept_of(optimizer: DPOptimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Where ``summed_grad`` is; Opacus's optimizer for FSDP2 has a place of its own for it."""
    kept: dict[str, Any] = getattr(optimizer, "grad_state", {}).get(parameter, vars(parameter))
    return kept


def changed_optimizer(
    trainer: OpacusTrainer, optimizer: DPOptimizer, changes: Collection[str]
) -> DPOptimizer:
    """Let an optimizer draw noise and reduce gradients as ``changes`` say."""
    if isinstance(optimizer, NoiseAtOnce):
        optimizer.parallel = trainer.parallel
        optimizer.expected_batch_size = trainer.joint_batch_size
        optimizer.loss_reduction = "sum"  # which is a mean already
        if trainer.parallel != "none":
            optimizer.generator = own_generator(optimizer.params[0].device)
            trainer.labels = {**trainer.labels, DRAWN_BY: "each rank, for its share"}
    if trainer.parallel == "ddp" and "reduce" in changes:
        optimizer.reduce_gradients = partial(reduce_together, optimizer)
        if isinstance(optimizer, LeanOptimizer):
            optimizer.reduces_early = True
            optimizer.reduce_gradients = optimizer.wait_for_ranks
    return optimizer


def reduce_together(optimizer: DPOptimizer) -> None:
    """Reduce gradients under DDP, in buffers: those of small parameters share one."""
    for buffer in summed([in_one(sharing) for sharing in sharing_buffers(optimizer.params)]):
        if optimizer.loss_reduction == "mean":
            buffer /= distributed.get_world_size()


def sharing_buffers(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters by the buffer in which they are reduced."""
    return [sharing for alike in of_kinds(parameters) for sharing in in_buffers(alike)]


def in_one(parameters: Sequence[Any]) -> Tensor:
    """The gradient of a parameter, or a buffer in which those of several are from now on."""
    only, *others = parameters
    if not others:
        gradient: Tensor = only.grad
        return gradient
    buffer, places, _ = one_buffer(parameters)
    torch._foreach_copy_([*places.values()], [parameter.grad for parameter in parameters])
    for parameter in parameters:
        parameter.grad = places[parameter]
    return buffer


def of_kinds(tensors: Iterable[T]) -> Iterable[list[T]]:
    """Tensors by type and device; those of one kind can be in one buffer."""
    kinds: dict[object, list[T]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds.values()


class NoiseAtOnce(DPOptimizer):  # type: ignore[misc]
    """An optimizer whose clipped sums are means already, of the examples of all ranks.

    Under FSDP2 they are once ranks have reduced them, under DDP they will be.
    """

    parallel = "none"

    def add_noise(self) -> None:
        self.make_private(self.params)

    def make_private(self, parameters: Sequence[Any]) -> None:
        """Draw noise for all parameters of a kind, and add it to their gradients in place."""
        deviation = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        for parameter in parameters:
            parameter.grad = kept_of(self, parameter)["summed_grad"]
        for alike in of_kinds(parameters) if deviation else ():
            gradients = [own_part(p.grad, self.parallel) for p in alike]
            flat, noise, _ = one_buffer(gradients)
            flat.normal_(std=deviation, generator=self.generator)
            torch._foreach_add_(gradients, [noise[gradient] for gradient in gradients])


class LeanOptimizer(NoiseAtOnce):
    """Clips as `DPOptimizer` does, each per-sample gradient freed as soon as it is summed."""

    reduces_early = False
    """Whether gradients get their noise and are reduced over the ranks while others are summed."""
    reductions: Sequence[distributed.Work] = ()

    def clip_and_accumulate(self) -> None:
        squares = [squared_norms_of_samples(g, g[0].dtype) for g in of_kinds(self.grad_samples)]
        factors = clipping_factors(total(squares), self.max_grad_norm, self.expected_batch_size)
        rounded = {dtype: rounded_down(factors, dtype) for dtype in {p.dtype for p in self.params}}
        early = self.reduces_early and not self._check_skip_next_step(pop_next=False)
        self.reductions = []
        for sharing in sharing_buffers(self.params):
            self.sum_up(sharing, rounded)
            if early:
                with phase("noise"):
                    self.make_private(sharing)
                self.reductions.append(distributed.all_reduce(in_one(sharing), async_op=True))

    def sum_up(self, parameters: Sequence[Any], factors: Mapping[torch.dtype, Tensor]) -> None:
        """Add the clipped gradients of some parameters to those of earlier micro-batches."""
        for parameter in parameters:
            samples = self._get_flat_grad_sample(parameter).to(parameter.dtype)
            parameter.grad_sample = None
            clipped = torch.einsum("i,i...", factors[parameter.dtype], samples)
            if parameter.summed_grad is None:
                parameter.summed_grad = clipped
            else:
                parameter.summed_grad += clipped

    def add_noise(self) -> None:
        if not self.reductions:
            super().add_noise()

    def wait_for_ranks(self) -> None:
        """Let what follows wait for the gradients of all ranks."""
        for reduction in self.reductions:
            reduction.wait()
        self.reductions = []  # which hold gradients
