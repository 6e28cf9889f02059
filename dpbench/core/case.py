"""A case: one configuration to measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.model_size import MODEL_SIZES, ModelSize, lora_rank, positive
from dpbench.core.names import joined, parameters_text, parted, quoted, read_parameters

PRODUCTS = ("fp32", "tf32", "bf16")
"""``fp32``: float32 with IEEE float32 matrix products. ``tf32``: float32 tensors, TF32 matrix
products. ``bf16``: parameters, activations and gradients are bfloat16."""

MIXED = ("bf16-amp", "fp16-amp")
"""Parameters are float32 and ``torch.autocast`` chooses the dtype of each operator. ``fp16-amp``
has a ``GradScaler``."""

PRECISIONS = (*PRODUCTS, *MIXED)

OFF_OR_ON = ("off", "on")

ATTENTIONS = ("sdpa", "dp_mha")
"""``sdpa``: ``scaled_dot_product_attention``. ``dp_mha``: Opacus's ``DPMultiheadAttention``."""

PARALLELS = ("none", "ddp", "fsdp2")
"""How ranks (processes with one GPU each) share a step. ``ddp``: each has the whole model, and
gradients are reduced over them. ``fsdp2``: each has a shard of every parameter."""

SAMPLINGS = ("fixed", "poisson")
"""``fixed``: every batch has ``batch_size`` examples. ``poisson``: sizes are Poisson distributed
with mean ``batch_size``, as when each example of a large dataset is drawn independently."""

TRANSFORMER = "transformer"
"""The workload of which four parameters are axes of a case."""

BASELINE_TRAINER = "standard"

PHASES = ("forward", "backward", "clip", "noise", "optimizer")
"""The phases of a training step, in the order in which they usually come."""

OUTSIDE = "outside"
"""The part of a step outside every phase. It is measured too, so that phases add up to the step."""

ALL_PHASES = (*PHASES, OUTSIDE)
"""The parts of a step, in the order of tables."""


def axis(
    help: str, default: Any = MISSING, *, count: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """A field of a case, one axis of a grid, with what its option says.

    Args:
        help: the option's help; ``{names}`` stands for the short names along the axis.
        default: the default value.
        count: what the axis counts, in words, if it is a positive integer; otherwise empty.
        choices: all possible values; empty if there are others.
    """
    return field(default=default, metadata={"help": help, "count": count, "choices": choices})


@dataclass(frozen=True)
class Case:
    """One configuration to measure; each field is an axis, which its metadata describe.

    Trainer, workload, model and optimizer are short names, with or without parameters
    (``dpsgd:clip=per_layer``). Other spellings become short names in
    `dpbench.core.registry.resolve`, which also checks that they exist: the case of a saved run
    may name what is unknown here.

    The transformer's parameters are fields, empty for other workloads, whose parameters are in
    ``set``, a mapping or text. Both can also be given as parameters of the workload:
    ``transformer:seq_len=128``, ``resnet:depth=50,image_size=64``.
    """

    trainer: str = axis("{names}, or package.module:Class")
    batch_size: int = axis("examples in a step", count="batch size")
    seq_len: int = axis("tokens in an example of the transformer", 0, count="sequence length")
    model_size: str = axis(
        f"the transformer's: {', '.join(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS", "1b"
    )
    precision: str = axis("{names}", "fp32", choices=PRECISIONS)
    attention: str = axis("the transformer's: {names}", "sdpa", choices=ATTENTIONS)
    model: str = axis("the transformer's: {names}, or package.module:Class", "simple")
    workload: str = axis("{names}, or package.module:Class", TRANSFORMER)
    set: str | Mapping[str, object] = axis("a parameter of the workload, NAME=VALUE", "")
    optimizer: str = axis("{names}, or package.module:Class", "sgd")
    micro_batches: int = axis(
        "equal parts in which a batch is trained, gradients accumulating",
        1,
        count="number of micro-batches",
    )
    trainable: str = axis(
        "all, a pattern of parameters' names such as '*.bias', or lora:RANK", "all"
    )
    activation_checkpointing: str = axis(
        "{names}: whether blocks run again in backward", "off", choices=OFF_OR_ON
    )
    parallel: str = axis(
        "{names}: how processes of one GPU each share a step", "none", choices=PARALLELS
    )
    gpus: int = axis("GPUs that share a batch in equal parts", 1, count="number of GPUs")
    sampling: str = axis(
        "{names}: whether all batches have as many examples, or a random number around batch_size",
        "fixed",
        choices=SAMPLINGS,
    )
    compile: str = axis(
        "{names}: whether torch.compile makes one function of model and loss",
        "off",
        choices=OFF_OR_ON,
    )

    def __post_init__(self) -> None:
        given = {**vars(self), "set": parameters_text(self.set)}
        for axis, value in _checked(**given).items():
            object.__setattr__(self, axis, value)

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Case:
        """The case that a row is about; `subject_from` also knows scripts."""
        return cls(**{axis: row[axis] for axis in AXES if axis in row})

    @property
    def columns(self) -> Mapping[str, Any]:
        """Its columns in rows: its fields."""
        return vars(self)

    @property
    def cell(self) -> tuple[Any, ...]:
        """Its fields without the trainer."""
        _, *others = vars(self).values()
        return tuple(others)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments with which the workload is built."""
        if self.workload == TRANSFORMER:
            return {name: getattr(self, name) for name in OF_TRANSFORMER}
        return dict(read_parameters(str(self.set)))

    @property
    def size(self) -> ModelSize:
        """The dimensions behind ``model_size``."""
        return ModelSize.parse(self.model_size)

    @property
    def baseline(self) -> Case:
        """The same configuration under the standard trainer."""
        return self.with_trainer(BASELINE_TRAINER)

    def with_trainer(self, trainer: str) -> Case:
        """The same configuration under another trainer."""
        return replace(self, trainer=trainer)

    @property
    def id(self) -> str:
        """A name for test ids and messages, e.g. ``dpsgd-bs8-seq256-1b-fp32``."""
        length = f"-seq{self.seq_len}" if self.seq_len else ""
        return f"{self.trainer}-bs{self.batch_size}{length}-{self.configuration}"

    @property
    def file_name(self) -> str:
        """The id as the name of a file or folder."""
        return file_name_of(self.id)

    @property
    def configuration(self) -> str:
        """Everything but trainer, batch size and sequence length, e.g. ``1b-fp32``."""
        named = {axis: getattr(self, axis) for axis in ("attention", "model")}
        rest = [name for axis, name in named.items() if name not in ("", USUAL[axis])]
        rest += [f"{axis}={value}" for axis, value in unusual(vars(self)).items()]
        return "-".join([trained_in(vars(self)), self.precision, *rest])

    @property
    def report_path(self) -> Path:
        """Where this case's report lies below the report directory."""
        length = f"_seq{self.seq_len}" if self.seq_len else ""
        name = f"report_{quoted(self.trainer)}_bs{self.batch_size}{length}.ncu-rep"
        return Path(quoted(self.configuration)) / name


@lru_cache(maxsize=None, typed=True)
def _checked(**given: Any) -> dict[str, Any]:
    """The axes of a case in normalized spelling; a process checks each case once."""
    axes = _with_parameters(given)
    checked = {*AXES} - (set() if axes["workload"] == TRANSFORMER else OF_TRANSFORMER.keys())
    for axis, what in COUNTS.items():
        if axis in checked:
            axes[axis] = positive(what, axes[axis])
    for axis, known in CHOICES.items():
        if axis in checked and axes[axis] not in known:
            raise unknown(axis.replace("_", " "), axes[axis], known)
    if "model_size" in checked:
        ModelSize.parse(axes["model_size"])
    lora_rank(axes["trainable"])  # refuses an invalid rank
    gpus, size = axes["gpus"], axes["batch_size"]
    if (axes["parallel"] == "none") != (gpus == 1):
        raise ConfigurationError(
            f"gpus={gpus} with parallel={axes['parallel']}: several GPUs train in parallel, "
            f"{' or '.join(PARALLELS[1:])}, and one alone (none)"
        )
    for axis, value in (("sampling", "poisson"), ("compile", "on")):
        if axes[axis] == value and gpus > 1:
            raise ConfigurationError(f"{axis}={value} trains on one GPU, and gpus is {gpus}")
    parts = gpus * axes["micro_batches"]
    if size % parts:
        whose = f"is that of all {gpus} GPUs, and " * (gpus > 1)
        raise ConfigurationError(
            f"batch size {size} {whose}cannot be trained in {parts} parts of equal size: take a "
            f"multiple of {parts}"
        )
    return axes


def _with_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The axes with parameters written in one way, and those of the workload where they belong."""
    axes = {**given}
    for axis in ("trainer", "model", "optimizer"):
        axes[axis] = joined(*parted(axes[axis]))
    axes["workload"], text = parted(axes["workload"])
    axes["set"] = parameters_text([text, axes["set"]])
    if axes["workload"] != TRANSFORMER:
        own = [a for a, none in OF_TRANSFORMER.items() if axes[a] not in (none, USUAL[a])]
        check_belongs(own, [axes["workload"]])
        return axes | OF_TRANSFORMER
    for axis, value in read_parameters(axes["set"]).items():
        if axis not in OF_TRANSFORMER:
            raise unknown(f"parameter of workload {TRANSFORMER}", axis, OF_TRANSFORMER)
        if axes[axis] not in (USUAL[axis], value):
            raise ConfigurationError(f"{axis} is given twice, as {axes[axis]} and as {value}")
        axes[axis] = value
    return axes | {"set": ""}


def own_axes(workload: str) -> Mapping[str, Any]:
    """The axes that a workload's name already gives; the transformer's for all other workloads."""
    name, parameters = parted(workload)
    return read_parameters(parameters) if name == TRANSFORMER else OF_TRANSFORMER


def check_belongs(given: Iterable[str], workloads: Sequence[str]) -> None:
    """Refuse axes that none of the workloads takes separately from its name."""
    for axis in given:
        if all(axis in own_axes(workload) for workload in workloads):
            raise ConfigurationError(
                f"{axis} is given twice: by itself and as a parameter"
                if (name := parted(workloads[0])[0]) == TRANSFORMER
                else f"{axis} is the transformer's: {name} takes its own parameters (set)"
            )


def trained_in(axes: Mapping[Any, Any]) -> str:
    """What is trained, in short: the transformer's size, or the workload and its parameters."""
    if axes.get("workload", TRANSFORMER) == TRANSFORMER:
        return str(axes.get("model_size", ""))
    return ",".join(filter(None, (str(axes["workload"]), str(axes.get("set", "")))))


AXES = tuple(f.name for f in fields(Case))

USUAL: dict[str, Any] = {field.name: field.default for field in fields(Case)}
"""The default along each axis; `MISSING` for those that must be given."""

DECLARED = {field.name: field.metadata for field in fields(Case)}
"""The arguments of `axis` for each field."""

COUNTS: dict[str, str] = {name: said["count"] for name, said in DECLARED.items() if said["count"]}
"""The axes that are positive integers, and what each counts."""

CHOICES: dict[str, tuple[str, ...]] = {
    name: said["choices"] for name, said in DECLARED.items() if said["choices"]
}
"""The axes that have few values, and these values."""

OPTIONAL_AXES = AXES[AXES.index("optimizer") :]
"""Axes that ids and titles name only where the value is not the default."""

OF_TRANSFORMER = {
    axis: type(USUAL[axis])() for axis in ("seq_len", "model_size", "attention", "model")
}
"""The transformer's parameters, and their values in cases of other workloads."""


def unusual(axes: Mapping[Any, Any]) -> dict[str, str]:
    """The values along `OPTIONAL_AXES` that are known and not the default."""
    known = {axis: axes[axis] for axis in OPTIONAL_AXES if axes.get(axis)}
    return {axis: str(value) for axis, value in known.items() if value != USUAL[axis]}


def file_name_of(subject: str) -> str:
    """The id of a case or script as the name of a file or folder."""
    return subject.replace("/", "@2F")
