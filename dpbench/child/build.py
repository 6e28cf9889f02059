"""Builds the trainer and the batches of a case, and tests that the trainer trains."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.core import gpu
from dpbench.core.case import TRANSFORMER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import accepts, parted
from dpbench.core.registry import OPTIMIZERS, TRAINERS, WORKLOADS, called, check_class
from dpbench.training.base import OPTIMIZER, Batch, TrainerBase
from dpbench.training.parallel import part_of_rank, rank_and_ranks
from dpbench.workloads.axes import checkpoint_blocks, choose_trainable
from dpbench.workloads.base import Workload, batches_of, examples_in

SEED = 0
"""Seed of every measured case. A profiler may run a case several times, and needs equal runs."""


TRAINER = (
    "a trainer is a subclass of dpbench.TrainerBase with a method train_step(batch); its "
    "constructor is called as Trainer(model, batch_size=…, **options)"
)
"""End of the error message about an object that is not a trainer."""

WORKLOAD = "a workload is a subclass of dpbench.Workload; set its parameters with --set"
"""End of the error message about an object that is not a workload."""


def pick_device(name: str) -> torch.device:
    """Return the device for ``cpu``, ``cuda`` or ``auto``, which is a GPU if one is visible."""
    if name == "auto":
        name = "cuda" if gpu.visible_gpus() else "cpu"
    if name == "cuda" and not (torch.backends.cuda.is_built() and gpu.visible_gpus()):
        raise ConfigurationError(
            f"no CUDA GPU can be used: this is torch {torch.__version__}, and the driver shows "
            f"{len(gpu.visible_gpus())} GPUs; install a CUDA build of torch on a machine with a "
            f"GPU, or use --device cpu"
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
    repeatable: bool = True,
    **options: Any,
) -> tuple[TrainerBase, list[Batch]]:
    """Build the trainer and the batches of a case on ``device``.

    If several ranks train the case, they all build the same model from ``seed``. Afterwards each
    rank draws different random numbers, and its batches contain only its own examples.

    Args:
        case: the case.
        device: where the model and the batches are allocated.
        num_batches: number of batches.
        sampled: number of batches at the end whose sizes are sampled by `batch_sizes`. Earlier
            batches have the case's batch size.
        seed: seed of PyTorch's default random number generators.
        alone: whether this process trains whole batches alone, even in a process group.
        repeatable: whether the trainer gets the seed, too, if its constructor accepts one. If
            False, the noise of dpbench's trainers is new each time.
        **options: further arguments of the trainer's constructor.

    Raises:
        ConfigurationError: this process group does not have as many ranks as the case needs.
    """
    rank, ranks = (0, 1) if alone else rank_and_ranks()
    if ranks != case.gpus:
        raise ConfigurationError(
            f"{case.id} needs {case.gpus} ranks, but this process group has {ranks}"
        )
    # Opacus registers full backward hooks on embeddings, whose inputs need no gradients.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    torch.manual_seed(seed)
    set_tf32(case, device)
    workload = workload_of(case)
    model = _model_of(case, workload, device)
    dtype = torch.bfloat16 if case.precision == "bf16" else None
    named = TRAINERS[case.trainer]
    if repeatable and callable(named) and accepts(named, "seed"):
        options["seed"] = seed
    trainer: TrainerBase = called(
        f"trainer {case.trainer}",
        named,
        TrainerBase,
        TRAINER,
        model.to(dtype),
        batch_size=case.batch_size // ranks,
        **_non_default_options(case, workload),
        **options,
    )
    if not hasattr(trainer, "model"):
        raise ConfigurationError(
            f"trainer {case.trainer} does not call the constructor of TrainerBase; {TRAINER}"
        )
    set_tf32(case, device)  # again, because code that builds a model may switch TF32 on

    sizes = [case.batch_size] * (num_batches - sampled) + batch_sizes(case, sampled)
    largest = max([case.batch_size, *sizes])
    own = part_of_rank(largest, rank, ranks)

    def place(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else None
        # A copy does not keep the other ranks' examples in memory, as a view would.
        return tensor[own].to(device, kind, copy=ranks > 1)

    labels_of(trainer)  # raises before the training if the labels are invalid
    batches = [*batches_of(workload, largest, num_batches, place)]
    if case.sampling != "fixed":
        cut = [slice(size) for size in sizes]
        batches = [pytree.tree_map(itemgetter(n), b) for n, b in zip(cut, batches, strict=True)]
    if ranks > 1:
        torch.manual_seed((seed + 1) * ranks + rank)  # another seed in each rank
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
    # Without these settings, `torch.backends.fp32_precision` could still switch TF32 on.
    for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"


def batch_sizes(case: Case, number: int) -> list[int]:
    """Return the sizes of a case's measured batches, which depend only on the case and ``number``.

    If examples are drawn independently from a large dataset, their number is Poisson distributed
    (Le Cam, "An Approximation Theorem for the Poisson Binomial Distribution", 1960). From this
    distribution, 999 sizes per batch are drawn with a fixed seed, and sorted. The sorted sizes are
    divided into groups of 999 consecutive sizes, one group per batch, and each group is replaced by
    its median. So the mean of the medians is close to the distribution's mean. If there is only one
    batch, its size is about the median of the distribution. The medians are returned in random
    order.
    """
    if case.sampling == "fixed":
        return [case.batch_size] * number
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.poisson(case.batch_size, 999 * number))
    sizes: list[int] = random.permutation(drawn[499::999]).tolist()
    return sizes


def about_sizes(case: Case, number: int) -> str:
    """Return a note that lists the sizes of a case's measured batches."""
    sizes = batch_sizes(case, number)
    listed, mean = ", ".join(map(str, sizes)), sum(sizes) / number
    return (
        f"batches have {listed} examples, on average {mean:.3g}; the expected number is "
        f"{case.batch_size}"
    )


def _model_of(case: Case, workload: Workload, device: torch.device) -> nn.Module:
    """Build the workload's model on a device, and apply the case's options to the model."""
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
    """Return a trainer's labels, with their values converted to strings."""
    labels = trainer.labels
    if not isinstance(labels, Mapping):
        raise ConfigurationError(
            f"{type(trainer).__name__}.labels must be a mapping such as {{'clips': 'flat'}}, not "
            f"{labels!r}"
        )
    return {str(name): " ".join(str(value).split()) for name, value in labels.items()}


def workload_of(case: Case) -> Workload:
    """Build the workload of a case from its name and parameters."""
    what, named = f"workload {case.workload}", WORKLOADS[case.workload]
    workload: Workload = called(what, named, Workload, WORKLOAD, **case.parameters)
    return workload


def check_parameters(case: Case) -> None:
    """Raise if a built-in trainer, workload or optimizer refuses its parameters' values.

    A trainer or optimizer with parameters is built once, for a linear layer with a weight and a
    bias. A user's class may need a larger model, so this function does not check its parameters.
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
            except ValueError as error:  # PyTorch's optimizers raise this error
                raise ConfigurationError(f"{axis} {name}: {error}") from error


def _non_default_options(case: Case, workload: Workload) -> dict[str, Any]:
    """Return the trainer's arguments for options of the case that differ from their defaults.

    Other arguments are left out, because a trainer need not accept them.
    """
    options: dict[str, Any] = {}
    if case.workload != TRANSFORMER:
        options["workload"] = workload
    if case.optimizer != "sgd":
        options["optimizer"] = named = OPTIMIZERS[case.optimizer]
        check_class(f"optimizer {case.optimizer}", named, torch.optim.Optimizer, OPTIMIZER)
    if case.micro_batches != 1:
        options["micro_batches"] = case.micro_batches
    if case.parallel != "none":
        options["parallel"] = case.parallel
    if case.sampling != "fixed":
        options["sampling"] = case.sampling
    if case.compile == "on":
        torch.compiler.reset()  # Dynamo compiles a function at most 8 times, then never again
        options["compile"] = True
    if case.precision == "bf16-amp":
        options["autocast"] = torch.bfloat16
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
        raise AssertionError(f"the losses of two steps are {losses}, which are not all finite")
    if all(map(torch.equal, before, trainer.model.parameters())):
        raise AssertionError("no parameter changed in two steps")


# --- micro-batches ---------------------------------------------------------------------------


def enforce_micro_batches(trainer: TrainerBase, number: int, size: int) -> None:
    """Make training steps raise if the trainer does not use micro-batches of ``size`` examples.

    A step raises if one forward computes more than ``size`` examples, if the step never calls the
    workload's loss, or if all forwards together compute too few examples. Steps that replay a CUDA
    graph call no loss, and are not checked.
    """
    seen: list[int] = []

    def refuse(why: str) -> None:
        raise ConfigurationError(f"{type(trainer).__name__} with micro_batches={number}: {why}")

    def seeing(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(model: Callable[..., Any], batch: Batch) -> Tensor:
            if torch.is_grad_enabled():
                seen.append(examples_with_mapped(batch))
                if seen[-1] > size:
                    refuse(
                        "one forward computes more examples than a micro-batch has; train each "
                        "micro-batch separately (for last, part in self.parts(batch)), or use "
                        "--micro-batches 1"
                    )
            return losses(model, batch)

        return called

    take_step = trainer.train_step

    def train_step(batch: Batch) -> Tensor:
        seen.clear()
        loss = take_step(batch)
        if trainer.replays:
            return loss
        examples = examples_in(batch)
        if not seen and examples:
            losses = f"{type(trainer.workload).__name__}.losses"
            refuse(f"a step never calls {losses}, so the examples in a forward cannot be counted")
        if sum(seen) < examples:
            refuse("all forwards of a step together compute fewer examples than the batch has")
        return loss

    workload = trainer.workload = copy.copy(trainer.workload)  # other trainers may share it
    vars(workload).update(losses=seeing(workload.losses), loss=seeing(workload.loss))
    trainer.train_step = train_step  # type: ignore[method-assign]


def examples_with_mapped(batch: Batch) -> int:
    """Return the number of examples in a batch, multiplied by the sizes of mapped dimensions.

    Under ``torch.func.vmap`` a loss call receives one example, but computes the losses of all
    mapped examples. All mapped examples are counted.
    """
    leaves = pytree.tree_leaves(batch)
    mapped: int = max(_unmapped(leaf).numel() // leaf.numel() for leaf in leaves)
    return examples_in(batch) * mapped


def _unmapped(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
