"""Defines `Case`: a trainer, a model and other choices that are measured together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import file_name_part, joined, parameters_text, parted, read_parameters


def positive(what: str, value: object) -> int:
    """Return a positive integer as an int, or raise `ConfigurationError`.

    The integer may be a NumPy integer, and must be below 2³¹. ``what`` describes the integer in the
    error message.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) <= 0:
        raise ConfigurationError(f"{what} must be a positive integer, not {value!r}")
    if int(value) >= 2**31:
        raise ConfigurationError(f"{what} must be below 2^31, not {value}")
    return int(value)


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a decoder-only transformer; ``hidden`` is a multiple of ``heads``."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            positive(f"model size: {name}", value)
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"model size: hidden {self.hidden} is not divisible by heads {self.heads}"
            )

    @classmethod
    def parse(cls, name: str) -> ModelSize:
        """Read a name in `MODEL_SIZES`, or dimensions such as ``32000x1024x12x16``.

        Dimensions are written as ``VOCABULARYxHIDDENxLAYERSxHEADS``.
        """
        if name in MODEL_SIZES:
            return MODEL_SIZES[name]
        parts = name.split("x")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            return cls(*map(int, parts))
        raise unknown("model size", name, MODEL_SIZES, "or VOCABULARYxHIDDENxLAYERSxHEADS")


MODEL_SIZES = {
    "tiny": ModelSize(1_000, 64, 2, 4),
    "small": ModelSize(8_000, 256, 4, 8),
    "medium": ModelSize(16_000, 512, 8, 8),
    "1b": ModelSize(32_000, 2_048, 24, 32),
}
"""Sizes of the transformer by name."""


def lora_rank(trainable: str) -> int | None:
    """Return the rank in ``lora:RANK``, or None for a text without ``lora:``.

    Raises `ConfigurationError` if the rank is not a positive integer.
    """
    kind, colon, rank = trainable.partition(":")
    if kind != "lora" or not colon:
        return None
    if not rank.isdecimal():
        raise ConfigurationError(f"write lora:RANK, such as lora:8, instead of {trainable!r}")
    return positive("rank", int(rank))


PRECISIONS = ("fp32", "tf32", "bf16", "bf16-amp")
"""``fp32``: float32 tensors and IEEE float32 matrix products. ``tf32``: float32 tensors and TF32
matrix products. ``bf16``: parameters, activations and gradients are bfloat16. ``bf16-amp``:
parameters are float32, and ``torch.autocast`` chooses the dtype of each operator."""

OFF_OR_ON = ("off", "on")

ATTENTIONS = ("sdpa", "dp_mha")
"""``sdpa``: PyTorch's ``scaled_dot_product_attention``. ``dp_mha``: Opacus's
``DPMultiheadAttention``."""

PARALLELS = ("none", "ddp", "fsdp2")
"""Ways for ranks (processes with one GPU each) to share a step. ``ddp``: each rank has the whole
model, and gradients are reduced over ranks. ``fsdp2``: each rank has a shard of every
parameter."""

SAMPLINGS = ("fixed", "poisson")
"""``fixed``: every batch has ``batch_size`` examples. ``poisson``: the number of examples has a
Poisson distribution with mean ``batch_size``, as if each example of a large dataset were drawn
independently."""

TRANSFORMER = "transformer"
"""Name of the transformer workload. Its four parameters are fields of `Case`."""

BASELINE_TRAINER = "standard"

PHASES = ("forward", "backward", "clip", "noise", "optimizer")
"""The phases of a training step, in their usual order."""

OUTSIDE = "outside"
"""Name of the part of a step that belongs to no phase."""

ALL_PHASES = (*PHASES, OUTSIDE)
"""The phases and `OUTSIDE`, in the order in which tables show them."""


def axis(
    help: str, default: Any = MISSING, *, count: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """Declare a field of `Case`, which is also an axis of a grid and an option.

    Args:
        help: the option's help text, in which ``{names}`` stands for the known names of values.
        default: the default value.
        count: if values are positive integers, words for the number in messages, such as
            ``batch size``; otherwise empty.
        choices: all possible values; empty if other values are possible.
    """
    return field(default=default, metadata={"help": help, "count": count, "choices": choices})


@dataclass(frozen=True)
class Case:
    """One configuration to measure. A grid has values along each field, so a field is also an axis.

    Trainer, workload, model and optimizer are names, with or without parameters
    (``dpsgd:clip=per_layer``). `dpbench.core.registry.resolve` converts them to short names and
    checks that the modules exist. The constructor of a case does not check names, because a saved
    run may name classes that are not installed.

    The parameters of the transformer are fields, which are empty for other workloads. The
    parameters of other workloads are in ``set``, a mapping or a text. A workload's name can also
    contain its parameters: ``transformer:seq_len=128``, ``resnet:depth=50,image_size=64``.
    """

    trainer: str = axis("{names}, or package.module:Class")
    batch_size: int = axis("number of examples in a step", count="batch size")
    seq_len: int = axis(
        "number of tokens in an example of the transformer", 0, count="sequence length"
    )
    model_size: str = axis(
        f"the size of the transformer: {', '.join(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS",
        "1b",
    )
    precision: str = axis("{names}", "fp32", choices=PRECISIONS)
    attention: str = axis("the transformer's attention: {names}", "sdpa", choices=ATTENTIONS)
    model: str = axis("the class of the transformer: {names}, or package.module:Class", "simple")
    workload: str = axis("{names}, or package.module:Class", TRANSFORMER)
    set: str | Mapping[str, object] = axis("a parameter of the workload, NAME=VALUE", "")
    optimizer: str = axis("{names}, or package.module:Class", "sgd")
    micro_batches: int = axis(
        "number of equal parts in which a batch is trained, with accumulated gradients",
        1,
        count="number of micro-batches",
    )
    trainable: str = axis(
        "the trained parameters: all, a pattern of names such as '*.bias', or lora:RANK", "all"
    )
    activation_checkpointing: str = axis(
        "{names}: recompute the activations of blocks in backward", "off", choices=OFF_OR_ON
    )
    parallel: str = axis(
        "{names}: the way in which processes with one GPU each share a step",
        "none",
        choices=PARALLELS,
    )
    gpus: int = axis("number of GPUs that share a batch in equal parts", 1, count="number of GPUs")
    sampling: str = axis(
        "{names}: every batch has batch_size examples, or a random number with this mean",
        "fixed",
        choices=SAMPLINGS,
    )
    compile: str = axis(
        "{names}: compile model and loss with torch.compile",
        "off",
        choices=OFF_OR_ON,
    )

    def __post_init__(self) -> None:
        given = {**vars(self), "set": parameters_text(self.set) if self.set else ""}
        for axis, value in _checked(**given).items():
            object.__setattr__(self, axis, value)

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Case:
        """Return the case that a row of a run describes.

        `dpbench.core.subject.subject_from` also accepts rows of scripts.
        """
        return cls(**{axis: row[axis] for axis in AXES if axis in row})

    @property
    def columns(self) -> Mapping[str, Any]:
        """The fields, which are columns of the case's rows."""
        return vars(self)

    @property
    def cell(self) -> tuple[Any, ...]:
        """The values of all fields except ``trainer``. Ratios compare the trainers of a cell."""
        _, *others = vars(self).values()
        return tuple(others)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of the workload's constructor."""
        if self.workload == TRANSFORMER:
            return {name: getattr(self, name) for name in TRANSFORMER_AXES}
        return dict(read_parameters(str(self.set)))

    @property
    def size(self) -> ModelSize:
        """The dimensions of the transformer that ``model_size`` names."""
        return ModelSize.parse(self.model_size)

    @property
    def baseline(self) -> Case:
        """The same case with the standard trainer."""
        return self.with_trainer(BASELINE_TRAINER)

    def with_trainer(self, trainer: str) -> Case:
        """Return the same case with another trainer."""
        return replace(self, trainer=trainer)

    @property
    def id(self) -> str:
        """The case's name in test ids and messages, e.g. ``dpsgd-bs8-seq256-1b-fp32``."""
        length = f"-seq{self.seq_len}" if self.seq_len else ""
        return f"{self.trainer}-bs{self.batch_size}{length}-{self.configuration}"

    @property
    def file_name(self) -> str:
        """The id, converted to the name of a file or folder."""
        return file_name_of(self.id)

    @property
    def configuration(self) -> str:
        """The id without trainer, batch size and sequence length, e.g. ``1b-fp32``."""
        named = {axis: getattr(self, axis) for axis in ("attention", "model")}
        rest = [name for axis, name in named.items() if name not in ("", USUAL[axis])]
        rest += [f"{axis}={value}" for axis, value in unusual(vars(self)).items()]
        return "-".join([trained_in(vars(self)), self.precision, *rest])

    @property
    def report_path(self) -> Path:
        """The path of the case's report, relative to the report directory."""
        length = f"_seq{self.seq_len}" if self.seq_len else ""
        name = f"report_{file_name_part(self.trainer)}_bs{self.batch_size}{length}.ncu-rep"
        return Path(file_name_part(self.configuration)) / name


@lru_cache(maxsize=None, typed=True)
def _checked(**given: Any) -> dict[str, Any]:
    """Check the fields of a case and return them in normalized spelling.

    The result is cached, so that a process checks equal fields only once.
    """
    axes = _with_parameters(given)
    checked = {*AXES} - (set() if axes["workload"] == TRANSFORMER else TRANSFORMER_AXES.keys())
    for axis, what in COUNTS.items():
        if axis in checked:
            axes[axis] = positive(what, axes[axis])
    for axis, known in CHOICES.items():
        if axis in checked and axes[axis] not in known:
            raise unknown(axis.replace("_", " "), axes[axis], known)
    if "model_size" in checked:
        ModelSize.parse(axes["model_size"])
    lora_rank(axes["trainable"])  # raises for an invalid rank
    gpus, size = axes["gpus"], axes["batch_size"]
    if (axes["parallel"] == "none") != (gpus == 1):
        raise ConfigurationError(
            f"gpus={gpus} with parallel={axes['parallel']}: several GPUs need parallel="
            f"{' or '.join(PARALLELS[1:])}, and one GPU needs parallel=none"
        )
    for axis, value in (("sampling", "poisson"), ("compile", "on")):
        if axes[axis] == value and gpus > 1:
            raise ConfigurationError(f"{axis}={value} supports one GPU only, and gpus is {gpus}")
    parts = gpus * axes["micro_batches"]
    if size % parts:
        shared = f"is shared by {gpus} GPUs, and " * (gpus > 1)
        raise ConfigurationError(
            f"batch size {size} {shared}cannot be divided into {parts} equal parts: choose a "
            f"multiple of {parts}"
        )
    return axes


def _with_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize parameters in names, and move the workload's parameters to fields of the case."""
    axes = {**given}
    for axis in ("trainer", "model", "optimizer"):
        axes[axis] = joined(*parted(axes[axis]))
    axes["workload"], text = parted(axes["workload"])
    axes["set"] = parameters_text([text, axes["set"]])
    if axes["workload"] != TRANSFORMER:
        own = [a for a, none in TRANSFORMER_AXES.items() if axes[a] not in (none, USUAL[a])]
        check_belongs(own, [axes["workload"]])
        return axes | TRANSFORMER_AXES
    for axis, value in read_parameters(axes["set"]).items():
        if axis not in TRANSFORMER_AXES:
            raise unknown(f"parameter of workload {TRANSFORMER}", axis, TRANSFORMER_AXES)
        if axes[axis] not in (USUAL[axis], value):
            raise ConfigurationError(f"{axis} is given twice, as {axes[axis]} and as {value}")
        axes[axis] = value
    return axes | {"set": ""}


def own_axes(workload: str) -> Mapping[str, Any]:
    """Return the axes of the transformer that fields of a case with this workload cannot set.

    If the workload is the transformer, these are the axes that its name sets, as in
    ``transformer:seq_len=128``. For other workloads, these are all axes of the transformer.
    """
    name, parameters = parted(workload)
    return read_parameters(parameters) if name == TRANSFORMER else TRANSFORMER_AXES


def check_belongs(given: Iterable[str], workloads: Sequence[str]) -> None:
    """Raise `ConfigurationError` for an axis that none of the workloads accepts as a field."""
    for axis in given:
        if all(axis in own_axes(workload) for workload in workloads):
            raise ConfigurationError(
                f"{axis} is given twice: as an axis and as a parameter of the workload"
                if (name := parted(workloads[0])[0]) == TRANSFORMER
                else f"{axis} belongs to the transformer; parameters of {name} are given with set"
            )


def trained_in(axes: Mapping[Any, Any]) -> str:
    """Return the size of the transformer, or the name and parameters of another workload."""
    if axes.get("workload", TRANSFORMER) == TRANSFORMER:
        return str(axes.get("model_size", ""))
    return ",".join(filter(None, (str(axes["workload"]), str(axes.get("set", "")))))


AXES = tuple(f.name for f in fields(Case))

USUAL: dict[str, Any] = {field.name: field.default for field in fields(Case)}
"""The default value of each axis, or `MISSING` if the axis has none."""

DECLARED = {field.name: field.metadata for field in fields(Case)}
"""For each field, the arguments ``help``, ``count`` and ``choices`` of `axis`."""

COUNTS: dict[str, str] = {name: said["count"] for name, said in DECLARED.items() if said["count"]}
"""Axes whose values are positive integers, with words for the number in messages."""

CHOICES: dict[str, tuple[str, ...]] = {
    name: said["choices"] for name, said in DECLARED.items() if said["choices"]
}
"""The possible values of each axis that has a fixed set of values."""

OPTIONAL_AXES = AXES[AXES.index("optimizer") :]
"""Axes that ids and titles show only if the value is neither empty nor the default."""

TRANSFORMER_AXES = {
    axis: type(USUAL[axis])() for axis in ("seq_len", "model_size", "attention", "model")
}
"""The transformer's axes. Cases of other workloads have the empty values given here."""


def unusual(axes: Mapping[Any, Any]) -> dict[str, str]:
    """Return the values on `OPTIONAL_AXES` that are neither empty nor the default."""
    known = {axis: axes[axis] for axis in OPTIONAL_AXES if axes.get(axis)}
    return {axis: str(value) for axis, value in known.items() if value != USUAL[axis]}


def file_name_of(subject: str) -> str:
    """Convert the id of a case or script to the name of a file or folder."""
    return subject.replace("/", "@2F")
