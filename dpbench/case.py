"""What is measured: one configuration (`Case`) and many of them (`Grid`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, unknown

PRECISIONS = ("fp32", "tf32", "bf16")
"""``fp32``: float32 with IEEE float32 matrix products. ``tf32``: float32 tensors, TF32 matrix
products. ``bf16``: parameters, activations and gradients are bfloat16."""

ATTENTIONS = ("sdpa", "dp_mha")
"""``sdpa``: ``scaled_dot_product_attention``. ``dp_mha``: Opacus's ``DPMultiheadAttention``."""

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


@dataclass(frozen=True)
class Case:
    """One configuration to measure.

    Whether there is such a trainer or model is for `dpbench.registry` to say: a case from a saved
    run may name what this process does not know.

    Args:
        trainer: a short name; `dpbench.registry.resolve` makes one of any other spelling.
        batch_size: examples in a step, B.
        seq_len: tokens in an example, T.
        model_size: a name in `MODEL_SIZES`, or ``VOCABULARYxHIDDENxLAYERSxHEADS``.
        precision: one of `PRECISIONS`.
        attention: one of `ATTENTIONS`.
        model: a short name, as for the trainer.
    """

    trainer: str
    batch_size: int
    seq_len: int
    model_size: str = "1b"
    precision: str = "fp32"
    attention: str = "sdpa"
    model: str = "simple"

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", _positive("batch size", self.batch_size))
        object.__setattr__(self, "seq_len", _positive("sequence length", self.seq_len))
        ModelSize.parse(self.model_size)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.attention not in ATTENTIONS:
            raise unknown("attention", self.attention, ATTENTIONS)

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Case:
        """The case that a row is about; what else is in the row is left alone."""
        return cls(**{axis: row[axis] for axis in AXES})

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
        if self.model == SCRIPT:
            return self.trainer
        return f"{self.trainer}-bs{self.batch_size}-seq{self.seq_len}-{self.configuration}"

    @property
    def configuration(self) -> str:
        """Everything but trainer, batch size and sequence length, e.g. ``1b-fp32``."""
        parts = [self.model_size, self.precision]
        if self.attention != "sdpa":
            parts.append(self.attention)
        if self.model != "simple":
            parts.append(self.model)
        return "-".join(parts)

    @property
    def report_path(self) -> Path:
        """Where this case's report lies below the report directory."""
        name = f"report_{self.trainer}_bs{self.batch_size}_seq{self.seq_len}.ncu-rep"
        return Path(self.configuration) / name


AXES = tuple(f.name for f in fields(Case))


@dataclass(frozen=True)
class Grid:
    """Every combination of the values along each field of a `Case`."""

    name: str
    trainer: tuple[str, ...]
    batch_size: tuple[int, ...]
    seq_len: tuple[int, ...]
    model_size: tuple[str, ...] = ("1b",)
    precision: tuple[str, ...] = ("fp32",)
    attention: tuple[str, ...] = ("sdpa",)
    model: tuple[str, ...] = ("simple",)

    def __post_init__(self) -> None:
        for axis in AXES:
            if not getattr(self, axis):
                raise ConfigurationError(f"grid {self.name!r}: {axis} has no value")
        self.cases()  # refuses values that no case can have

    def cases(self) -> list[Case]:
        """The cases, each once, those that share a baseline together, trainers in order."""
        _, *outer = AXES
        cases = [
            Case(trainer, *values)
            for values in product(*(getattr(self, axis) for axis in outer))
            for trainer in self.trainer
        ]
        return list(dict.fromkeys(cases))

    def narrow(self, **axes: Iterable[Any] | None) -> Grid:
        """Replace the values along the named axes; None leaves an axis alone."""
        chosen: dict[str, Any] = {k: tuple(v) for k, v in axes.items() if v is not None}
        return replace(self, **chosen)

    @classmethod
    def named(cls, name_or_file: str) -> Grid:
        """A grid by name, or from a TOML file."""
        if name_or_file in GRIDS:
            return GRIDS[name_or_file]
        if not name_or_file.endswith(".toml"):
            raise unknown("grid", name_or_file, GRIDS, "or a .toml file")
        return cls.from_file(Path(name_or_file))

    @classmethod
    def from_file(cls, path: Path) -> Grid:
        """Read a grid from TOML: one key per `Case` field, a value or a list of values."""
        try:
            return cls(path.stem, **_axes(tomllib.loads(path.read_text(encoding="utf-8"))))
        except OSError as error:
            raise ConfigurationError(f"grid file {path}: {error.strerror}") from error
        except (ConfigurationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"grid file {path}: {error}") from error


def _axes(table: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of a grid file's table."""
    axes = {}
    for key, value in table.items():
        if key not in AXES:
            raise unknown("key", key, AXES)
        wanted = int if key in ("batch_size", "seq_len") else str
        values = value if isinstance(value, list) else [value]
        if not values or any(type(v) is not wanted for v in values):
            raise ConfigurationError(
                f"{key} must be {wanted.__name__} or a list of {wanted.__name__}, not {value!r}"
            )
        axes[key] = tuple(values)
    if missing := [key for key in ("trainer", "batch_size", "seq_len") if key not in axes]:
        raise ConfigurationError(f"missing {', '.join(missing)}")
    return axes


_ALL_TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")

GRIDS = {
    "grid1": Grid("grid1", _ALL_TRAINERS, batch_size=(8, 16), seq_len=(256, 1024)),
    "grid2": Grid("grid2", _ALL_TRAINERS, batch_size=(4, 8), seq_len=(512, 1024)),
}

SCRIPT = "script"
"""The model of a case that is somebody's script or loop; no more than its name is known."""


def script_case(name: str) -> Case:
    """The case of a script or loop that is called so."""
    return Case(name, batch_size=1, seq_len=1, model_size="1x1x1x1", model=SCRIPT)
