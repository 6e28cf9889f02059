"""Many cases: every combination of some values, by name or from a file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dpbench.case import (
    AXES,
    BASELINE_TRAINER,
    COUNTS,
    OF_TRANSFORMER,
    TRANSFORMER,
    Case,
    Parameter,
    check_belongs,
    parameter_grid,
)
from dpbench.errors import ConfigurationError, unknown


@dataclass(frozen=True)
class Grid:
    """Every combination of the values along each field of a `Case`.

    ``baseline`` is the trainer whose numbers ratios divide by.
    """

    name: str
    trainer: tuple[str, ...]
    batch_size: tuple[int, ...]
    seq_len: tuple[int, ...] = ()
    model_size: tuple[str, ...] = ("1b",)
    precision: tuple[str, ...] = ("fp32",)
    attention: tuple[str, ...] = ("sdpa",)
    model: tuple[str, ...] = ("simple",)
    workload: tuple[str, ...] = (TRANSFORMER,)
    set: tuple[str, ...] = ("",)
    optimizer: tuple[str, ...] = ("sgd",)
    micro_batches: tuple[int, ...] = (1,)
    trainable: tuple[str, ...] = ("all",)
    activation_checkpointing: tuple[str, ...] = ("off",)
    baseline: str = BASELINE_TRAINER

    def __post_init__(self) -> None:
        for axis in AXES:
            needed = axis not in OF_TRANSFORMER or TRANSFORMER in self.workload
            if needed and not getattr(self, axis):
                raise ConfigurationError(f"grid {self.name!r}: {axis} has no value")
        self.cases()  # refuses values that no case can have

    def cases(self) -> list[Case]:
        """The cases, each once, those that share a baseline together, trainers in order."""
        _, *outer = AXES
        cells = [
            dict(zip(outer, values, strict=True))
            for values in product(*(getattr(self, axis) or ("",) for axis in outer))
        ]
        for cell in cells:
            if cell["workload"] != TRANSFORMER:
                cell.update(OF_TRANSFORMER)
        return list(dict.fromkeys(Case(name, **cell) for cell in cells for name in self.trainer))

    @classmethod
    def named(cls, name_or_file: str) -> Grid:
        """A grid by name, or from TOML: one key per `Case` field, a value or a list."""
        if name_or_file in GRIDS:
            return GRIDS[name_or_file]
        if not name_or_file.endswith(".toml"):
            raise unknown("grid", name_or_file, GRIDS, "or a .toml file")
        path = Path(name_or_file)
        try:
            return cls(path.stem, **_axes(tomllib.loads(path.read_text(encoding="utf-8"))))
        except OSError as error:
            raise ConfigurationError(f"grid file {path}: {error.strerror}") from error
        except (ConfigurationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"grid file {path}: {error}") from error


def _axes(table: dict[str, Any]) -> dict[str, Any]:
    """The axes of a grid file's table, and its baseline."""
    axes: dict[str, Any] = {}
    if "baseline" in table:
        axes["baseline"] = baseline = table.pop("baseline")
        if not isinstance(baseline, str):
            raise ConfigurationError(f"baseline must be the name of a trainer, not {baseline!r}")
    for key, value in table.items():
        wanted = int if key in COUNTS else str
        values = value if isinstance(value, list) else [value]
        if key not in AXES:
            raise unknown("key", key, (*AXES, "baseline"))
        if key == "set":
            values = [*_parameters(value)]
        elif not values or any(type(v) is not wanted for v in values):
            raise ConfigurationError(
                f"{key} must be {wanted.__name__} or a list of {wanted.__name__}, not {value!r}"
            )
        axes[key] = tuple(values)
    workloads = axes.get("workload", (TRANSFORMER,))
    check_belongs(axes, workloads)
    needed = ("trainer", "batch_size", *(("seq_len",) if TRANSFORMER in workloads else ()))
    if missing := [key for key in needed if key not in axes]:
        raise ConfigurationError(f"missing {', '.join(missing)}")
    return axes


def _parameters(table: object) -> tuple[str, ...]:
    """The combinations of a grid file's ``set = {image_size = [64, 224]}``."""
    values = {
        name: value if isinstance(value, list) else [value]
        for name, value in (table.items() if isinstance(table, dict) else [("set", [])])
    }
    if not all(v and all(isinstance(each, Parameter) for each in v) for v in values.values()):
        raise ConfigurationError(
            f"set must be a table of numbers, strings or lists of them, not {table!r}"
        )
    return parameter_grid(f"{name}={each}" for name, value in values.items() for each in value)


_ALL_TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")

GRIDS = {
    "grid1": Grid("grid1", _ALL_TRAINERS, batch_size=(8, 16), seq_len=(256, 1024)),
    "grid2": Grid("grid2", _ALL_TRAINERS, batch_size=(4, 8), seq_len=(512, 1024)),
}
