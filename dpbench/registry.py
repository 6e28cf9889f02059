"""Named trainers and models, resolved only when used.

Names map to import targets (``package.module:Class``), so that a command can check a name,
or hand it to a child process, without importing torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpbench.case import AXES, SCRIPT, Case, Grid
from dpbench.errors import ConfigurationError, unknown


class Registry(Mapping[str, Any]):
    """A mapping of names to classes that are imported on first use.

    A class can be named in four ways: its short name (``dpsgd``), its class name
    (``DPSGDTrainer``), an import target (``package.module:Class``), or a target with the short
    name it shall have (``mine=package.module:Class``).
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)
        self._builtin = dict(targets)

    def register(self, name: str, target: str | Callable[..., Any]) -> None:
        """Give a class, or an import target ``package.module:Class``, a short name."""
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        if target.startswith("__main__:") or "<locals>" in target:
            raise ConfigurationError(
                f"{self.kind} {name!r}: {target} cannot be imported by the process that "
                f"measures it; define it at the top level of a module"
            )
        if not name.isidentifier():
            raise ConfigurationError(f"{self.kind} name {name!r} must be a Python identifier")
        module, _, attribute = target.partition(":")
        if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
            raise ConfigurationError(
                f"{self.kind} {name!r}: {target!r} must be written package.module:Class"
            )
        classes = {_class_name(builtin): builtin for builtin in self._builtin.values()}
        meant = self._targets.get(name) or classes.get(name, target)
        if meant != target:
            raise ConfigurationError(
                f"{self.kind} name {name!r} already means {meant}; "
                f"choose another with NAME={target}"
            )
        self._targets[name] = target

    def canonical(self, spelling: str) -> str:
        """The short name for any of the accepted spellings; registers import targets."""
        if spelling in self._targets:
            return spelling
        for name, target in self._targets.items():
            if spelling in (target, _class_name(target)):
                return name
        name, separator, target = spelling.rpartition("=")
        if ":" in target:
            name = name if separator else _class_name(target).rpartition(".")[2]
            self.register(name, target)
            return name
        raise unknown(self.kind, spelling, self, "or package.module:Class")

    def __contains__(self, name: object) -> bool:
        return name in self._targets  # the mapping's own would import the class

    def __getitem__(self, spelling: str) -> Any:
        module, _, attribute = self._targets[self.canonical(spelling)].partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise self._not_found(spelling, module, error) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigurationError(
                    f"{self.kind} {spelling!r}: module {module!r} has no {attribute!r}"
                )
            found = getattr(found, part)
        return found

    def locate(self, spelling: str) -> None:
        """Refuse a class whose module is not there; packages around it are imported, it is not."""
        module = self._targets[self.canonical(spelling)].partition(":")[0]
        try:
            if module not in sys.modules and find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
        except ModuleNotFoundError as error:
            raise self._not_found(spelling, module, error) from error

    def _not_found(self, spelling: str, module: str, error: ModuleNotFoundError) -> Exception:
        """The error to raise for a module that cannot be imported."""
        if error.name == "opacus":
            return ConfigurationError(f"{self.kind} {spelling!r} needs Opacus: pip install opacus")
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return error  # the module is there, and what it imports is not
        return ConfigurationError(
            f"{self.kind} {spelling!r}: no module named {error.name!r}; "
            f"run from its directory or put that on PYTHONPATH"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def rank(self, name: object) -> int:
        """The place of a name in tables: in the order of registration, what is unknown last."""
        return [*self._targets, name].index(name)

    def is_builtin(self, name: str) -> bool:
        """Whether a name came with dpbench."""
        return self.canonical(name) in self._builtin

    def argument(self, name: str) -> str:
        """The spelling that a process with nothing registered understands."""
        name = self.canonical(name)
        return name if name in self._builtin else f"{name}={self._targets[name]}"

    def import_path(self, name: str) -> Path | None:
        """The directory from which this process imported an outside class, if it has.

        A child needs it on ``PYTHONPATH``: pytest, for one, extends ``sys.path`` by itself.
        """
        if self.is_builtin(name):
            return None
        module = self._targets[self.canonical(name)].partition(":")[0]
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None:
            return None
        path = Path(file).resolve()
        return path.parents[module.count(".") + (path.name == "__init__.py")]


def _class_name(target: str) -> str:
    return target.rpartition(":")[2]


TRAINERS = Registry(
    "trainer",
    {
        "standard": "dpbench.training.standard:StandardTrainer",
        "dpsgd": "dpbench.training.dpsgd:DPSGDTrainer",
        "dpsgd_ghost": "dpbench.training.fast_gradient_clipping:DPGhostClippingTrainer",
        "dpsgd_fgc": "dpbench.training.fast_gradient_clipping:DPFastGradientClippingTrainer",
    },
)
"""Trainers by short name; the first is the baseline of every ratio."""

MODELS = Registry("model", {"simple": "dpbench.workloads.transformer:SimpleBigModel"})
"""Models by short name; a model is called as ``Model(size, attention=…, max_seq_len=…)``."""

INSTRUMENTS = Registry(
    "instrument",
    {
        "timing": "dpbench.instruments.timing:Timing",
        "ncu": "dpbench.instruments.ncu.instrument:Ncu",
        "cupti": "dpbench.instruments.cupti.instrument:Cupti",
        "ncu_kernels": "dpbench.instruments.ncu.instrument:NcuKernels",
        "speed_of_light": "dpbench.instruments.ncu.speed_of_light:SpeedOfLight",
        "logical": "dpbench.instruments.logical.instrument:Logical",
        "torch_profiler": "dpbench.instruments.torch_profiler.instrument:TorchProfiler",
    },
)
"""Instruments by name, in the order in which they measure. Others are named by import target, or
by an entry point; see `dpbench.instruments.choose`."""


def resolve(case: Case) -> Case:
    """The case with the short names of its trainer and model, whichever spelling it has."""
    if case.model == SCRIPT:
        return case
    return replace(
        case, trainer=TRAINERS.canonical(case.trainer), model=MODELS.canonical(case.model)
    )


def chosen_grid(name_or_file: str, **axes: Iterable[Any] | None) -> Grid:
    """A grid, with the values along the named axes replaced, each once and by its short name."""
    grid = Grid.named(name_or_file)
    try:
        grid = _resolved(grid)
    except ConfigurationError as error:  # the built-in grids have none
        raise ConfigurationError(f"grid file {name_or_file}: {error}") from error
    return _resolved(grid.narrow(**axes))


def _resolved(grid: Grid) -> Grid:
    axes = {axis: getattr(grid, axis) for axis in AXES}
    axes["trainer"] = map(TRAINERS.canonical, grid.trainer)
    axes["model"] = map(MODELS.canonical, grid.model)
    return grid.narrow(**{axis: dict.fromkeys(values) for axis, values in axes.items()})


def locate(cases: Iterable[Case]) -> None:
    """Refuse cases of whose trainer or model the module is not there."""
    named = {(case.trainer, case.model) for case in cases}
    for trainer, model in sorted(named):
        TRAINERS.locate(trainer)
        MODELS.locate(model)


def arguments(case: Case) -> list[str]:
    """A case as command-line options that any dpbench process understands."""
    values = asdict(case) | {
        "trainer": TRAINERS.argument(case.trainer),
        "model": MODELS.argument(case.model),
    }
    defaults = {field.name: field.default for field in fields(case)}
    return [
        text
        for name, value in values.items()
        if value != defaults[name] or name == "model_size"
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def child_python_path(*directories: Path | None) -> str | None:
    """``PYTHONPATH`` with the given directories first, or None if there are none to add."""
    added = dict.fromkeys(str(directory) for directory in directories if directory)
    if not added:
        return None
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*added, *filter(None, [inherited])])
