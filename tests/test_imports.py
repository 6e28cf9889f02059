"""What loads what: `pytest --help` must stay fast, and arrows go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpbench

PACKAGE = Path(dpbench.__file__).parent
OUTSIDE = [
    f"dpbench.{room}"
    for room in ("cli", "commands", "comparison", "plugin", "pytest_plugin", "session", "settings")
]
RESULTS = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted((PACKAGE / "results").rglob("*.py"))
]


def loaded_by(*modules: str) -> set[str]:
    """The packages that a new process has after importing modules."""
    script = f"import sys, {', '.join(modules)}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "module",
    ["dpbench", "dpbench.case", "dpbench.registry", "dpbench.pytest_plugin", "dpbench.cli"],
)
def test_import_loads_neither_torch_nor_pandas(module: str) -> None:
    assert loaded_by(module).isdisjoint({"torch", "opacus", "pandas", "numpy", "plotly"})


def test_results_load_no_torch() -> None:
    modules = [name.removesuffix(".__init__") for name in RESULTS]
    loaded = loaded_by(*modules)
    assert "pandas" in loaded
    assert loaded.isdisjoint({"torch", "opacus"})


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


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("case.py", ["torch", "opacus", "pandas", "dpbench.training", "dpbench.results"]),
        ("training", [*OUTSIDE, "dpbench.instruments", "dpbench.results", "pytest", "pandas"]),
        (
            "results",
            [
                *OUTSIDE,
                "dpbench.instruments",
                "dpbench.training",
                "dpbench.process.step",
                "torch",
                "pytest",
            ],
        ),
        ("session.py", ["dpbench.cli", "dpbench.commands", "dpbench.plugin", "torch", "pytest"]),
        ("settings.py", ["dpbench.session", "dpbench.commands", "dpbench.plugin", "pandas"]),
        ("commands", ["dpbench.plugin", "dpbench.pytest_plugin"]),
        ("plugin", ["dpbench.commands", "dpbench.cli"]),
        ("files.py", ["dpbench.case", "dpbench.results", "dpbench.instruments"]),
        ("instruments", [*OUTSIDE, "dpbench.process.step", "pytest"]),
        ("step.py", ["dpbench.instruments", "dpbench.results", "pytest"]),
        ("doctor", [*OUTSIDE, "dpbench.process.step", "pytest"]),
        ("ceilings.py", ["dpbench.instruments", *OUTSIDE, "pytest"]),
        ("runner.py", [*OUTSIDE, "dpbench.training", "torch"]),
    ],
)
def test_room_imports_only_what_lies_below_it(room: str, forbidden: list[str]) -> None:
    place = PACKAGE / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        for module in imports(path):
            assert not any(f"{module}.".startswith(f"{name}.") for name in forbidden), (
                path,
                module,
            )
