"""What is measured: one configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dpbench.errors import ConfigurationError, unknown

PRODUCTS = ("fp32", "tf32", "bf16")
"""``fp32``: float32 with IEEE float32 matrix products. ``tf32``: float32 tensors, TF32 matrix
products. ``bf16``: parameters, activations and gradients are bfloat16."""

MIXED = ("bf16-amp", "fp16-amp")
"""Parameters are float32, ``torch.autocast`` chooses by operator; fp16 with a ``GradScaler``."""

PRECISIONS = (*PRODUCTS, *MIXED)

_PRECISION = "|".join(sorted(PRECISIONS, key=len, reverse=True))

CHECKPOINTING = ("off", "on")
"""Whether the activations inside a block are kept for backward, or computed again there."""

ATTENTIONS = ("sdpa", "dp_mha")
"""``sdpa``: ``scaled_dot_product_attention``. ``dp_mha``: Opacus's ``DPMultiheadAttention``."""

TRANSFORMER = "transformer"
"""The workload of whose parameters four are axes with options of their own."""

OF_TRANSFORMER = {"seq_len": 0, "model_size": "", "attention": "", "model": ""}
"""These axes, and what they are in the cases of other workloads."""

BASELINE_TRAINER = "standard"

PHASES = ("forward", "backward", "clip", "noise", "optimizer")
"""The phases of a training step, in the order in which they usually come."""

OUTSIDE = "outside"
"""What a step does outside every phase; measured too, so that nothing is lost."""

ALL_PHASES = (*PHASES, OUTSIDE)
"""What a step is made of, in the order in which tables show it."""


def _positive(what: str, value: object) -> int:
    """A number as a plain integer: pandas hands out NumPy's."""
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
            _positive(f"model size: {name}", value)
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"model size: hidden {self.hidden} is not divisible by heads {self.heads}"
            )

    @classmethod
    def parse(cls, name: str) -> ModelSize:
        """A named size, or ``VOCABULARYxHIDDENxLAYERSxHEADS`` such as ``32000x1024x12x16``."""
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


Parameter = int | float | bool | str


def parameters_text(given: str | Iterable[str] | Mapping[str, object]) -> str:
    """Parameters as one text, the same however they were given."""
    if isinstance(given, Mapping):
        pairs = [(str(name), _written(value).strip()) for name, value in given.items()]
    else:
        pairs = parameter_pairs(given)
    for name, value in pairs:
        if not name.isidentifier() or not value.isprintable() or not value or "," in value:
            raise ConfigurationError(
                f"a parameter is NAME=VALUE in printable text without commas, not "
                f"{f'{name}={value}'!r}"
            )
    return ",".join(
        f"{name}={_written(_read(value))}" for name, value in sorted(dict(pairs).items())
    )


def parameter_pairs(given: str | Iterable[str]) -> list[tuple[str, str]]:
    """The names and values in one or more texts such as ``depth=50,image_size=64``."""
    text = given if isinstance(given, str) else ",".join(given)
    parts = (part.partition("=") for part in text.split(",") if text)
    return [(name.strip(), value.strip()) for name, _, value in parts]


def parameter_grid(given: Iterable[str]) -> tuple[str, ...]:
    """Every combination of parameters; one that is given several values takes each in turn."""
    values: dict[str, list[str]] = {}
    for name, value in parameter_pairs(given):
        values.setdefault(name, []).append(value)
    combinations = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    return tuple(dict.fromkeys(map(parameters_text, combinations)))


def _read(text: str) -> Parameter:
    """A number or a boolean, if it is written as one."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Case:
    """One configuration to measure.

    Whether there is such a trainer or workload is for `dpbench.registry` to say: a case from a
    saved run may name what this process does not know.

    Args:
        trainer: a short name; `dpbench.registry.resolve` makes one of any other spelling.
        batch_size: examples in a step, B; 0 if it is not known, of a script.
        seq_len: tokens in an example, T, of the transformer; so are the other `OF_TRANSFORMER`.
        model_size: a name in `MODEL_SIZES`, or ``VOCABULARYxHIDDENxLAYERSxHEADS``.
        precision: one of `PRECISIONS`.
        attention: one of `ATTENTIONS`.
        model: a short name, as for the trainer.
        workload: a short name, as for the trainer.
        set: parameters of another workload, as a mapping or as text: ``depth=50,image_size=64``.
        optimizer: a short name, as for the trainer.
        micro_batches: parts of equal size in which a batch is trained, one after the other.
        trainable: ``all``, a pattern of parameters' names such as ``*.bias``, or ``lora:RANK``.
        activation_checkpointing: one of `CHECKPOINTING`.
    """

    trainer: str
    batch_size: int
    seq_len: int = 0
    model_size: str = "1b"
    precision: str = "fp32"
    attention: str = "sdpa"
    model: str = "simple"
    workload: str = TRANSFORMER
    set: str | Mapping[str, object] = ""
    optimizer: str = "sgd"
    micro_batches: int = 1
    trainable: str = "all"
    activation_checkpointing: str = "off"

    def __post_init__(self) -> None:
        axes: dict[str, Any] = vars(self)
        if self.workload == SCRIPT:  # nobody says how it trains
            unsaid = {*AXES} - {"trainer", "batch_size", "workload"}
            axes |= {axis: type(USUAL[axis])() for axis in unsaid}
            if self.batch_size:
                axes["batch_size"] = _positive(COUNTS["batch_size"], self.batch_size)
            return
        axes["set"] = parameters_text(self.set)
        checked = {*AXES}
        if self.workload != TRANSFORMER:
            given = [a for a, none in OF_TRANSFORMER.items() if axes[a] not in (none, USUAL[a])]
            check_belongs(given, [self.workload])
            axes |= OF_TRANSFORMER
            checked -= OF_TRANSFORMER.keys()
        elif self.set:
            raise ConfigurationError(
                f"the transformer's parameters have options of their own "
                f"({', '.join(OF_TRANSFORMER)}): drop set {self.set}, or name its workload"
            )
        for axis, what in COUNTS.items():
            if axis in checked:
                axes[axis] = _positive(what, axes[axis])
        for axis, known in CHOICES.items():
            if axis in checked and axes[axis] not in known:
                raise unknown(axis.replace("_", " "), axes[axis], known)
        if "model_size" in checked:
            ModelSize.parse(self.model_size)
        if self.batch_size % self.micro_batches:
            raise ConfigurationError(
                f"batch size {self.batch_size} cannot be trained in {self.micro_batches} parts of "
                f"equal size"
            )
        lora_rank(self.trainable)  # refuses what is no rank

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Case:
        """The case that a row is about, made once however many rows it has."""
        known = {**ADDED, **row}
        return _case(*(known[axis] for axis in AXES))

    @classmethod
    def from_report_path(cls, path: Path) -> Case:
        """The case whose `report_path` this is."""
        if path.parent.name == SCRIPT and path.stem.startswith("report_"):
            return script_case(_from_path(path.stem.removeprefix("report_")))
        name = re.fullmatch(r"report_(\w+)_bs(\d+)(?:_seq(\d+))?", path.stem)
        folder = re.fullmatch(rf"(.+?)-({_PRECISION})((?:-.+)?)", path.parent.name)
        if name is None or folder is None:
            raise ConfigurationError("expected .../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep")
        axes: dict[str, Any] = {"trainer": name[1], "batch_size": int(name[2])}
        if name[3] is not None:
            axes |= {"seq_len": int(name[3]), "model_size": folder[1]}
        else:
            workload, _, parameters = _from_path(folder[1]).partition(",")
            axes |= {"workload": workload, "set": parameters}
        named, *others = re.split(rf"-(?={'|'.join(f'{axis}=' for axis in LATER)})", folder[3])
        for part in filter(None, named.split("-")):
            axes["attention" if part in ATTENTIONS else "model"] = part
        for axis, _, value in (part.partition("=") for part in others):
            axes[axis] = int(value) if axis in COUNTS else _from_path(value)
        return cls(**axes, precision=folder[2])

    @property
    def parameters(self) -> dict[str, Any]:
        """What the workload is built with."""
        if self.workload == TRANSFORMER:
            return {name: getattr(self, name) for name in OF_TRANSFORMER}
        return {name: _read(value) for name, value in parameter_pairs(str(self.set))}

    @property
    def size(self) -> ModelSize:
        """The dimensions behind ``model_size``."""
        return ModelSize.parse(self.model_size)

    @property
    def baseline(self) -> Case:
        """The same configuration under the standard trainer."""
        return replace(self, trainer=BASELINE_TRAINER)

    @property
    def id(self) -> str:
        """A name for test ids and messages, e.g. ``dpsgd-bs8-seq256-1b-fp32``."""
        if self.workload == SCRIPT:
            return self.trainer
        length = f"-seq{self.seq_len}" if self.seq_len else ""
        return f"{self.trainer}-bs{self.batch_size}{length}-{self.configuration}"

    @property
    def configuration(self) -> str:
        """Everything but trainer, batch size and sequence length, e.g. ``1b-fp32``."""
        return self._configuration(str)

    def _configuration(self, written: Callable[[str], str]) -> str:
        named = {axis: getattr(self, axis) for axis in ("attention", "model")}
        rest = [name for axis, name in named.items() if name not in ("", USUAL[axis])]
        rest += [f"{axis}={written(value)}" for axis, value in unusual(vars(self)).items()]
        return "-".join([written(trained_in(vars(self))), self.precision, *rest])

    @property
    def report_path(self) -> Path:
        """Where this case's report lies below the report directory."""
        if self.workload == SCRIPT:
            return Path(SCRIPT) / f"report_{_for_path(self.trainer)}.ncu-rep"
        length = f"_seq{self.seq_len}" if self.seq_len else ""
        name = f"report_{self.trainer}_bs{self.batch_size}{length}.ncu-rep"
        return Path(self._configuration(_for_path)) / name


def check_belongs(given: Iterable[str], workloads: Sequence[str]) -> None:
    """Refuse axes of the transformer where none is trained."""
    wrong = [axis for axis in given if axis in OF_TRANSFORMER]
    if wrong and TRANSFORMER not in workloads:
        raise ConfigurationError(
            f"{wrong[0]} is the transformer's: {workloads[0]} takes its own parameters (set)"
        )


def trained_in(axes: Mapping[Any, Any]) -> str:
    """What is trained, in short: the transformer's size, or the workload and its parameters."""
    if axes.get("workload", TRANSFORMER) == TRANSFORMER:
        return str(axes.get("model_size", ""))
    return ",".join(filter(None, (str(axes["workload"]), str(axes.get("set", "")))))


AXES = tuple(f.name for f in fields(Case))

USUAL: dict[str, Any] = {field.name: field.default for field in fields(Case)}
"""What each axis is unless it is said; `MISSING` for those that have to be."""
_case = cache(Case)

LATER = ("optimizer", "micro_batches", "trainable", "activation_checkpointing")
"""Axes that only what is unusual about them names."""


def unusual(axes: Mapping[Any, Any]) -> dict[str, str]:
    """What is known not to be as usual along `LATER`."""
    known = {axis: axes[axis] for axis in LATER if axes.get(axis)}
    return {axis: str(value) for axis, value in known.items() if value != ADDED[axis]}


def _for_path(text: str) -> str:
    """A text as part of a file's name, without ``%``, which ncu and nsys would read."""
    text = quote(text, safe="=,+").replace("%", "@")
    return re.sub(rf"-(?={_PRECISION})", "@2D", text)


def _from_path(text: str) -> str:
    return unquote(text.replace("@", "%"))


def lora_rank(trainable: str) -> int | None:
    """The rank in ``lora:RANK``; None if it is none."""
    kind, colon, rank = trainable.partition(":")
    if kind != "lora" or not colon:
        return None
    if not rank.isdecimal():
        raise ConfigurationError(f"write lora:RANK, such as lora:8, not {trainable!r}")
    return _positive("rank", int(rank))


ADDED = {axis: USUAL[axis] for axis in AXES[AXES.index("workload") :]}
"""Axes that files of older versions lack, and what they were then."""


COUNTS = {
    "batch_size": "batch size",
    "seq_len": "sequence length",
    "micro_batches": "number of micro-batches",
}
"""The axes that are whole numbers, in words."""

CHOICES = {
    "precision": PRECISIONS,
    "attention": ATTENTIONS,
    "activation_checkpointing": CHECKPOINTING,
}
"""The axes that are one of a few names."""

SCRIPT = "script"
"""The workload of a case that is somebody's script or loop: its name is known, no other axis."""


def script_case(name: str, batch_size: int = 0) -> Case:
    """The case of a script or loop that is called so, and of its batch size if somebody says it."""
    return Case(name, batch_size=batch_size, workload=SCRIPT)
