"""Named trainers and models, resolved only when used.

Names map to import targets (``package.module:Class``), so that a command can check a name,
or hand it to a child process, without importing torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        self._builtin = frozenset(targets)
        self._labels: set[str] = set()

    def register(self, name: str, target: str | Callable[..., Any]) -> None:
        """Give a class, or an import target ``package.module:Class``, a short name.

        Raises:
            ConfigurationError: the name is not an identifier, is taken by something else, or
                the class cannot be imported by a child process.
        """
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
        taken = {_class_name(self._targets[b]): self._targets[b] for b in self._builtin}
        meant = self._targets.get(name) or taken.get(name, target)
        if meant != target:
            raise ConfigurationError(
                f"{self.kind} name {name!r} already means {meant}; "
                f"choose another with NAME={target}"
            )
        self._targets[name] = target

    def canonical(self, spelling: str) -> str:
        """The short name for any of the accepted spellings; registers import targets."""
        if spelling in self._targets or spelling in self._labels:
            return spelling
        for name, target in self._targets.items():
            if spelling in (target, _class_name(target)):
                return name
        name, separator, target = spelling.rpartition("=")
        if ":" in target:
            name = name if separator else target.rpartition(":")[2].rpartition(".")[2]
            self.register(name, target)
            return name
        raise unknown(self.kind, spelling, self, "or package.module:Class")

    def admit(self, label: str) -> str:
        """Accept a name found in saved results: it labels rows, but nothing can be built."""
        if label not in self._targets:
            self._labels.add(label)
        return label

    def _target(self, spelling: str) -> str:
        name = self.canonical(spelling)
        if name not in self._targets:
            raise ConfigurationError(
                f"{self.kind} {name!r} is known from saved results only; "
                f"name it as {name}=package.module:Class"
            )
        return self._targets[name]

    def __contains__(self, name: object) -> bool:
        return name in self._targets  # the mapping's own would import the class

    def __getitem__(self, spelling: str) -> Any:
        target = self._target(spelling)
        module_name, _, attribute = target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name == "opacus":
                raise ConfigurationError(
                    f"{self.kind} {spelling!r} needs Opacus: pip install opacus"
                ) from error
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise self._no_module(spelling, error.name) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigurationError(
                    f"{self.kind} {spelling!r}: module {module_name!r} has no {attribute!r}"
                )
            found = getattr(found, part)
        return found

    def locate(self, spelling: str) -> None:
        """Find out whether the module of a class is there, without importing it.

        Raises:
            ConfigurationError: it is not, or there is no such name.
        """
        module = self._target(spelling).partition(":")[0]
        if missing := _missing(module):
            raise self._no_module(spelling, missing)

    def _no_module(self, spelling: str, module: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.kind} {spelling!r}: no module named {module!r}; "
            f"run from its directory or put that on PYTHONPATH"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def is_builtin(self, name: str) -> bool:
        """Whether a name came with dpbench."""
        return self.canonical(name) in self._builtin

    def argument(self, name: str) -> str:
        """The spelling that a process with nothing registered understands."""
        name = self.canonical(name)
        return name if name in self._builtin else f"{name}={self._target(name)}"

    def import_path(self, name: str) -> Path | None:
        """The directory from which this process imported an outside class, if it has.

        A child needs it on ``PYTHONPATH``: pytest, for one, extends ``sys.path`` by itself.
        """
        name = self.canonical(name)
        if name in self._builtin:
            return None
        module = self._target(name).partition(":")[0]
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None:
            return None
        path = Path(file).resolve()
        depth = module.count(".") + (path.name == "__init__.py")
        return path.parents[depth]


def _missing(module: str) -> str | None:
    """The first package or module of a dotted name that is not there, or None.

    Packages are looked into without being imported: one may load torch. What lies below nested
    namespace packages cannot be told so, and counts as there.
    """
    places: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        if name in sys.modules:
            places = getattr(sys.modules[name], "__path__", [])
            continue
        if depth and not places:  # a module, in which there can be none
            return name
        found = (finder.find_spec(name, places) for finder in sys.meta_path)
        try:
            spec = next(filter(None, found), None)
        except KeyError:  # in a namespace package, which looks for its parent among the imported
            return None
        if spec is None:
            return name
        places = spec.submodule_search_locations
    return None


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


def child_python_path(*directories: Path | None) -> str | None:
    """``PYTHONPATH`` with the given directories first, or None if there are none to add."""
    added = dict.fromkeys(str(directory) for directory in directories if directory)
    if not added:
        return None
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*added, *filter(None, [inherited])])
