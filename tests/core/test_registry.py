"""How trainers and models are named, and found."""

from __future__ import annotations

import collections
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import dpbench
from dpbench.core.case import Case
from dpbench.core.grid import Grid
from dpbench.core.registry import MODELS, TRAINERS, Registry, locate, resolve
from dpbench.launch.case_process import python_path
from tests.core.test_case import refusal


class Outer:
    class Inner:
        pass


@pytest.fixture
def registry() -> Registry:
    """Two classes of the standard library that dpbench pretends to own."""
    return Registry("trainer", {"count": "collections:Counter", "od": "collections:OrderedDict"})


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a module ``own_…`` below a directory on ``sys.path``, for this test alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(path: str, text: str = "class Mine:\n    pass\n") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return tmp_path

    yield write
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


# --- the built-in names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "class_name"),
    [
        ("standard", "StandardTrainer"),
        ("dpsgd", "DPSGDTrainer"),
        ("dpsgd_ghost", "DPGhostClippingTrainer"),
        ("dpsgd_fgc", "DPFastGradientClippingTrainer"),
        ("micro_batch", "MicroBatchTrainer"),
        ("fused", "FusedTrainer"),
    ],
)
def test_trainer_has_a_short_name(short: str, class_name: str) -> None:
    assert TRAINERS[short] is getattr(dpbench, class_name)
    assert TRAINERS.canonical(f"{TRAINERS[short].__module__}:{class_name}") == short


# --- spellings -------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["count", "collections:Counter", "count=collections:Counter"])
def test_every_spelling_of_a_builtin_means_its_short_name(
    registry: Registry, spelling: str
) -> None:
    assert registry.canonical(spelling) == "count"
    assert registry[spelling] is collections.Counter
    assert list(registry) == ["count", "od"]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("collections:ChainMap", "ChainMap"),
        ("mine=collections:ChainMap", "mine"),
        ("collections.abc:Sized", "Sized"),
        (f"{__name__}:Outer.Inner", "Inner"),
    ],
)
def test_import_target_registers_a_class(registry: Registry, spelling: str, name: str) -> None:
    assert registry.canonical(spelling) == name
    assert name in list(registry)
    assert registry[name] is registry[spelling]
    assert registry[name].__name__ == spelling.rpartition(":")[2].rpartition(".")[2]


def test_class_named_once_keeps_its_short_name(registry: Registry) -> None:
    registry.canonical("mine=collections:ChainMap")
    assert registry.canonical("collections:ChainMap") == "mine"


def test_class_can_be_registered_itself(registry: Registry) -> None:
    registry.register("mine", Outer)
    assert registry["mine"] is Outer
    assert registry.argument("mine") == f"mine={__name__}:Outer"


@pytest.mark.parametrize(
    "spelling",
    ["nonsense", "mine=", "collections.Counter", "=a.b:C"],
)
def test_unknown_name_is_refused_with_what_exists(registry: Registry, spelling: str) -> None:
    for attempt in (lambda: registry.canonical(spelling), lambda: registry[spelling]):
        said = f"unknown trainer {str(spelling)!r}; choose from count, od (or package.module:Class)"
        assert refusal(attempt).removesuffix("; did you mean count?") == said


@pytest.mark.parametrize("spelling", ["mine=:Class", "mine=my-package:Class"])
def test_target_that_cannot_be_imported_is_refused(registry: Registry, spelling: str) -> None:
    target = spelling.partition("=")[2]
    message = refusal(lambda: registry.canonical(spelling))
    assert message.startswith(f"trainer 'mine': the measured process cannot import {target!r}")
    assert message.endswith("with parameters as package.module:Class:NAME=VALUE")


@pytest.mark.parametrize("name", ["my-trainer", "../up"])
def test_short_name_must_be_an_identifier(registry: Registry, name: str) -> None:
    message = refusal(lambda: registry.canonical(f"{name}=collections:ChainMap"))
    assert message == f"trainer name {name!r} must be a Python identifier"


# --- clashes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["count", "mine"])
def test_name_that_means_something_else_is_refused(registry: Registry, taken: str) -> None:
    registry.register("mine", "collections:ChainMap")
    before = dict(registry)
    message = refusal(lambda: registry.canonical(f"{taken}=collections:deque"))
    assert f"{taken!r} already stands for collections:" in message
    assert message.endswith("choose another name with NAME=collections:deque")
    assert dict(registry) == before


@pytest.mark.parametrize("named", [None, Outer])
def test_what_is_no_text_is_no_name(registry: Registry, named: Any) -> None:
    assert "is not a name; write a name as package.module:Class" in refusal(
        lambda: registry.canonical(named)
    )


def test_entry_point_of_an_installed_package_is_a_name(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("theirs", "collections:ChainMap", "dpbench.trainers")
    monkeypatch.setattr(
        "dpbench.core.registry.entry_points", lambda group: [entry] if group == entry.group else []
    )
    assert registry["theirs"] is collections.ChainMap
    assert registry.argument("theirs") == "theirs=collections:ChainMap"


# --- the names in cases and grids -----------------------------------------------------------------


def test_resolved_case_has_short_names() -> None:
    model = "dpbench.workloads.transformer:SimpleBigModel"
    case = Case("dpbench.training.dpsgd:DPSGDTrainer:clip=per_layer", 8, 256, model=model)
    assert resolve(case) == Case("dpsgd:clip=per_layer", 8, 256, model="simple")


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [("trainer", "dpsgdd", TRAINERS), ("trainer", "", TRAINERS), ("model", "gpt", MODELS)],
)
def test_unknown_trainer_or_model_is_refused_with_what_exists(
    field: str, value: str, known: Registry
) -> None:
    case = Case(**{"trainer": "dpsgd", "batch_size": 8, "seq_len": 256, field: value})
    message = refusal(lambda: resolve(case))
    assert message.startswith(f"unknown {field} {value!r}; choose from {', '.join(known)}")


def test_grid_has_each_case_once_however_it_is_spelled() -> None:
    grid = Grid.named("grid1").with_axes(
        trainer=["dpsgd", "dpbench.training.dpsgd:DPSGDTrainer"], seq_len=[8, 8]
    )
    axes = {"trainer": ("dpsgd",), "batch_size": (8, 16), "seq_len": (8,)}
    assert grid.axes == axes
    assert "unknown trainer 'sgd'" in refusal(
        lambda: Grid.named("grid1").with_axes(trainer=["sgd"])
    )


def test_unknown_names_rank_last() -> None:
    names = ["theirs", "dpsgd", "standard"]
    assert sorted(names, key=TRAINERS.rank) == ["standard", "dpsgd", "theirs"]


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
