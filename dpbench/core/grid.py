"""Defines `Grid`: values for the fields of a case, and every combination of these values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from dpbench.core.case import (
    AXES,
    BASELINE_TRAINER,
    COUNTS,
    TRANSFORMER,
    TRANSFORMER_AXES,
    USUAL,
    Case,
    check_belongs,
    own_axes,
)
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parameter_grid
from dpbench.core.registry import NAMED, TRAINERS
from dpbench.core.subject import SCRIPT


@dataclass(frozen=True)
class Grid:
    """Values for each field (axis) of `Case`. Every combination of values is a case.

    Combinations of ``parallel`` and ``gpus`` that cannot be measured are left out.

    Args:
        name: the name of the grid, or of its file without the extension.
        axes: the values of each field of a case. A field that is missing here has its default.
        baseline: the trainer whose numbers are the denominators of ratios.
    """

    name: str
    axes: Mapping[str, tuple[Any, ...]]
    baseline: str = BASELINE_TRAINER

    def __post_init__(self) -> None:
        for axis in AXES:
            if not self.values(axis):
                raise ConfigurationError(f"grid {self.name!r}: {axis} has no value")
        self.cases()  # raises an error for impossible values

    def values(self, axis: str) -> tuple[Any, ...]:
        """Return the values along an axis."""
        usual = USUAL[axis]
        return self.axes.get(axis, () if usual is MISSING else (usual,))

    def cases(self) -> list[Case]:
        """Return the cases without duplicates, in the order of the axes' values.

        Cases that differ in the trainer only follow each other.
        """
        _, *outer = AXES
        trainers, *others = map(self.values, AXES)
        if self.values("workload") == (SCRIPT,):  # the grid of `dpbench exec` has no cases
            return []
        every = (dict(zip(outer, values, strict=True)) for values in product(*others))
        left_out = self._left_out()
        cells = [_cell(axes) for axes in every if (axes["parallel"], axes["gpus"]) not in left_out]
        cases = (Case(trainer=name, **cell) for cell in cells for name in trainers)
        return list(dict.fromkeys(cases))

    def _left_out(self) -> list[tuple[str, int]]:
        """Return the impossible combinations of ``parallel`` and ``gpus``, which have no case.

        One GPU needs ``parallel=none``, and several GPUs need another value. If a value has no
        possible combination, returns an empty list, so that `Case` raises an error.
        """
        every = [*product(self.values("parallel"), self.values("gpus"))]
        possible = [(way, gpus) for way, gpus in every if (way == "none") == (gpus == 1)]
        if [*map(set, zip(*every, strict=True))] != [*map(set, zip(*possible, strict=True))]:
            return []
        return [pair for pair in every if pair not in possible]

    @property
    def notes(self) -> list[str]:
        """Lines that tell the user which combinations are left out."""
        said = ", ".join(f"parallel={way} with gpus={gpus}" for way, gpus in self._left_out())
        return [f"left out: {said}"] if said else []

    def with_axes(self, baseline: str | None = None, **axes: Iterable[Any]) -> Grid:
        """Return a grid with other values along these axes.

        Duplicate values are removed, and names are replaced with short names.
        """
        # The baseline comes first, because it can register a short name that the axes use.
        name = TRAINERS.canonical(self.baseline if baseline is None else baseline)
        if "set" in axes:
            axes["set"] = parameter_grid(axes["set"])
        every = {**self.axes, **axes}
        short = {a: map(known.canonical, every[a]) for a, known in NAMED.items() if a in every}
        once = {axis: tuple(dict.fromkeys(values)) for axis, values in {**every, **short}.items()}
        same = (once, name) == (self.axes, self.baseline)
        grid = self if same else replace(self, axes=once, baseline=name)
        check_belongs(axes, grid.values("workload"))
        return grid

    def as_json(self) -> dict[str, Any]:
        """Return the grid as plain JSON types, with the values along every axis."""
        axes = {axis: self.values(axis) for axis in AXES}
        return {"name": self.name, **axes, "baseline": self.baseline}

    @classmethod
    def named(cls, name_or_file: str) -> Grid:
        """Return the built-in grid with a name, or read a grid from a TOML file.

        The keys of a file are ``baseline`` and fields of `Case`. The value of a field is one value
        or a list of values. A name with parameters can be a table such as
        ``{name = "dpsgd", clip = ["flat", "per_layer"]}``.
        """
        if name_or_file in GRIDS:
            return GRIDS[name_or_file]
        if not name_or_file.endswith(".toml"):
            raise unknown("grid", name_or_file, GRIDS, "or a .toml file")
        path = Path(name_or_file)
        try:
            table = tomllib.loads(path.read_bytes().decode())
            baseline = table.pop("baseline", BASELINE_TRAINER)
            return cls(path.stem, _axes(table), baseline).with_axes()
        except OSError as error:
            raise ConfigurationError(f"grid file {path}: {error.strerror}") from error
        except (ConfigurationError, ValueError, RecursionError) as error:  # e.g. not TOML
            raise ConfigurationError(f"grid file {path}: {error}") from error


def _cell(axes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a cell, with defaults for the axes that `own_axes` returns.

    `Case` then sets these axes from the workload's name, or empties them.
    """
    own = own_axes(axes["workload"])
    return axes | {axis: USUAL[axis] for axis in own if axis in TRANSFORMER_AXES}


def _axes(table: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Check the table of a grid file, and return the values along each axis."""
    axes: dict[str, tuple[Any, ...]] = {}
    for key, value in table.items():
        wanted = int if key in COUNTS else str
        values = value if isinstance(value, list) else [value]
        if key not in AXES:
            raise unknown("key", key, (*AXES, "baseline"))
        if not values or any(type(v) is not wanted for v in values):
            raise ConfigurationError(
                f"{key} must be {wanted.__name__} or a list of {wanted.__name__}, not {value!r}"
            )
        axes[key] = parameter_grid(values) if key == "set" else tuple(values)
    workloads = axes.get("workload", (TRANSFORMER,))
    check_belongs(axes, workloads)
    needed = ("trainer", "batch_size", *(("seq_len",) if TRANSFORMER in workloads else ()))
    if missing := [key for key in needed if key not in axes]:
        raise ConfigurationError(f"missing {', '.join(missing)}")
    return axes


_ALL_TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")

# grad_sample=ew is left out, because its logical bytes cannot be counted.
_OPACUS_WAYS = ("standard", "dpsgd", "dpsgd:grad_sample=functorch", "dpsgd_ghost")
_LAYERS = "linear conv layernorm groupnorm instancenorm embedding mha rnn lstm gru"

GRIDS = {
    name: Grid(name, {"trainer": _ALL_TRAINERS, "batch_size": batch_sizes, "seq_len": seq_lens})
    for name, batch_sizes, seq_lens in (
        ("grid1", (8, 16), (256, 1024)),
        ("grid2", (4, 8), (512, 1024)),
    )
}
"""The built-in grids by name, for example for ``--grid``."""
METHODS = "methods"
"""The default grid of ``dpbench run``: the cells of grid1, also with the trainer ``fused``."""
GRIDS["opacus-layers"] = Grid(  # the layers of ``benchmarks/`` in Opacus's repository
    "opacus-layers",
    {
        "trainer": _OPACUS_WAYS,
        "batch_size": (16, 64, 256),
        "workload": tuple(f"layer:layer={layer}" for layer in _LAYERS.split()),
    },
)
GRIDS[METHODS] = replace(
    GRIDS["grid1"], name=METHODS, axes={**GRIDS["grid1"].axes, "trainer": (*_ALL_TRAINERS, "fused")}
)
