"""Trainers, models, workloads, optimizers and instruments by name, resolved only when used.

Names map to import targets (``package.module:Class``), so that a command can check a name,
or hand it to a child process, without importing torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import joined, parted, read_parameters
from dpbench.core.parameters import arguments
from dpbench.core.subject import Subject


class Registry(Mapping[str, Any]):
    """A mapping of names to classes that are imported on first use.

    A class is named by its short name (``dpsgd``), which may be an entry point of an installed
    package; by an import target (``package.module:Class``); or by a target with the short name
    that it shall have (``mine=package.module:Class``). Each can be followed by parameters
    (``dpsgd:clip=per_layer``), which are arguments of the class. Arguments named in ``given`` are
    no parameters, because the caller of the class passes them. ``check`` is the import target of a
    function that refuses a spelling and its class, if this must be imported to be located or is
    PyTorch's.
    """

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str],
        given: Iterable[str] = (),
        check: str = "",
    ) -> None:
        self.kind, self.given, self.check = kind, {*given}, check
        self._targets, self._builtin = dict(targets), dict(targets)
        self._installed: set[str] = set()

    def register(self, name: str, target: Any) -> None:
        """Give a class, or an import target ``package.module:Class``, a short name."""
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        module, _, attribute = target.partition(":")
        parts = f"{module}.{attribute}".split(".")
        if module == "__main__" or not all(part.isidentifier() for part in parts):
            raise ConfigurationError(
                f"{self.kind} {name!r}: {target!r} cannot be imported by the process that "
                f"measures it; define it at the top level of a module: package.module:Class, and "
                f"parameters follow as :NAME=VALUE"
            )
        if not name.isidentifier():
            raise ConfigurationError(f"{self.kind} name {name!r} must be a Python identifier")
        if (meant := self._targets.get(name, target)) != target:
            raise ConfigurationError(
                f"{self.kind} name {name!r} already means {meant}; "
                f"choose another with NAME={target}"
            )
        self._targets[name] = target

    def register_installed(self) -> None:
        """Register the entry points of installed packages in the group ``dpbench.KINDs``."""
        for entry in entry_points(group=f"dpbench.{self.kind}s"):
            if entry.name not in self:
                self.register(entry.name, entry.value)
                self._installed.add(entry.name)

    def canonical(self, spelling: str) -> str:
        """Return a spelling's short name, with sorted parameters; register an import target."""
        name, parameters = parted(spelling)
        return joined(self._short(name), parameters)

    def _name(self, spelling: str) -> str:
        """The short name alone."""
        return parted(self.canonical(spelling))[0]

    def _short(self, spelling: str) -> str:
        name, _, target = spelling.rpartition("=")
        if spelling not in self._targets and ":" not in target:
            self.register_installed()
        for known in self._targets:
            if spelling in (known, self._targets[known]):
                return known
        if ":" not in target or spelling.startswith("="):
            raise unknown(self.kind, spelling, self, "or package.module:Class")
        name = name or target.split(":")[-1].rpartition(".")[2]
        self.register(name, target)
        return name

    def __contains__(self, name: object) -> bool:
        return name in self._targets  # the mapping's own would import the class

    def __getitem__(self, spelling: str) -> Any:
        """The class of a name; with parameters, a partial call with these arguments."""
        with self._importing(spelling) as (module, attribute):
            imported = import_module(module)
        try:
            named = attrgetter(attribute)(imported)
        except AttributeError as error:
            package = module.partition(".")[0]
            classes = [
                name
                for name, value in vars(imported).items()
                if isinstance(value, type) and value.__module__.partition(".")[0] == package
            ]
            raise unknown(f"class of {module}", attribute, classes or ["none"]) from error
        name, text = parted(self.canonical(spelling))
        if not text:
            return named
        given = read_parameters(text)
        parameters = arguments(f"{self.kind} {name}", named, given, self.given)
        return partial(named, **parameters)

    def locate(self, spelling: str) -> None:
        """Refuse a class whose module is missing, or which does not take its parameters.

        Imports classes with parameters; for others, only their enclosing packages.
        """
        named = self._targets[self._name(spelling)]
        if parted(spelling)[1] or (
            named not in self._builtin.values() and named.startswith("torch.")
        ):
            made = self[spelling]
            if self.check:
                resolve_name(self.check)(spelling, made)
        elif not self.is_builtin(spelling):  # some of which import torch
            with self._importing(spelling) as (module, _):
                if module not in sys.modules and find_spec(module) is None:
                    raise ModuleNotFoundError(name=module)

    @contextmanager
    def _importing(self, spelling: str) -> Iterator[tuple[str, str]]:
        """The module and attribute of a spelling; if it is missing, an error with a remedy.

        The current directory is on ``sys.path`` only for the user's own code, and last, because
        libraries may import modules that lie there.
        """
        module, _, attribute = self._targets[name := self._name(spelling)].partition(":")
        if name not in {*self._builtin, *self._installed} and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            yield module, attribute
        except ModuleNotFoundError as error:
            if needed := _PACKAGES.get(str(error.name)):
                raise ConfigurationError(f"{self.kind} {spelling!r} needs {needed}") from error
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, one that it imports does not
            remedy = "run from its directory or put that on PYTHONPATH"
            if module in self._builtin:
                remedy = f"a parameter is written {module}:NAME=VALUE"
            raise ConfigurationError(
                f"{self.kind} {spelling!r}: no module named {error.name!r}; {remedy}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def rank(self, name: str) -> int:
        """The sort key of a name in tables: by registration, unknown names last."""
        return [*self._targets, parted(name)[0]].index(parted(name)[0])

    def is_builtin(self, name: str) -> bool:
        """Whether a name is built in."""
        return self._name(name) in self._builtin

    def argument(self, name: str) -> str:
        """The spelling for a process in which nothing was registered."""
        name, parameters = parted(self.canonical(name))
        named = name if name in self._builtin else f"{name}={self._targets[name]}"
        return joined(named, parameters)

    def import_path(self, name: str) -> Path | None:
        """The directory that a named class was imported from; None if it was not imported."""
        return folder_of(self._targets[self._name(name)].partition(":")[0])


def folder_of(module: str) -> Path | None:
    """The directory that a module was imported from; None if it was not imported from a file."""
    if (file := getattr(sys.modules.get(module), "__file__", None)) is None:
        return None
    return Path(file).parents[module.count(".") + (Path(file).name == "__init__.py")]


_PACKAGES = {
    "opacus": "Opacus: pip install opacus",
    "transformers": "Transformers: pip install transformers",
    "plotly": "Plotly: pip install plotly jinja2",
    "jinja2": "Jinja: pip install plotly jinja2",
    "matplotlib": "Matplotlib: pip install matplotlib",
}
"""Packages that may be missing, and how to install them."""


TRAINERS = Registry(
    "trainer",
    {
        "standard": "dpbench.training.standard:StandardTrainer",
        "dpsgd": "dpbench.training.dpsgd:DPSGDTrainer",
        "dpsgd_ghost": "dpbench.training.fast_gradient_clipping:DPGhostClippingTrainer",
        "dpsgd_fgc": "dpbench.training.fast_gradient_clipping:DPFastGradientClippingTrainer",
        "lean": "dpbench.training.lean:LeanTrainer",
        "ghost_lean": "dpbench.training.ghost_lean:GhostLeanTrainer",
        "micro_batch": "dpbench.training.micro_batch:MicroBatchTrainer",
        "book_keeping": "dpbench.training.book_keeping:BookKeepingTrainer",
        "fused": "dpbench.training.fused:FusedTrainer",
    },
    (
        "model",
        "batch_size",
        "optimizer",
        "workload",
        "micro_batches",
        "autocast",
        "parallel",
        "sampling",
        "compile",
    ),
)
"""Trainers by short name; the first is the usual baseline of ratios."""

MODELS = Registry(
    "model",
    {"simple": "dpbench.workloads.transformer:SimpleBigModel"},
    ("size", "attention", "max_seq_len"),
)
"""Models by short name; a model is called as ``Model(size, attention=…, max_seq_len=…)``."""

WORKLOADS = Registry(
    "workload",
    {
        "transformer": "dpbench.workloads.transformer:Transformer",
        "resnet": "dpbench.workloads.resnet:ResNet",
        "layer": "dpbench.workloads.layer:Layer",
        "hf-causal-lm": "dpbench.workloads.huggingface:CausalLM",
        "hf-sequence-classification": "dpbench.workloads.huggingface:SequenceClassification",
        "hf-image-classification": "dpbench.workloads.huggingface:ImageClassification",
    },
)
"""Workloads by short name: subclasses of `dpbench.workloads.base.Workload`."""

OPTIMIZERS = Registry(
    "optimizer",
    {
        "sgd": "torch.optim:SGD",
        "momentum": "dpbench.training.base:Momentum",
        "adam": "torch.optim:Adam",
        "adamw": "torch.optim:AdamW",
    },
    ("params", "lr"),
    check="dpbench.training.base:check_optimizer",
)
"""Optimizers by short name; one is called as ``Optimizer(parameters, lr=…)``."""

INSTRUMENTS = Registry(
    "instrument",
    {
        "timing": "dpbench.instruments.timing:Timing",
        "ncu": "dpbench.instruments.ncu.ncu:Ncu",
        "cupti": "dpbench.instruments.cupti.cupti:Cupti",
        "ncu_kernels": "dpbench.instruments.ncu.ncu:NcuKernels",
        "logical": "dpbench.instruments.logical.logical:Logical",
        "torch_profiler": "dpbench.instruments.torch_profiler.profiler:TorchProfiler",
        "nsys": "dpbench.instruments.nsys.nsys:Nsys",
    },
)
"""Instruments by name, in the order in which they measure. Others are named by import target, or
by an entry point; see `dpbench.instruments.choose`."""

OUTPUTS = Registry(
    "output",
    {
        "json": "dpbench.show.outputs:json_document",
        "md": "dpbench.show.outputs:markdown_tables",
        "csv": "dpbench.show.outputs:csv_rows",
        "html": "dpbench.show.html.page:page",
        "svg": "dpbench.show.picture:svg",
    },
)
"""Outputs by file extension: functions from runs and a view to text or bytes; see
`dpbench.show.outputs`."""


Measured = TypeVar("Measured", bound=Subject)

NAMED = {"trainer": TRAINERS, "model": MODELS, "workload": WORKLOADS, "optimizer": OPTIMIZERS}
"""The axes of a case that are names, and the registry of each."""


def names_of(case: Subject) -> Iterator[tuple[str, Registry, str]]:
    """Each name in a case: its axis, its registry, the name; a script has none."""
    if not isinstance(case, Case):
        return
    for axis, registry in NAMED.items():
        if axis != "model" or case.model:
            name = getattr(case, axis)
            if axis == "workload" and case.set:
                name = joined(registry.canonical(name), str(case.set))
            yield axis, registry, name


def resolve(case: Measured) -> Measured:
    """The case with short names, whichever spelling it has."""
    names: dict[str, Any] = {axis: known.canonical(name) for axis, known, name in names_of(case)}
    case = replace(case, **names) if names else case
    locate([case])
    return case


def locate(cases: Iterable[Subject]) -> None:
    """Refuse cases that name a missing module, or parameters that a class does not take."""
    for case in cases:
        for _, registry, name in names_of(case):
            registry.locate(name)


def import_named(case: Subject) -> None:
    """Import the classes that a case names."""
    for _, registry, name in names_of(case):
        registry[name]


def is_builtin(case: Subject) -> bool:
    """Whether every name in a case is built in."""
    return all(registry.is_builtin(name) for _, registry, name in names_of(case))


def called(what: str, named: Any, needs: str, *given: object, **options: object) -> Any:
    """The result of a named class for these arguments, if it takes them."""
    try:
        inspect.signature(named).bind(*given, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{what} cannot be called so: {error}; {needs}") from error
    return named(*given, **options)
