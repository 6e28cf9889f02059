"""Tests that imports go one way, and that `pytest --help` loads no slow package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dpbench
from dpbench.instruments import built_in

PACKAGE = Path(dpbench.__file__).parent

MAY_IMPORT = {
    "core": set(),
    "workloads": {"core"},
    "training": {"core", "workloads"},
    "results": {"core"},
    "child": {"core", "workloads", "training", "results"},
    "launch": {"core", "training", "child", "results"},
    "verify": {"core", "workloads", "training", "child", "launch"},
    "instruments": {"core", "workloads", "training", "child", "launch", "results"},
    "show": {"core", "results"},
    "advice": {"core", "child", "launch", "instruments", "results"},
    "private": {"core", "workloads", "training"},
    "integrations": {"core", "workloads", "training", "private"},
}
"""Folders of dpbench that each folder may import. `FRONTS` may import all of them."""

FRONTS = {"session", "plugin", "commands", "__main__", "__init__", "pytest_plugin"}
FRONTS |= {"runner", "session_store"}
"""Files and folders that only another front may import."""

MAY_USE = {
    "torch": {
        *("workloads", "training", "child", "launch", "verify", "instruments", "advice"),
        *("commands", "private", "integrations"),
    },
    "opacus": {"workloads", "training", "private"},
    "pandas": {"results", "show", "session", "plugin", "commands", "advice", "instruments"},
    "plotly": {"show"},
    "submitit": {"commands"},
    "tabulate": {"show"},
    "pytest": {"plugin", "pytest_plugin"},
    "xdist": {"plugin"},
}
"""Folders that may import a library."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Yield every name that a file imports, also in functions and for type checks.

    In a file that uses ``import_module``, every text that is the name of a module counts. Only the
    public names of the package are imported on first use.
    """
    text = path.read_text(encoding="utf-8")
    by_text = "import_module" in text and path != PACKAGE / "__init__.py"
    for node in ast.walk(ast.parse(text)):
        if by_text and isinstance(node, ast.Constant) and node.value in FILES:
            yield str(node.value)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> str | None:
    """Return the module of dpbench that contains an imported name, or None."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def place_of(module: str) -> str:
    """Return the folder or file of the package to which a module belongs."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def names_imported() -> dict[str, set[str]]:
    """Return the names that each module imports."""
    return {module: set(imports(path)) for module, path in FILES.items()}


@cache
def arrows() -> dict[str, set[str]]:
    """Return the modules of dpbench that each module imports."""
    return {
        module: {found for name in names if (found := file_of(name))} - {module}
        for module, names in names_imported().items()
    }


def loaded_by(*modules: str) -> set[str]:
    """Return the packages that a new process has loaded after importing modules."""
    script = f"import sys, {', '.join(modules)}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_pytests_start_and_measured_processes_load_neither_torch_nor_pandas() -> None:
    front = ["dpbench", "dpbench.core.case", "dpbench.core.registry", "dpbench.pytest_plugin"]
    front += [f"dpbench.commands.{name}" for name in ("cli", "doctor")]
    # A script may set its environment before it imports torch.
    measuring = sorted(module for module in FILES if module.endswith(".recorder"))
    measuring += ["dpbench.commands.step", "dpbench.commands.verify"]
    measuring += [kind.__module__ for kind in built_in()]
    assert loaded_by(*front, *measuring).isdisjoint(
        {"torch", "opacus", "pandas", "numpy", "plotly"}
    )


def test_data_and_tables_load_no_torch() -> None:
    rooms = [m for m in FILES if place_of(m) in ("results", "show") and ".html" not in m]
    loaded = loaded_by(*rooms)
    assert "pandas" in loaded
    assert loaded.isdisjoint({"torch", "opacus", "plotly"})


def test_every_place_is_in_the_table() -> None:
    assert {place_of(module) for module in FILES} <= set(MAY_IMPORT) | FRONTS


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_a_place_imports_only_what_lies_below_it(place: str) -> None:
    found = {
        (module, other)
        for module, others in arrows().items()
        for other in others
        if place_of(module) == place and place_of(other) not in MAY_IMPORT[place] | {place}
    }
    assert not found


def test_no_front_is_imported_from_below() -> None:
    assert set(MAY_IMPORT).isdisjoint(FRONTS)
    below = {o for m, others in arrows().items() if place_of(m) in MAY_IMPORT for o in others}
    assert {place_of(module) for module in below}.isdisjoint(FRONTS)


@pytest.mark.parametrize("library", MAY_USE)
def test_a_library_is_used_where_it_belongs(library: str) -> None:
    users = {
        place_of(module)
        for module, names in names_imported().items()
        if library in {name.partition(".")[0] for name in names}
    }
    assert users <= MAY_USE[library]


def test_results_know_no_settings_grid_or_gpu() -> None:
    others = {f"dpbench.core.{name}" for name in ("settings", "grid", "gpu")}
    found = {module for module in FILES if place_of(module) == "results"}
    assert not {module for module in found if arrows()[module] & others}


def test_no_instrument_imports_another() -> None:
    """Code that instruments share is in ``instruments/`` itself."""

    def folder(module: str) -> str:
        return module.split(".")[2] if module.count(".") > 2 else ""

    found = {
        (module, other)
        for module, others in arrows().items()
        for other in others
        if place_of(module) == place_of(other) == "instruments"
        and folder(other) not in ("", folder(module))
        and folder(module)
    }
    assert not found


def test_files_do_not_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", dpbench.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(dpbench, name) is not None
    assert name in dir(dpbench)


@pytest.mark.parametrize(
    "name",
    [
        "TrainerBase",
        "StandardTrainer",
        "DPSGDTrainer",
        "DPGhostClippingTrainer",
        "DPFastGradientClippingTrainer",
        "TRAINERS",
        "MODEL_SIZES",
        "SimpleBigModel",
        "get_random_dataloader",
        "phase",
        "Case",
        "Grid",
    ],
)
def test_name_that_scripts_rely_on_is_public(name: str) -> None:
    assert name in dpbench.__all__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dpbench' has no attribute 'Cake'"):
        dpbench.Cake  # noqa: B018
