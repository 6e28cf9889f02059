"""Errors for models that Opacus cannot train.

Each error says what would work. Most errors name the layer or parameter that is the cause.
"""

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
"""Names of Opacus's hooks. Their argument ``module`` is the layer."""

NO_SAMPLE = ("Per sample gradient is not initialized", "_norm_sample")
"""Texts in errors that Opacus may raise because a parameter has no per-sample gradient."""

NO_GRADIENT = (*NO_SAMPLE, "'NoneType' object")
"""Texts in errors that Opacus may raise because a parameter has no gradient of any kind."""

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
            layer = frame.f_locals["module"]
            names = (name for name, each in model.named_modules() if each is layer)
            return _about(next(names, ""), layer, words)
    unused = _without(model, "grad", "grad_sample", "_norm_sample")
    if unused and any(known in words for known in NO_GRADIENT):
        return (
            f"Opacus cannot train parameter {unused}: the loss does not depend on it; "
            f"freeze it with requires_grad_(False), or remove it from the model"
        )
    unheard = _without(model, "grad_sample", "_norm_sample")
    if unheard and any(known in words for known in NO_SAMPLE):
        return (
            f"Opacus cannot train parameter {unheard}, because Opacus's hooks on its layer did not "
            f"run ({words}); call the layer itself, and use use_reentrant=True for checkpointing"
        )
    return ""


def _without(model: nn.Module, *attributes: str) -> str:
    """Return the name of the first trained parameter that has none of ``attributes``.

    If several parameters have none, the text also contains the number of the others. If every
    trained parameter has one of the attributes, the text is empty.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and all(getattr(parameter, each, None) is None for each in attributes)
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
        way_out = "pass offsets to it, or use Embedding and the sum or mean of its output"
    elif "Parameter tying" in words:
        way_out = "give each layer its own parameters, or use another trainer"
    return f"Opacus cannot train {which} ({type(layer).__name__}): {words}; {way_out}"
