"""Errors for models that a private trainer cannot train.

Each error says what would work. Most errors name the layer or parameter that is the cause.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import opacus.layers
import torch
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpbench.core.errors import ConfigurationError, own_line
from dpbench.training.parallel import kind_of

HOOKS = ("capture_activations_hook", "capture_backprops_hook")
"""Names of Opacus's hooks. Their argument ``module`` is the layer."""

NO_SAMPLE = ("Per sample gradient is not initialized", "_norm_sample")
"""Texts in errors that Opacus may raise because a parameter has no per-sample gradient."""

NO_GRADIENT = (*NO_SAMPLE, "'NoneType' object")
"""Texts in errors that Opacus may raise because a parameter has no gradient of any kind."""

BY_EXAMPLE = "use the trainer micro_batch, which trains one example after another"
"""What works if a layer cannot be clipped together with others."""

TO_CONTIGUOUS = f"call .contiguous() on its input, or {BY_EXAMPLE}"
REPLACED = "replace it, or freeze it with requires_grad_(False)"

ONLY_GHOST = (
    "its norms need whole gradients of parameters; use fused or dpsgd_ghost, or parallel=ddp"
)
"""Reason why a private trainer does not train under FSDP2, and what would work."""

LAYER_ERRORS = (
    AttributeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Classes of errors that a layer of the model may cause in Opacus."""

MACHINE_ERRORS = ("memory", "CUDA", "cuDNN")
"""Texts in errors whose cause is the machine, not a layer."""


class CannotClip(ConfigurationError):
    """A layer or parameter cannot be clipped in one pass.

    The message ends with what works in any training. `FusedTrainer.train_step` adds another
    trainer, which is no remedy in a training of `dpbench.private`.
    """


class CannotTrain(ConfigurationError):
    """Replaces an error of Opacus in a step if a layer or parameter of the model is the cause."""


def check_layers(model: nn.Module) -> None:
    """Raise if a layer with trained parameters has buffers, or if Opacus refuses the layer."""
    for name, layer in trainable_modules(model):
        validate = ModuleValidator.VALIDATORS.get(kind_of(layer), lambda layer: [])
        errors = [str(error).partition(". ")[0] for error in validate(layer)]
        if not errors and any(True for _ in layer.buffers()):
            errors = ["it has buffers in addition to its parameters"]
        if errors:
            raise ConfigurationError(_about(name, layer, errors[0]))


def refuse_strided_inputs(model: nn.Module) -> None:
    """Make trained 2-D convolutions raise if rows of their input do not follow one another.

    Opacus 1.6 reads such an input, for example in the format ``channels_last``, in the wrong order,
    and computes other gradients.
    """

    def check(name: str, layer: nn.Module, given: Any) -> None:
        if given and torch.is_grad_enabled() and not given[0][:1, :1].is_contiguous():
            raise CannotTrain(_about(name, layer, "its input is not contiguous", TO_CONTIGUOUS))

    for name, layer in trainable_modules(model):
        if kind_of(layer) is nn.Conv2d:
            layer.register_forward_pre_hook(partial(check, name))


def check_rows(model: nn.Module, examples: int) -> None:
    """Raise if Opacus's per-sample gradients, or their norms, are not those of the examples."""
    wrong = {
        name: len(rows)
        for name, parameter in model.named_parameters()
        for attribute in ("grad_sample", "_norm_sample")
        if isinstance(rows := getattr(parameter, attribute, None), Tensor) and len(rows) != examples
    }
    if wrong:
        raise CannotTrain(
            f"Opacus cannot train parameter {first_of([*wrong])}: it has "
            f"{next(iter(wrong.values()))} per-sample gradients for {examples} examples, because "
            f"the first dimension of its layer's input is not the example; move the examples there "
            f"(repeat what examples share), or {BY_EXAMPLE}"
        )


@contextmanager
def refusals(model: nn.Module) -> Iterator[None]:
    """Raise `CannotTrain` instead of an error of Opacus in this context, if the model caused it."""
    try:
        yield
    except LAYER_ERRORS as error:
        if type(error) in LAYER_ERRORS and (line := _explained(error, model)):
            raise CannotTrain(line + own_line(error.__traceback__)) from error
        raise


def _explained(error: Exception, model: nn.Module) -> str:
    words = " ".join(str(error).split())
    if "view and is being modified inplace" in words:
        return (
            "Opacus adds hooks to every layer, so a layer's output must not be changed in place; "
            "write y = y + x instead of y += x, and use inplace=False"
        )
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in HOOKS and not any(word in words for word in MACHINE_ERRORS):
            return _about_hook(frame.f_locals["module"], model, words)
    partly = [name for name, p in _trained(model) if hasattr(p, "_current_grad_sample")]
    if partly and any(known in words for known in NO_GRADIENT):
        return (
            f"Opacus cannot train parameter {first_of(partly)}: the backward does not reach every "
            f"call of its layer; pass use_reentrant=True to checkpointing, and call the layer "
            f"under torch.no_grad() if the loss does not depend on this call"
        )
    unused = _without(model, "grad", "grad_sample", "_norm_sample")
    if unused and any(known in words for known in NO_GRADIENT):
        return (
            f"Opacus cannot train parameter {unused}: the loss does not depend on it; "
            f"freeze it with requires_grad_(False), or remove it from the model"
        )
    unheard = _without(model, "grad_sample", "_norm_sample")
    if unheard and any(known in words for known in NO_SAMPLE):
        return (
            f"Opacus cannot train parameter {unheard}: it found no per-sample gradient or norm "
            f"({words}); call the layer itself, with two or three dimensions if it is linear, or "
            f"{BY_EXAMPLE}"
        )
    return ""


def _about_hook(layer: nn.Module, model: nn.Module, words: str) -> str:
    """Return the line about an error in one of Opacus's hooks."""
    name = next((name for name, each in model.named_modules() if each is layer), "")
    if "Parameter tying" not in words:
        ways_out = {"view size": TO_CONTIGUOUS, "list index": "pass its input by position"}
        way_out = next((way for known, way in ways_out.items() if known in words), None)
        return _about(name, layer, words, way_out or f"replace it, or {BY_EXAMPLE}")
    own, way_out = {*layer.parameters(recurse=False)}, "give each layer its own parameters"
    if sum(p in own for _, p in model.named_parameters(remove_duplicate=False)) == len(own):
        words = (
            "ghost clipping needs the gradients of all its calls, and it is called several times"
        )
        way_out = "call it once, pass use_reentrant=True to checkpointing"
    return _about(name, layer, words, f"{way_out}, or {BY_EXAMPLE}")


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _without(model: nn.Module, *attributes: str) -> str:
    """Return the name of the first trained parameter that has none of ``attributes``."""
    lacking = (
        n for n, p in _trained(model) if all(getattr(p, a, None) is None for a in attributes)
    )
    return first_of([*lacking])


def first_of(names: Sequence[str]) -> str:
    """Return the first name and the number of the others; "" if there are no names."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else "".join(names)


def _about(
    name: str, layer: nn.Module, words: str, way_out: str = REPLACED, who: str = "Opacus"
) -> str:
    which = f"layer {name}" if name else "the model, which is one layer"
    if hasattr(opacus.layers, own := f"DP{type(layer).__name__}"):
        way_out = f"use opacus.layers.{own} instead"
    elif isinstance(layer, _BatchNorm):
        way_out = "use GroupNorm instead, as opacus.validators.ModuleValidator.fix(model) does"
    elif getattr(layer, "track_running_stats", False):  # instance norms
        way_out = "make it with track_running_stats=False"
    elif isinstance(layer, nn.EmbeddingBag):
        way_out = "pass offsets to it, or use Embedding and the sum or mean of its output"
    return f"{who} cannot train {which} ({type(layer).__name__}): {words}; {way_out}"


EARLIER = "do this before making it"
"""What works instead of a change of the model after its trainer was made."""


class ModelSnapshot:
    """A record of the layers and parameters that a model has when its trainer is made.

    A trainer makes lists, rules and buffers for these layers and parameters. If the model changed
    later, the trainer could silently compute wrong gradients.

    Args:
        model: the model.
        in_place: whether parameters must also stay in the same memory.
    """

    def __init__(self, model: nn.Module, *, in_place: bool = False) -> None:
        self._members: list[tuple[str, dict[str, object], str, object]] = []
        self._names: list[tuple[str, Collection[str], set[str]]] = []
        self._parameters: list[tuple[str, Tensor, bool, int | None]] = []
        for path, layer in model.named_modules():
            before = f"{path}." if path else ""
            for kind, own in (("layer", layer._modules), ("parameter", layer._parameters)):
                members: dict[str, object] = {**own}
                self._names.append((f"{kind} {before}", own, {*own}))
                self._members += [
                    (f"{kind} {before}{n}", own, n, member) for n, member in members.items()
                ]
            for name, parameter in layer.named_parameters(before[:-1], recurse=False):
                place = memory_of(parameter) if in_place else None
                self._parameters.append((name, parameter, parameter.requires_grad, place))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the model has changed, or if its optimizer has parameters that it has not.

        The error names the change.
        """
        for name, members, own, member in self._members:
            if members.get(own) is not member:
                raise _changed(name, "replaced", "load_state_dict without assign")
        for before, names, known in self._names:
            if len(names) > len(known):
                raise _changed(before + next(n for n in names if n not in known), "added", EARLIER)
        parameters = {parameter for _, parameter, _, _ in self._parameters}
        for number, group in enumerate(optimizer.param_groups):
            if not parameters.issuperset(group["params"]):
                what = f"a parameter that is not the model's, in group {number} of the optimizer,"
                raise _changed(what, "added", "give it to the model earlier")
        for name, parameter, trained, place in self._parameters:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "unfrozen"
                raise _changed(f"parameter {name}", what, EARLIER)
            if place is not None and memory_of(parameter) != place:
                how = "change it in place (parameter.copy_(values) under torch.no_grad())"
                raise _changed(f"parameter {name}", "moved to other memory", how)


def _changed(name: str, what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} was {what} after the trainer was made, and the trainer does not support this "
        f"change: {remedy}, or make a new trainer of copy.deepcopy(model) afterwards"
    )


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage, even if the tensor has no data.

    For a DTensor, the number identifies the storage of the local shard. For an empty tensor or
    shard, the number is 0, because FSDP2 allocates an empty shard's memory only in the first step.
    """
    local: Any = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    storage: int = local.untyped_storage()._cdata
    return storage if local.numel() else 0


def check_unmixed_layers(model: nn.Module) -> None:
    """Raise if a layer is known to mix examples, or to keep statistics of them."""
    for name, layer in model.named_modules():
        mixes = isinstance(layer, _BatchNorm) and layer.training
        if mixes or (getattr(layer, "track_running_stats", False) and layer.training):
            words = "it computes statistics of all examples"
            raise ConfigurationError(_about(name, layer, words, who="DP-SGD"))
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            words = "with max_norm, it changes its weight in forward"
            raise ConfigurationError(_about(name, layer, words, "leave out max_norm", "DP-SGD"))


def used_outside(
    model: nn.Module, own: Mapping[nn.Module, Collection[str]], loss: Callable[[], Tensor]
) -> list[str]:
    """Return the names of trained parameters that a loss uses outside the calls of their layers.

    Trained parameters require gradients only outside these calls, and not after this function.

    Args:
        model: the model.
        own: the names of trained parameters in each layer that has a rule for them.
        loss: computes a loss. It is called once.
    """
    trained = [part.get_parameter(name) for part, names in own.items() for name in names]
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}

    def switch(on: bool, layer: nn.Module, *_: object) -> None:
        for name in own[layer]:
            layer.get_parameter(name).requires_grad_(on)

    def add_gathered(*_: object) -> None:
        names.update((parameter, name) for name, parameter in model.named_parameters())

    blocks = [layer for layer in model.modules() if isinstance(layer, FSDPModule)]
    hooks = [layer.register_forward_pre_hook(add_gathered) for layer in blocks]
    hooks += [layer.register_forward_pre_hook(partial(switch, False)) for layer in own]
    hooks += [layer.register_forward_hook(partial(switch, True)) for layer in own]
    for parameter in trained:
        parameter.requires_grad_()
    try:
        waiting: list[Any] = [loss().grad_fn]
    finally:
        for parameter in trained:
            parameter.requires_grad_(False)
        for hook in hooks:
            hook.remove()
    known: set[Any] = {None}
    found: list[str] = []
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if (name := names.get(getattr(node, "variable", None))) is not None:
            found.append(name)
        waiting += (following for following, _ in node.next_functions)
    return found


def check_used_in_layers(names: Sequence[str]) -> None:
    """Raise if the result of `used_outside` has a name."""
    if names:
        raise CannotClip(
            f"the model uses parameter {names[0]} without a call of its layer, so the gradients "
            f"of single examples are unknown: call the layer or freeze the parameter with "
            f"requires_grad_(False)"
        )


WRAPPERS = (
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"),
    *("GradSampleModule", "DPOptimizer", "AcceleratedOptimizer", "PrivateOptimizer"),
)
"""Names of classes around a model or an optimizer that trains in another way."""


def check_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a model or optimizer trains in another way, or one does not fit the other."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigurationError("the model has no parameter that is trained")
    kinds = [type(each).__name__ for each in (optimizer, *model.modules())]
    wrapped = [name for name in kinds if name in WRAPPERS]
    if wrapped or any(isinstance(p, DTensor) for p in trained.values()):
        raise ConfigurationError(
            f"pass the plain model and optimizer, without {wrapped[0] if wrapped else 'shards'}: "
            f"under torchrun, make_private reduces gradients over the ranks itself, as DDP does; "
            f"shards (FSDP), DataParallel and compiled code are not supported"
        )
    given = {p for group in optimizer.param_groups for p in group["params"]}
    if lacking := [name for name, p in trained.items() if p not in given]:
        raise ConfigurationError(
            f"the optimizer lacks parameter {lacking[0]}: give it all trained parameters, or "
            f"freeze this one with requires_grad_(False)"
        )
    if not given <= {*model.parameters()}:
        raise ConfigurationError(
            "the optimizer has a parameter that the model has not: pass the module that contains "
            "all that is trained, and make the optimizer after the model was moved or changed"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS needs several losses for a step: use another optimizer")
