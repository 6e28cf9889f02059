"""How trainers and models are named, and found."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import dpbench
from dpbench.core.case import Case
from dpbench.core.grid import Grid
from dpbench.core.registry import MODELS, TRAINERS, Registry, resolve
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


def test_a_name_can_be_looked_for_without_importing_its_class() -> None:
    registry = Registry("trainer", {"absent": "no_such_module:Class"})
    assert "absent" in registry
    assert "nonsense" not in registry


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


def test_two_classes_of_one_name_need_names_of_their_own(
    registry: Registry, write_module: Callable[..., Path]
) -> None:
    write_module("own_first.py")
    write_module("own_second.py")
    registry.canonical("own_first:Mine")
    assert "NAME=own_second:Mine" in refusal(lambda: registry.canonical("own_second:Mine"))
    registry.canonical("second=own_second:Mine")
    assert registry["Mine"] is not registry["second"]


def test_own_class_may_be_called_as_that_of_a_builtin(registry: Registry) -> None:
    assert registry.canonical("elsewhere:Counter") == "Counter"
    assert registry.canonical("collections:Counter") == "count"


@pytest.mark.parametrize("named", [None, 3, True, Outer, Outer()])
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


def test_unknown_trainer_in_a_grid_file_is_refused_by_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("trainer = 'sgd'\nbatch_size = 8\nseq_len = 256\n")
    message = refusal(lambda: Grid.named(str(path)))
    assert message.startswith(f"grid file {path}: unknown trainer 'sgd'; choose from standard")


def test_unknown_names_rank_last() -> None:
    names = ["theirs", "dpsgd", "standard"]
    assert sorted(names, key=TRAINERS.rank) == ["standard", "dpsgd", "theirs"]
