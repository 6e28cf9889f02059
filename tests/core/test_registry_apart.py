"""Names of classes in other processes: what these could not import, and what they are told."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from dpbench.core.case import Case
from dpbench.core.registry import TRAINERS, Registry, locate, resolve
from dpbench.launch.case_process import python_path
from tests.core import test_registry
from tests.core.test_registry import refusal

# fixtures
registry = test_registry.registry
write_module = test_registry.write_module


# --- what a child process could not import ---------------------------------------------------


CANNOT = "the measured process cannot import"


def test_local_class_is_refused(registry: Registry) -> None:
    class Local:
        pass

    message = refusal(lambda: registry.register("mine", Local))
    assert CANNOT in message
    assert "Local'; define the class at the top level of a module" in message


def test_class_of_the_main_script_is_refused(registry: Registry) -> None:
    script = type("Mine", (), {"__module__": "__main__"})
    for target in (script, "__main__:Mine"):
        assert CANNOT in refusal(lambda target=target: registry.register("mine", target))


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("no_such_module:Mine", "no_such_module"),
        ("no_such_package.module:Mine", "no_such_package"),
        ("collections.no_such_part:Mine", "collections.no_such_part"),
    ],
)
def test_missing_module_is_named_with_a_remedy(
    registry: Registry, target: str, missing: str
) -> None:
    message = refusal(lambda: registry[f"mine={target}"])
    assert f"no module named {missing!r}" in message
    assert "PYTHONPATH" in message


@pytest.mark.parametrize("attribute", ["NoSuchClass", "Counter.NoSuchClass"])
def test_missing_class_is_named_with_its_module(registry: Registry, attribute: str) -> None:
    message = refusal(lambda: registry[f"mine=collections:{attribute}"])
    assert f"unknown class of collections {attribute!r}; choose from " in message
    assert "Counter" in message


def test_missing_opacus_is_said_to_be_missing(
    registry: Registry, write_module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module("own_private.py", "from opacus import GradSampleModule as Mine\n")
    monkeypatch.setitem(sys.modules, "opacus", None)  # what an import of it then finds
    message = refusal(lambda: registry["own_private:Mine"])
    assert message.endswith("needs Opacus: pip install opacus")


def test_import_error_inside_an_own_module_is_shown_as_it_is(
    registry: Registry, write_module: Callable[..., Path]
) -> None:
    write_module("own_broken.py", "import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry["own_broken:Mine"]


# --- for a child process ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "argument"),
    [
        ("count", "count"),
        ("collections:ChainMap", "ChainMap=collections:ChainMap"),
        ("mine=collections:ChainMap", "mine=collections:ChainMap"),
    ],
)
def test_argument_is_understood_where_nothing_was_registered(
    registry: Registry, spelling: str, argument: str
) -> None:
    elsewhere = Registry("trainer", {"count": "collections:Counter"})
    assert registry.argument(spelling) == argument
    assert elsewhere.canonical(argument) == registry.canonical(spelling)
    assert elsewhere[argument] is registry[spelling]


def test_child_finds_what_this_process_was_told_where_to_find(
    write_module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a class of a case is, and what its module imports; not what a program appended."""
    inherited, last = tmp_path / "inherited", tmp_path / "last"
    for directory in (inherited, last):
        directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{inherited}{os.pathsep}{tmp_path / 'absent'}")
    directory = write_module("own_module.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(last)])
    path = python_path(resolve(Case("own_module:Mine", 4, 64)))
    assert path is not None
    first, *others = path.split(os.pathsep)
    assert (first, others[-1]) == (str(directory), str(inherited))
    assert {str(last), str(tmp_path / "absent"), sysconfig.get_path("stdlib")}.isdisjoint(others)
    assert python_path(Case("dpsgd", 4, 64)) is None


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("own_module.py", "own_module:Mine"),
        ("own_package/__init__.py", "own_package:Mine"),
        ("own_namespace/inner.py", "own_namespace.inner:Mine"),
    ],
)
def test_child_finds_an_own_class_wherever_this_process_imported_it_from(
    write_module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, path: str, target: str
) -> None:
    """Also from a directory at the end of sys.path, or as pytest's importlib mode does it."""
    directory = str(write_module(path))
    case = resolve(Case(target, 4, 64))
    assert TRAINERS[case.trainer].__name__ == "Mine"
    monkeypatch.setattr(sys, "path", [e for e in sys.path if e != directory] + [directory])
    assert directory in str(python_path(case)).split(os.pathsep)
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert directory in str(python_path(case)).split(os.pathsep)


# --- whether it is there -----------------------------------------------------------------------


def test_what_came_with_dpbench_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find torch.optim, Python imports torch: seconds before the first case starts."""
    looked: list[str] = []
    monkeypatch.setattr("dpbench.core.registry.find_spec", looked.append)
    locate([Case(trainer, 4, 64, optimizer="adamw") for trainer in TRAINERS])
    assert not looked


def test_module_is_located_without_being_imported(
    registry: Registry, write_module: Callable[..., Path]
) -> None:
    write_module("own_module.py", "raise RuntimeError('imported')")
    write_module("own_names/own_inner/trainers.py")  # namespace packages, one in the other
    write_module("own_package/__init__.py")
    for spelling in (
        "own_module:Mine",
        "own_names.own_inner.trainers:Inner",
        "collections.abc:Mapping",
        "count",
    ):
        registry.locate(spelling)
    assert "own_module" not in sys.modules
    missing = {
        "own_absent:First": "own_absent",
        "own_package.nowhere.deep:Other": "own_package.nowhere",
        "own_module.deep:Third": "own_module.deep",
        "json.nowhere:Fourth": "json.nowhere",
    }
    write_module("own_module.py")
    for spelling, name in missing.items():
        words = refusal(lambda spelling=spelling: registry.locate(spelling))
        assert f"{spelling!r}: no module named {name!r}; run in the module's directory" in words
