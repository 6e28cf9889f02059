"""One-line errors for what Opacus cannot train: they name the layer and what would work."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import opacus.layers
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpbench.core.errors import ConfigurationError, own_line
from dpbench.training.parallel import kind_of

HOOKS = ("capture_activations_hook", "capture_backprops_hook")
"""Opacus's hooks, which take a layer as argument ``module``."""

NO_SAMPLE = ("Per sample gradient is not initialized", "_norm_sample")
NO_GRADIENT = (*NO_SAMPLE, "'NoneType' object")
"""Texts of errors for a parameter without gradient, from flat and from ghost clipping."""

ONLY_GHOST = (
    "its norms need whole gradients of parameters; use fused, book_keeping, dpsgd_ghost or "
    "ghost_lean, or parallel=ddp"
)
"""Why other private trainers are refused under FSDP2, and what to use."""

OF_A_LAYER = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
OF_THE_MACHINE = ("memory", "CUDA", "cuDNN")
"""Texts of a `RuntimeError` that the machine causes, not a layer."""


class CannotTrain(ConfigurationError):
    """Opacus failed in a step because of a layer or parameter of the model."""


def check_layers(model: nn.Module) -> None:
    """Refuse a model with a layer that Opacus's validator refuses, or that has buffers."""
    for name, layer in trainable_modules(model):
        validate = ModuleValidator.VALIDATORS.get(kind_of(layer), lambda layer: [])
        errors = [str(error).partition(". ")[0] for error in validate(layer)]
        if not errors and any(True for _ in layer.buffers()):
            errors = ["it has buffers beside its parameters"]
        if errors:
            raise ConfigurationError(_about(name, layer, errors[0]))


@contextmanager
def refusals(model: nn.Module) -> Iterator[None]:
    """In this context, turn errors of Opacus into ones that name the layer or parameter."""
    try:
        yield
    except OF_A_LAYER as error:
        if type(error) in OF_A_LAYER and (line := _explained(error, model)):
            raise CannotTrain(line + own_line(error.__traceback__)) from error
        raise


def _explained(error: Exception, model: nn.Module) -> str:
    words = " ".join(str(error).split())
    if "view and is being modified inplace" in words:
        return (
            "Opacus hooks every layer, and what a hooked layer returns must not be changed in "
            "place; write y = y + x instead of y += x, and inplace=False"
        )
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in HOOKS and not any(word in words for word in OF_THE_MACHINE):
            layer = frame.f_locals["module"]
            names = (name for name, each in model.named_modules() if each is layer)
            return _about(next(names, ""), layer, words)
    unused = _without(model, "grad", "grad_sample", "_norm_sample")
    if unused and any(known in words for known in NO_GRADIENT):
        return (
            f"Opacus cannot train parameter {unused}: the loss does not depend on it; "
            f"freeze it with requires_grad_(False), or leave it out of the model"
        )
    unheard = _without(model, "grad_sample", "_norm_sample")
    if unheard and any(known in words for known in NO_SAMPLE):
        return (
            f"Opacus cannot train parameter {unheard}, whose layer its hooks did not hear "
            f"({words}); call the layer itself, and checkpoint with use_reentrant=True"
        )
    return ""


def _without(model: nn.Module, *left: str) -> str:
    """Name the trained parameters on which backward set none of the attributes ``left``."""
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and all(getattr(parameter, each, None) is None for each in left)
    ]
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else "".join(names)


def _about(name: str, layer: nn.Module, words: str) -> str:
    which = f"layer {name}" if name else "the model, which is one layer"
    way_out = "replace it, or freeze it with requires_grad_(False)"
    if hasattr(opacus.layers, own := f"DP{type(layer).__name__}"):
        way_out = f"use opacus.layers.{own} instead"
    elif isinstance(layer, _BatchNorm):
        way_out = "use GroupNorm instead, as opacus.validators.ModuleValidator.fix(model) does"
    elif getattr(layer, "track_running_stats", False):  # instance norms
        way_out = "make it with track_running_stats=False"
    elif isinstance(layer, nn.EmbeddingBag):
        way_out = "give it offsets, or use Embedding and take the sum or mean of what it returns"
    elif "Parameter tying" in words:
        way_out = "give each layer parameters of its own, or clip in another way"
    return f"Opacus cannot train {which} ({type(layer).__name__}): {words}; {way_out}"
