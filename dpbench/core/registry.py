"""Registries of trainers, models, workloads, optimizers, instruments and outputs by name.

A registry maps a name to an import target (``package.module:Class``), which is imported on first
use. So a command can check that a name exists without importing torch. The last functions check and
import the names in a case.
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
from dpbench.core.names import arguments, joined, parted, read_parameters
from dpbench.core.subject import Subject


class Registry(Mapping[str, Any]):
    """A mapping of names to classes or functions that are imported on first use.

    A spelling of a class is its short name (``dpsgd``), an import target
    (``package.module:Class``), or a target with a new short name (``mine=package.module:Class``).
    The names of entry points of installed packages are short names, too. Parameters can follow a
    spelling (``dpsgd:clip=per_layer``). The parameters become arguments of the class.

    Args:
        kind: the kind of class, such as ``trainer``, for messages and entry points.
        targets: the import target of each built-in name.
        given: names of arguments that the caller passes to the class. Parameters cannot have these
            names.
        check: the import target of a function that `locate` calls with a spelling and its class.
            The function raises an error if the class cannot be used.
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
        """Give a short name to a class or to an import target ``package.module:Class``."""
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        module, _, attribute = target.partition(":")
        parts = f"{module}.{attribute}".split(".")
        if module == "__main__" or not all(part.isidentifier() for part in parts):
            raise ConfigurationError(
                f"{self.kind} {name!r}: the measured process cannot import {target!r}; define the "
                f"class at the top level of a module and name it as package.module:Class, with "
                f"parameters as package.module:Class:NAME=VALUE"
            )
        if not name.isidentifier():
            raise ConfigurationError(f"{self.kind} name {name!r} must be a Python identifier")
        if (meant := self._targets.get(name, target)) != target:
            raise ConfigurationError(
                f"{self.kind} name {name!r} already stands for {meant}; "
                f"choose another name with NAME={target}"
            )
        self._targets[name] = target

    def register_installed(self) -> None:
        """Register the entry points of installed packages, e.g. of the group ``dpbench.trainers``.

        A name that is already registered keeps its class.
        """
        for entry in entry_points(group=f"dpbench.{self.kind}s"):
            if entry.name not in self:
                self.register(entry.name, entry.value)
                self._installed.add(entry.name)

    def canonical(self, spelling: str) -> str:
        """Return the short name with sorted parameters.

        If the spelling is a new import target, also registers a short name for the target.
        """
        if isinstance(spelling, str) and spelling in self._targets:
            return spelling
        name, parameters = parted(spelling)
        return joined(self._short(name), parameters)

    def _name(self, spelling: str) -> str:
        """Return the short name without parameters."""
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
        return name in self._targets  # `Mapping.__contains__` would import the class

    def __getitem__(self, spelling: str) -> Any:
        """Import and return a class, with parameters in the spelling as a `functools.partial`."""
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

    def check_registered(self, name: str) -> None:
        """Raise `ConfigurationError` if a name from a file is not registered.

        Code that only a file names must not be imported, so an import target is refused.
        """
        self.register_installed()
        if parted(name)[0] not in self:
            raise unknown(self.kind, name, self)

    def locate(self, spelling: str) -> None:
        """Raise `ConfigurationError` if a module is missing or a class refuses its parameters.

        Imports the class if the spelling has parameters, or if a class of PyTorch is not built in.
        For other classes that are not built in, imports only the packages that contain the module.
        """
        named = self._targets[self._name(spelling)]
        if parted(spelling)[1] or (
            named not in self._builtin.values() and named.startswith("torch.")
        ):
            made = self[spelling]
            if self.check:
                resolve_name(self.check)(spelling, made)
        elif not self.is_builtin(spelling):  # built-in modules need no check
            with self._importing(spelling) as (module, _):
                if module not in sys.modules and find_spec(module) is None:
                    raise ModuleNotFoundError(name=module)

    @contextmanager
    def _importing(self, spelling: str) -> Iterator[tuple[str, str]]:
        """Yield the module and the attribute of a spelling; explain a failed import in the block.

        For the user's own code, adds the current directory at the end of ``sys.path``. At the
        beginning, a module in the current directory could hide a module that a library imports.
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
                raise  # the module exists, and a module that it imports does not
            remedy = "run in the module's directory or add the directory to PYTHONPATH"
            if module in self._builtin:
                remedy = f"write a parameter as {module}:NAME=VALUE"
            raise ConfigurationError(
                f"{self.kind} {spelling!r}: no module named {error.name!r}; {remedy}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def rank(self, name: str) -> int:
        """Return the place of a name in the order of registration; unknown names are last."""
        return [*self._targets, parted(name)[0]].index(parted(name)[0])

    def is_builtin(self, name: str) -> bool:
        """Return True if dpbench itself registers the name."""
        return self._name(name) in self._builtin

    def argument(self, name: str) -> str:
        """Return a spelling that also works in a process in which the name is not registered."""
        name, parameters = parted(self.canonical(name))
        named = name if name in self._builtin else f"{name}={self._targets[name]}"
        return joined(named, parameters)

    def import_path(self, name: str) -> Path | None:
        """Return the directory from which a class was imported, or None if it is not imported."""
        return folder_of(self._targets[self._name(name)].partition(":")[0])


def folder_of(module: str) -> Path | None:
    """Return the directory in ``sys.path`` from which a module was imported.

    Returns None if the module is not imported or has no file.
    """
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
"""For each package that may be missing, its name and the command that installs it."""


TRAINERS = Registry(
    "trainer",
    {
        "standard": "dpbench.training.standard:StandardTrainer",
        "dpsgd": "dpbench.training.dpsgd:DPSGDTrainer",
        "dpsgd_ghost": "dpbench.training.dpsgd:DPGhostClippingTrainer",
        "dpsgd_fgc": "dpbench.training.dpsgd:DPFastGradientClippingTrainer",
        "micro_batch": "dpbench.training.micro_batch:MicroBatchTrainer",
        "fused": "dpbench.training.fused:FusedTrainer",
    },
    (
        "model",
        "batch_size",
        "optimizer",
        "seed",
        "workload",
        "micro_batches",
        "autocast",
        "parallel",
        "sampling",
        "compile",
    ),
)
"""Trainers by short name."""

MODELS = Registry(
    "model",
    {"simple": "dpbench.workloads.transformer:SimpleBigModel"},
    ("size", "attention", "max_seq_len"),
)
"""Models by short name. They are called as ``Model(size, attention=…, max_seq_len=…)``."""

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
"""Subclasses of `dpbench.workloads.base.Workload` by short name."""

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
"""Optimizers by short name. They are called as ``Optimizer(parameters, lr=…)``."""

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
"""The built-in instruments by name. `dpbench.instruments.choose` also accepts import targets and
entry points."""

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
"""Outputs by file extension. An output is a function that converts runs to text or bytes, see
`dpbench.show.outputs`."""


def check_class(what: str, named: Any, base: type[Any], needs: str) -> None:
    """Raise `ConfigurationError` for a class (or a `partial` of one) that does not extend ``base``.

    Call this before the class is called, because a class such as `subprocess.Popen` acts at once.
    """
    kind = named.func if isinstance(named, partial) else named
    if isinstance(kind, type) and not issubclass(kind, base):
        raise ConfigurationError(
            f"{what} is the class {kind.__qualname__}, which is no {base.__name__}; {needs}"
        )


def called(
    what: str, named: Any, base: type[Any], needs: str, *given: object, **options: object
) -> Any:
    """Call a subclass of ``base``, or a function that returns an instance of ``base``.

    Args:
        what: the class in words, such as ``model simple``, for the error message.
        named: the class or function.
        base: the class of which the result must be an instance.
        needs: what the class or function must be, for the error message.
        given: positional arguments.
        options: keyword arguments.

    Raises:
        ConfigurationError: the class or the result is something else, or does not accept the
            arguments.
    """
    check_class(what, named, base, needs)
    try:
        inspect.signature(named).bind(*given, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{what} does not accept its arguments: {error}; {needs}"
        ) from error
    made = named(*given, **options)
    if not isinstance(made, base):
        raise ConfigurationError(
            f"{what} makes a {type(made).__name__}, which is no {base.__name__}; {needs}"
        )
    return made


Measured = TypeVar("Measured", bound=Subject)

NAMED = {"trainer": TRAINERS, "model": MODELS, "workload": WORKLOADS, "optimizer": OPTIMIZERS}
"""The registry of each axis whose values are names."""


def names_of(case: Subject) -> Iterator[tuple[str, Registry, str]]:
    """Yield the axis, the registry and the spelling of each name in a case.

    Yields nothing for a script.
    """
    if not isinstance(case, Case):
        return
    for axis, registry in NAMED.items():
        if axis != "model" or case.model:
            name = getattr(case, axis)
            if axis == "workload" and case.set:
                name = joined(registry.canonical(name), str(case.set))
            yield axis, registry, name


def resolve(case: Measured) -> Measured:
    """Return the case with short names; raise `ConfigurationError` if `locate` refuses a name."""
    names: dict[str, Any] = {axis: known.canonical(name) for axis, known, name in names_of(case)}
    case = replace(case, **names) if names else case
    locate([case])
    return case


def resolve_saved(case: Measured) -> Measured:
    """Return a case of a saved run like `resolve`, if each of its names is registered here.

    So a file cannot choose which module Python imports, or what Python calls.
    """
    if isinstance(case, Case):
        for axis, registry in NAMED.items():
            if axis != "model" or case.model:
                registry.check_registered(getattr(case, axis))
    return resolve(case)


def locate(cases: Iterable[Subject]) -> None:
    """Raise `ConfigurationError` if a module is missing or a class refuses its parameters."""
    for case in cases:
        for _, registry, name in names_of(case):
            registry.locate(name)


def import_named(case: Subject) -> None:
    """Import every class that a case names."""
    for _, registry, name in names_of(case):
        registry[name]


def is_builtin(case: Subject) -> bool:
    """Return True if a case names only classes that dpbench registers; True for scripts."""
    return all(registry.is_builtin(name) for _, registry, name in names_of(case))
