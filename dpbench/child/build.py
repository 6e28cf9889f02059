"""Builds the device, trainer and batches of a case, and checks that it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.child.micro_batch_check import enforce_micro_batches
from dpbench.core import gpu
from dpbench.core.case import MIXED, TRANSFORMER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import parted
from dpbench.core.registry import OPTIMIZERS, TRAINERS, WORKLOADS, called
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.parallel import part_of_rank, rank_and_ranks
from dpbench.workloads.axes import checkpoint_blocks, choose_trainable
from dpbench.workloads.base import Workload, batches_of

SEED = 0
"""The seed of every build, so that a profiler that runs a case several times gets equal runs."""


TRAINER = (
    "a trainer is a subclass of dpbench.TrainerBase, called as Trainer(model, batch_size=…, "
    "**options), with train_step(batch)"
)
"""Message of the error for an object that is no trainer."""

WORKLOAD = "a workload is a subclass of dpbench.Workload, with its parameters by --set"
"""Message of the error for an object that is no workload."""


def pick_device(name: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``."""
    if name == "auto":
        name = "cuda" if gpu.visible_gpus() else "cpu"
    if name == "cuda" and not (torch.backends.cuda.is_built() and gpu.visible_gpus()):
        raise ConfigurationError(
            f"no CUDA GPU: torch {torch.__version__}, {len(gpu.visible_gpus())} visible to the "
            f"driver; install a CUDA build of torch on a machine with one, or use --device cpu"
        )
    return torch.device(name)


def build(
    case: Case,
    device: torch.device,
    num_batches: int,
    *,
    sampled: int = 0,
    seed: int = SEED,
    alone: bool = False,
    **options: Any,
) -> tuple[TrainerBase, list[Batch]]:
    """Build the trainer of a case and its batches on ``device``, with a fixed seed.

    Further options are passed to the trainer's constructor, in addition to those of the case.
    With several ranks, each batch is this rank's part. All ranks build the same model, and then
    draw different random numbers. With ``alone`` this process trains whole batches by itself, even
    in a process group. The last ``sampled`` batches have the case's `batch_sizes`; earlier ones
    have the expected size.

    Raises:
        ConfigurationError: the case's number of ranks differs from that of this process group.
    """
    rank, ranks = (0, 1) if alone else rank_and_ranks()
    if ranks != case.gpus:
        raise ConfigurationError(f"{case.id} has {case.gpus} ranks, and {ranks} train it")
    torch.manual_seed(seed)
    set_tf32(case, device)
    workload = workload_of(case)
    model = _model_of(case, workload, device)
    dtype = torch.bfloat16 if case.precision == "bf16" else None
    named = TRAINERS[case.trainer]
    if isinstance(named, type) and not hasattr(named, "train_step"):
        raise ConfigurationError(
            f"trainer {case.trainer} is the class {named.__qualname__}, "
            f"without train_step; {TRAINER}"
        )
    trainer = called(
        f"trainer {case.trainer}",
        named,
        TRAINER,
        model.to(dtype),
        batch_size=case.batch_size // ranks,
        **_non_default_options(case, workload),
        **options,
    )
    if not (isinstance(trainer, TrainerBase) and hasattr(trainer, "model")):
        raise ConfigurationError(
            f"trainer {case.trainer} makes a {type(trainer).__name__}, which is no TrainerBase, or "
            f"has not called its constructor; {TRAINER}"
        )
    set_tf32(case, device)  # again, because modules of models often switch TF32 on

    sizes = [case.batch_size] * (num_batches - sampled) + batch_sizes(case, sampled)
    largest = max([case.batch_size, *sizes])
    own = part_of_rank(largest, rank, ranks)

    def place(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else None
        return tensor[own].to(device, kind, copy=ranks > 1)  # a copy frees other ranks' parts

    labels_of(trainer)  # raises for invalid labels, before training
    batches = [*batches_of(workload, largest, num_batches, place)]
    if case.sampling != "fixed":
        cut = [slice(size) for size in sizes]
        batches = [pytree.tree_map(itemgetter(n), b) for n, b in zip(cut, batches, strict=True)]
    if ranks > 1:
        torch.manual_seed((seed + 1) * ranks + rank)  # differs between ranks, with any seed
    if case.micro_batches > 1:
        size = case.batch_size // ranks // case.micro_batches
        enforce_micro_batches(trainer, case.micro_batches, size)
    return trainer, batches


def set_tf32(case: Case, device: torch.device) -> None:
    """Allow TF32 products on a GPU if, and only if, that is the case's precision."""
    if device.type != "cuda":
        return
    allowed = case.precision == "tf32"
    backends: Any = torch.backends
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
    # What these switch off would still follow `torch.backends.fp32_precision`, if a module set it.
    for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"


def batch_sizes(case: Case, number: int) -> list[int]:
    """The sizes of a case's measured batches; all trainers and instruments get the same.

    If examples are drawn independently from a large dataset, their number is Poisson distributed
    (Le Cam, "An Approximation Theorem for the Poisson Binomial Distribution", 1960). Sizes are
    stratified so that the mean of a few steps is close to the distribution's: they are the medians
    of ``number`` equally likely ranges, in random order. A single step has the median.
    """
    if case.sampling == "fixed":
        return [case.batch_size] * number
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.poisson(case.batch_size, 999 * number))
    sizes: list[int] = random.permutation(drawn[499::999]).tolist()
    return sizes


def about_sizes(case: Case, number: int) -> str:
    """Note for the reader that batches differ in size."""
    sizes = batch_sizes(case, number)
    each, mean = ", ".join(map(str, sizes)), sum(sizes) / number
    return f"steps of {each} examples, {mean:.3g} in the mean; {case.batch_size} expected"


def _model_of(case: Case, workload: Workload, device: torch.device) -> nn.Module:
    """Build the workload's model on a device, with the case's options."""
    with device:
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{type(workload).__name__}.model must return an nn.Module, not {type(model).__name__}"
        )
    with device:
        choose_trainable(model, case.trainable)
    if case.activation_checkpointing == "on":
        checkpoint_blocks(workload, model)
    return model


def labels_of(trainer: TrainerBase) -> dict[str, str]:
    """A trainer's labels, with values as text."""
    labels = trainer.labels
    if not isinstance(labels, Mapping):
        raise ConfigurationError(
            f"{type(trainer).__name__}.labels must be a mapping such as {{'clips': 'flat'}}, not "
            f"{labels!r}"
        )
    return {str(name): " ".join(str(value).split()) for name, value in labels.items()}


def workload_of(case: Case) -> Workload:
    """Build the workload of a case, with its parameters."""
    named = WORKLOADS[case.workload]
    workload = called(f"workload {case.workload}", named, WORKLOAD, **case.parameters)
    if not isinstance(workload, Workload):
        kind = type(workload).__name__
        raise ConfigurationError(f"workload {case.workload} is a {kind}; {WORKLOAD}")
    return workload


def check_parameters(case: Case) -> None:
    """Refuse values of parameters that a built-in trainer, workload or optimizer refuses.

    Each is built once, for a layer with two parameters. A user's class may need more than that, so
    its parameters are checked only against annotations.
    """
    if case.set and WORKLOADS.is_builtin(case.workload):
        workload_of(case)
    layer = nn.Linear(1, 1)
    for axis, registry, arguments in (
        ("trainer", TRAINERS, {"model": layer, "batch_size": 1}),
        ("optimizer", OPTIMIZERS, {"params": layer.parameters(), "lr": 0.1}),
    ):
        name = getattr(case, axis)
        if parted(name)[1] and registry.is_builtin(name):
            try:
                registry[name](**arguments)
            except ValueError as error:  # raised by an optimizer
                raise ConfigurationError(f"{axis} {name}: {error}") from error


def _non_default_options(case: Case, workload: Workload) -> dict[str, Any]:
    """The arguments that differ from defaults: a trainer need not accept the others."""
    options: dict[str, Any] = {}
    if case.workload != TRANSFORMER:
        options["workload"] = workload
    if case.optimizer != "sgd":
        options["optimizer"] = OPTIMIZERS[case.optimizer]
    if case.micro_batches != 1:
        options["micro_batches"] = case.micro_batches
    if case.parallel != "none":
        options["parallel"] = case.parallel
    if case.sampling != "fixed":
        options["sampling"] = case.sampling
    if case.compile == "on":
        torch.compiler.reset()  # Dynamo keeps 8 versions of a function, then runs it eagerly
        options["compile"] = True
    if case.precision in MIXED:
        options["autocast"] = torch.bfloat16 if case.precision == "bf16-amp" else torch.float16
    return options


def smoke_test(case: Case, *, device: str = "cpu") -> None:
    """Train two steps of a case.

    Raises:
        AssertionError: a loss is not finite, or no parameter has changed.
    """
    trainer, batches = build(case, pick_device(device), num_batches=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    losses = [float(trainer.train_step(batch)) for batch in batches]
    if not all(map(math.isfinite, losses)):
        raise AssertionError(f"the loss is not finite: {losses}")
    if all(map(torch.equal, before, trainer.model.parameters())):
        raise AssertionError("no parameter changed in two steps")
