"""Operators that draw noise and add it at once, and updates that also take the optimizer's step.

The operators are in Triton for a GPU and in PyTorch for a CPU and for float64. Both operators add
``deviation × z`` to a sum of clipped gradients, where z is standard normal. A stream of random
numbers (`dpbench.training.noise_stream`) determines z. If operators get the same stream, they draw
the same z, on a GPU and on a CPU up to rounding. The operators compute in float32 or wider, and
round each result once.

Noise that is correlated over steps (`dpbench.training.correlated_noise`) is not kept in memory.
Instead, the noise of earlier steps is drawn again. Then z is the weighted sum ``w[0] × z(step) +
w[1] × z(step - 1) + …``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.training.clipped_sums import Buffer, groups_of, one_buffer, shard_size
from dpbench.training.kernels import triton_kernels
from dpbench.training.noise_stream import BLOCK, MOST_ELEMENTS, normal_numbers

WARPS = BLOCK // 64
"""Number of warps of the kernel's programs. With several bands twice as many are faster, because
the noise of all bands is in registers."""


class Scalars(NamedTuple):
    """Scalars of an update of parameters p, where gradients have moving averages m and v.

    The update computes new values from the old values and the noise z, in this order:

    - g = ``scale`` × (gradient + ``deviation`` × z) + ``decay`` × p
    - m = ``beta1`` × m + ``alpha1`` × g
    - v = ``beta2`` × v + ``alpha2`` × g²
    - p = ``shrink`` × p - ``rate`` × change

    The change is g for the formula ``plain``, m for ``momentum``, g + ``beta1`` × m for
    ``nesterov``, and m ∕ (√v × ``correction`` + ``eps``) for ``adam``.
    """

    deviation: float
    scale: float
    rate: float = 0.0
    decay: float = 0.0
    shrink: float = 1.0
    beta1: float = 0.0
    alpha1: float = 1.0
    beta2: float = 0.0
    alpha2: float = 1.0
    correction: float = 1.0
    eps: float = 0.0


def noisy_update(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    stream: Tensor,
    formula: str,
    scalars: Scalars,
    weights: Tensor | None = None,
) -> None:
    """Draw noise and update parameters, on a GPU in one pass over the tensors.

    The pass reads each tensor once, and writes the parameters and moving averages once. If the
    parameters have P bytes, the pass moves 3 P bytes without moving averages, 5 P bytes with one
    moving average, and 7 P bytes with two moving averages. For parameters in bf16, the sum is in
    float32, which adds P bytes.

    Args:
        parameters: the parameters, ``[n]``; changed in place.
        moments: the formula's moving averages, each ``[n]``; changed in place.
        gradient: the sum of clipped gradients, ``[n]``.
        stream: an element of `dpbench.training.noise_stream.NoiseStream.next_step`, ``[6]`` int64.
        formula: ``plain``, ``momentum``, ``nesterov`` or ``adam``.
        scalars: the scalars of the update.
        weights: weights of the noise of this step, of the step before, and so on, ``[bands]``
            float32; None for the noise of this step alone. The first weight is 1.
    """
    torch.ops.dpbench.noisy_update(parameters, moments, gradient, stream, formula, scalars, weights)


def noisy_mean(
    gradient: Tensor, stream: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    """Replace ``gradient`` by ``scale`` × (gradient + ``deviation`` × noise), in place."""
    torch.ops.dpbench.noisy_mean(gradient, stream, deviation, scale, weights)


def _noisy(
    gradient: Tensor, stream: Tensor, deviation: float, scale: float, weights: Tensor | None
) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    factors = [1.0] if weights is None else weights.tolist()
    length = checked_length(gradient)
    total = gradient.to(wide, copy=True)
    for age, weight in enumerate(factors):
        noise = normal_numbers(stream, length, wide, age)
        total.add_(noise, alpha=deviation * weight)
    return total.mul_(scale)


def _mean(
    gradient: Tensor, stream: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    gradient.copy_(_noisy(gradient, stream, deviation, scale, weights))


def _update(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    stream: Tensor,
    formula: str,
    scalars: Sequence[float],
    weights: Tensor | None = None,
) -> None:
    n = Scalars(*scalars)
    change = _noisy(gradient, stream, n.deviation, n.scale, weights)
    value = parameters.to(change.dtype)
    change = change + n.decay * value
    if formula != "plain":
        mean = n.beta1 * moments[0].to(change.dtype) + n.alpha1 * change
        moments[0].copy_(mean)
        if formula == "adam":
            square = n.beta2 * moments[1].to(change.dtype) + n.alpha2 * change.square()
            moments[1].copy_(square)
            change = mean / (square.sqrt() * n.correction + n.eps)
        else:
            change = change + n.beta1 * mean if formula == "nesterov" else mean
    parameters.copy_(n.shrink * value - n.rate * change)


def checked_length(gradient: Tensor) -> int:
    """Return the number of a buffer's elements, or raise if there is no noise for so many."""
    if gradient.numel() > MOST_ELEMENTS:
        raise ValueError(f"a buffer has {gradient.numel()} elements, and noise for {MOST_ELEMENTS}")
    return gradient.numel()


def _launch(
    flats: Sequence[Tensor],
    stream: Tensor,
    formula: str,
    scalars: Sequence[float],
    weights: Tensor | None,
) -> None:
    length = checked_length(flats[-1])
    if programs := -(-length // (16 * BLOCK)):
        kernel, bands = triton_kernels()["noisy_update"], 1 if weights is None else len(weights)
        factors = stream if weights is None else weights  # for one band, none is read
        warps = WARPS * (2 if bands > 1 else 1)
        kernel[programs,](
            *flats, length, stream, factors, *scalars, formula, BLOCK, bands, num_warps=warps
        )


def _mean_on_gpu(
    gradient: Tensor, stream: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    _launch([gradient] * 4, stream, "mean", Scalars(deviation, scale), weights)


def _update_on_gpu(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    stream: Tensor,
    formula: str,
    scalars: Sequence[float],
    weights: Tensor | None = None,
) -> None:
    first, second = [*moments, parameters, parameters][:2]  # the kernel reads no missing moments
    _launch([parameters, first, second, gradient], stream, formula, scalars, weights)


def _define(
    name: str, arguments: str, function: Callable[..., None], on_gpu: Callable[..., None]
) -> None:
    """Define an operator. Its Triton kernel computes in float32, so PyTorch handles float64."""

    def by_dtype(*arguments: Any) -> None:
        (function if arguments[0].dtype == torch.float64 else on_gpu)(*arguments)

    torch.library.define(f"dpbench::{name}", f"({arguments}) -> ()")
    torch.library.impl(f"dpbench::{name}", "CompositeExplicitAutograd", function)
    torch.library.impl(f"dpbench::{name}", "CUDA", by_dtype)
    torch.library.register_fake(f"dpbench::{name}", lambda *_: None)


_define(
    "noisy_mean",
    "Tensor(a!) gradient, Tensor stream, float deviation, float scale, Tensor? weights=None",
    _mean,
    _mean_on_gpu,
)
_define(
    "noisy_update",
    "Tensor(a!) parameters, Tensor(b!)[] moments, Tensor gradient, Tensor stream, str formula, "
    "float[] scalars, Tensor? weights=None",
    _update,
    _update_on_gpu,
)


MERGED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that `MergedUpdate` supports. Subclasses of these optimizers are not supported."""

UNSUPPORTED_OPTIONS = ("amsgrad", "capturable", "differentiable")
"""Options of the optimizers in `MERGED` that `MergedUpdate` does not support if they are on."""


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why a merged update cannot replace the optimizer's step, or '' if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in MERGED:
        return f"{name} has no merged step"
    # A learning rate scheduler replaces `step` only to count its calls.
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"the step of {name} was replaced"
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(not hasattr(hook, "changes_nothing") for some in hooks for hook in some.values()):
        return f"the step of {name} has hooks"
    for group in optimizer.param_groups:
        for option in UNSUPPORTED_OPTIONS:
            if group.get(option):
                return f"{name} has {option}=True"
        numbers = group["lr"], group["weight_decay"], *group.get("betas", ())
        if any(isinstance(each, Tensor) for each in numbers):
            return f"an option of {name} is a tensor, not a number"
    return ""


class MergedUpdate:
    """The step of an optimizer, in the same pass that adds the noise.

    Parameters and moving averages become views of flat buffers. The moving averages stay in
    ``optimizer.state``, so that they can be saved and loaded. Between merged steps, the optimizer's
    own ``step`` may also be called. Learning rates and other options are read in each step.

    Args:
        sharing: the parameters of each gradient buffer.
    """

    def __init__(self, sharing: Sequence[Sequence[Tensor]]) -> None:
        self._sharing = sharing
        self._flats = self._parameters()
        self._moments: dict[tuple[int, str], Buffer] = {}
        # For each parameter: the tensor that counts its steps, and this tensor's version and value.
        self._counts: dict[Tensor, tuple[Tensor, int, float]] = {}

    def updates(
        self, optimizer: torch.optim.Optimizer, deviation: float, examples: int
    ) -> list[Callable[..., None]] | str:
        """Return the next step's update of each buffer, or why the step cannot be merged.

        An update is `noisy_update`, called with the gradient, the stream and ``weights``.

        Args:
            optimizer: the optimizer. For Adam and AdamW, the count of steps is increased.
            deviation: standard deviation of the noise that this step draws.
            examples: number by which the sum of gradients is divided.
        """
        if why := why_not(optimizer):
            return why
        number_of = groups_of(optimizer)
        groups: list[Mapping[str, Any]] = []
        for parameters in self._sharing:
            numbers = {number_of.get(parameter, -1) for parameter in parameters}
            if len(numbers) > 1 or -1 in numbers:
                return "parameters were moved to other parameter groups"
            groups.append(optimizer.param_groups[numbers.pop()])
        adam = not isinstance(optimizer, torch.optim.SGD)
        if adam:
            taken = [self._steps_taken(optimizer, parameters) for parameters in self._sharing]
        else:
            taken = [self._has_momentum(optimizer, *each) for each in enumerate(groups)]
        if None in taken:
            return "parameters of one group have taken different numbers of steps"
        made: list[Callable[..., None]] = []
        for number, (group, before) in enumerate(zip(groups, taken, strict=True)):
            scale = (-1 if group["maximize"] else 1) / examples
            formula_of = adam_formula if adam else sgd_formula
            formula, keys, scalars = formula_of(
                group, Scalars(deviation, scale), float(before or 0)
            )
            update = self._update_of(optimizer, number, keys)
            made.append(partial(update, formula=formula, scalars=scalars))
        if adam:
            self._count_step(optimizer, groups)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers read this
        return made

    def _parameters(self) -> list[Tensor]:
        return [flatten_parameters(each) for each in self._sharing]

    def _update_of(
        self, optimizer: torch.optim.Optimizer, number: int, keys: Sequence[str]
    ) -> Callable[..., None]:
        moments = [self._flat_state(optimizer, number, key) for key in keys]
        return partial(noisy_update, self._flats[number], moments)

    def _flat_state(self, optimizer: torch.optim.Optimizer, number: int, key: str) -> Tensor:
        """Return a flat buffer with the moving averages of one ``key``, such as ``exp_avg``."""
        if (number, key) not in self._moments:
            self._moments[number, key] = one_buffer(self._sharing[number])
            self._moments[number, key].flat.zero_()
        flat, places, _ = self._moments[number, key]
        for parameter, place in places.items():
            state = optimizer.state[parameter]
            value = state.get(key)
            if value is place:
                continue
            if value is None:
                place.zero_()
            else:  # a loaded checkpoint, or the optimizer's own step, has set it
                place.copy_(value)
            state[key] = place
        return flat

    def _has_momentum(
        self, optimizer: torch.optim.Optimizer, number: int, group: Mapping[str, Any]
    ) -> float | None:
        """Return 1 if any parameter of a buffer has momentum in the optimizer's state, otherwise 0.

        Return None if only some parameters have it, and the group has both momentum and dampening.
        """
        states = (optimizer.state.get(p, {}) for p in self._sharing[number])
        has = {state.get("momentum_buffer") is not None for state in states}
        alike = len(has) == 1 or not group["momentum"] or not group["dampening"]
        return float(True in has) if alike else None

    def _steps_taken(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> float | None:
        """Return how many steps the parameters have taken; None if their numbers differ."""
        numbers = set()
        for parameter in parameters:
            step: Any = optimizer.state.get(parameter, {}).get("step")
            known: Any
            known, version, count = self._counts.get(parameter, (None, 0, 0.0))
            if step is None:
                count = 0.0
            elif step is not known or step._version != version:
                count = float(step)  # a loaded checkpoint, or the optimizer's own step, has set it
                self._counts[parameter] = step, step._version, count
            numbers.add(count)
        return numbers.pop() if len(numbers) == 1 else None

    def _count_step(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        for parameters, group in zip(self._sharing, groups, strict=True):
            for parameter in parameters:
                state = optimizer.state[parameter]
                if "step" not in state:
                    device = parameter.device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), device=device)
                    self._counts[parameter] = state["step"], 0, 0.0
        torch._foreach_add_([step for step, _, _ in self._counts.values()], 1)
        for parameter, (step, _, count) in self._counts.items():
            self._counts[parameter] = step, step._version, count + 1


class ShardedUpdate(MergedUpdate):
    """The same under FSDP2, on this rank's shards, which stay where FSDP2 has allocated them."""

    def _parameters(self) -> list[Tensor]:
        return []

    def _update_of(
        self, optimizer: torch.optim.Optimizer, number: int, keys: Sequence[str]
    ) -> Callable[..., None]:
        parameters: Sequence[Any] = self._sharing[number]
        changed = [[each.to_local().view(-1) for each in parameters]]
        for key in keys:
            states = [optimizer.state[each] for each in parameters]
            for each, state in zip(parameters, states, strict=True):
                if state.get(key) is None:
                    state[key] = torch.zeros_like(each)
            changed.append([state[key].to_local().view(-1) for state in states])
        return partial(update_shards, changed, [shard_size(p, ranks_of(p)) for p in parameters])


def ranks_of(parameter: Any) -> int:
    """Return the number of ranks over which FSDP2 has distributed a parameter."""
    ranks: int = parameter.device_mesh.get_group().size()
    return ranks


def update_shards(
    changed: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    gradient: Tensor,
    *arguments: Any,
    **options: Any,
) -> None:
    """Call `noisy_update` for one rank's shards of the parameters of a buffer.

    Args:
        changed: the parameters' shards, and then the shards of each moving average.
        sizes: number of elements of the gradient for each shard, which may have fewer.
        gradient: the gradients of all shards, one after another.
        *arguments: the following arguments of `noisy_update`.
        **options: the following arguments of `noisy_update`.
    """
    if len(sizes) == 1:
        flats = [each for (each,) in changed]
        gradient = gradient[: len(flats[0])]
    else:  # shards of small parameters, which are not contiguous in memory
        flats = [each[0].new_zeros(len(gradient)) for each in changed]
        pieces = [_pieces(flat, sizes, each) for flat, each in zip(flats, changed, strict=True)]
        for copies, originals in zip(pieces, changed, strict=True):
            torch._foreach_copy_(copies, [*originals])
    if len(gradient):
        parameters, *moments = flats
        noisy_update(parameters, moments, gradient, *arguments, **options)
    if len(sizes) > 1:
        for copies, originals in zip(pieces, changed, strict=True):
            torch._foreach_copy_([*originals], copies)


def _pieces(flat: Tensor, sizes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the beginning of each piece of a buffer, as long as the tensors in ``like``."""
    pieces = zip(flat.split([*sizes]), like, strict=True)
    return [piece[: len(each)] for piece, each in pieces]


Formula = tuple[str, Sequence[str], Scalars]
"""A formula of `noisy_update`, the keys of its moving averages in the optimizer's state, and the
scalars of the update."""


def sgd_formula(group: Mapping[str, Any], noise: Scalars, has_momentum: float) -> Formula:
    """Return the update of ``torch.optim.SGD``, which applies no dampening in its first step."""
    scalars = noise._replace(rate=group["lr"], decay=group["weight_decay"])
    if not group["momentum"]:
        return "plain", (), scalars
    added = 1 - group["dampening"] * has_momentum
    scalars = scalars._replace(beta1=group["momentum"], alpha1=added)
    return "nesterov" if group["nesterov"] else "momentum", ("momentum_buffer",), scalars


def adam_formula(group: Mapping[str, Any], noise: Scalars, taken: float) -> Formula:
    """Return the update of ``torch.optim.Adam`` and ``AdamW`` after ``taken`` earlier steps."""
    (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    scalars = noise._replace(
        rate=rate / (1 - beta1 ** (taken + 1)),
        decay=0.0 if decoupled else decay,
        shrink=1 - rate * decay if decoupled else 1.0,
        beta1=beta1,
        alpha1=1 - beta1,
        beta2=beta2,
        alpha2=1 - beta2,
        correction=(1 - beta2 ** (taken + 1)) ** -0.5,
        eps=group["eps"],
    )
    return "adam", ("exp_avg", "exp_avg_sq"), scalars


def flatten_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Copy parameters into a new buffer, make them views of the buffer, and return the buffer."""
    flat, places, _ = one_buffer(parameters)
    for parameter, place in places.items():
        place.copy_(parameter.data)
        parameter.data = place
    return flat
