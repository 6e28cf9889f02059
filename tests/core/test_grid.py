"""Grids: every combination of some values, by name or from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.grid import GRIDS, Grid
from dpbench.workloads.layer import LAYERS
from tests.core.test_case import ALL_TRAINERS, VALUES, quickly, refusal


def several(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=2, unique=True).map(tuple)


ALONG = {axis: several(values) for axis, values in VALUES.items()}
GRID = st.builds(Grid, name=st.just("mine"), axes=st.fixed_dictionaries(ALONG))
GRID1 = GRIDS["grid1"]


def with_values(**axes: tuple[Any, ...]) -> Grid:
    """Grid 1 with other values along some axes."""
    return replace(GRID1, axes={**GRID1.axes, **axes})


@quickly
@given(GRID)
def test_grid_has_every_combination_once(grid: Grid) -> None:
    cases = list(grid.cases())
    assert len(cases) == len(set(cases)) == prod(len(grid.values(axis)) for axis in AXES)
    for axis in AXES:
        assert {getattr(case, axis) for case in cases} == set(grid.values(axis))


def test_grid_leaves_out_several_gpus_alone_and_one_in_parallel_and_says_so() -> None:
    grid = with_values(parallel=("none", "ddp"), gpus=(1, 2), seq_len=(8,))
    ways = {(case.parallel, case.gpus) for case in grid.cases()}
    assert ways == {("none", 1), ("ddp", 2)}
    assert grid.notes == ["left out: parallel=none with gpus=2, parallel=ddp with gpus=1"]
    assert not GRID1.notes


@pytest.mark.parametrize(
    ("parallel", "gpus"), [(("none",), (1, 2)), (("none", "ddp"), (2,)), (("ddp",), (1, 2))]
)
def test_grid_is_refused_that_would_leave_a_value_without_a_case(
    parallel: tuple[str, ...], gpus: tuple[int, ...]
) -> None:
    assert "several GPUs need parallel=ddp or fsdp2" in refusal(
        lambda: with_values(parallel=parallel, gpus=gpus)
    )


def test_grid_with_an_impossible_case_is_refused_when_it_is_made() -> None:
    assert "'fp8'" in refusal(lambda: with_values(precision=("fp32", "fp8")))
    assert "batch size" in refusal(lambda: with_values(batch_size=(8, 0)))


@pytest.mark.parametrize(
    ("name", "batch_sizes", "seq_lens"),
    [("grid1", (8, 16), (256, 1024)), ("grid2", (4, 8), (512, 1024))],
)
def test_named_grid_is_the_experiment_of_that_name(
    name: str, batch_sizes: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    cases = list(Grid.named(name).cases())
    assert len(cases) == 16
    assert set(cases) == {
        Case(trainer, batch_size, seq_len, model_size="1b", precision="fp32")
        for trainer in ALL_TRAINERS
        for batch_size in batch_sizes
        for seq_len in seq_lens
    }


def test_opacus_layers_are_all_layers_each_way() -> None:
    cases = Grid.named("opacus-layers").cases()
    assert len(cases) == 120
    assert {case.set for case in cases} == {f"layer={layer}" for layer in LAYERS}


def test_baseline_comes_first_among_the_cases_of_its_cell() -> None:
    cases = list(Grid.named("opacus-layers").cases())
    cells = list(dict.fromkeys(case.baseline for case in cases))
    assert cases == [
        case
        for cell in cells
        for case in (cell, *(c for c in cases if c.baseline == cell and c != cell))
    ]


def test_unknown_grid_is_refused_with_the_named_ones() -> None:
    message = refusal(lambda: Grid.named("grid3"))
    assert "unknown grid 'grid3'; choose from grid1, grid2, opacus-layers, methods (or" in message


# --- grid files ------------------------------------------------------------------------------


@pytest.fixture
def grid_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a grid file and says where it is."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_grid_file_takes_a_value_or_a_list_for_each_axis(grid_file: Callable[[str], str]) -> None:
    path = grid_file(
        """
        trainer = ["standard", "dpbench.training.dpsgd:DPSGDTrainer"]
        batch_size = [8, 16]
        seq_len = 256
        model_size = "medium"
        """
    )
    grid = Grid.named(path)
    assert grid.name == "mine"
    assert list(grid.cases()) == [
        Case(trainer, batch_size, 256, model_size="medium")
        for batch_size in (8, 16)
        for trainer in ("standard", "dpsgd")
    ]


def test_grid_file_takes_names_with_parameters(
    grid_file: Callable[[str], str],
) -> None:
    path = grid_file(
        """
        batch_size = 8
        baseline = "dpsgd:grad_sample=hooks"
        workload = "resnet"
        set = ["depth=18", "depth=34", "image_size=32"]
        trainer = ["standard", "dpbench.training.dpsgd:DPSGDTrainer:clip=per_layer"]
        """
    )
    grid = Grid.named(path)
    assert grid.baseline == "dpsgd:grad_sample=hooks"
    assert grid.cases() == [
        Case(trainer, 8, workload="resnet", set={"depth": depth, "image_size": 32})
        for depth in (18, 34)
        for trainer in ("standard", "dpsgd:clip=per_layer")
    ]


def test_parameters_of_the_workload_replace_the_axes_of_a_grid() -> None:
    grid = Grid.named("grid1").with_axes(workload=["transformer:seq_len=8,model_size=tiny"])
    assert {(case.seq_len, case.model_size) for case in grid.cases()} == {(8, "tiny")}
    with pytest.raises(ConfigurationError, match="seq_len is given twice"):
        Grid.named("grid1").with_axes(workload=["transformer:seq_len=8"], seq_len=[16])


def test_saved_grid_has_an_entry_for_each_axis() -> None:
    saved = GRID1.as_json()
    assert [*saved] == ["name", *AXES, "baseline"]
    assert saved["seq_len"] == (256, 1024)
    assert saved["precision"] == ("fp32",)


GOOD = {"trainer": '"dpsgd"', "batch_size": "8", "seq_len": "256"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("batchsize", "8", "unknown key 'batchsize'; choose from trainer, batch_size, seq_len"),
        ("batch_size", '"8"', "batch_size must be int or a list of int, not '8'"),
        ("batch_size", '[8, "16"]', "batch_size must be int"),
        ("seq_len", "[]", "seq_len must be int or a list of int, not []"),
        ("trainer", "1", "trainer must be str or a list of str, not 1"),
        ("trainer", '{name = "dpsgd"}', "trainer must be str or a list of str"),
        ("trainer", '"dpsgd:clip=flat,clip=x"', "clip is given twice, as flat and as x"),
        ("workload", '"transformer:seq_len=8"', "seq_len is given twice"),
        ("model_size", "{ hidden = 64 }", "model_size must be str"),
        ("seq_len", "[256, -1]", "sequence length must be a positive integer, not -1"),
        ("attention", '"flash"', "unknown attention 'flash'; choose from sdpa, dp_mha"),
    ],
)
def test_bad_grid_file_is_refused_by_file_and_key(
    grid_file: Callable[[str], str], key: str, value: str, said: str
) -> None:
    path = grid_file("\n".join(f"{k} = {v}" for k, v in {**GOOD, key: value}.items()))
    message = refusal(lambda: Grid.named(path))
    assert message.startswith(f"grid file {path}: ")
    assert said in message


@pytest.mark.parametrize("missing", [["batch_size", "seq_len"]])
def test_grid_file_must_have_trainer_batch_size_and_sequence_length(
    grid_file: Callable[[str], str], missing: list[str]
) -> None:
    path = grid_file("\n".join(f"{k} = {v}" for k, v in GOOD.items() if k not in missing))
    message = refusal(lambda: Grid.named(path))
    assert message == f"grid file {path}: missing {', '.join(missing)}"


def test_grid_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    assert refusal(lambda: Grid.named(str(path))) == f"grid file {path}: No such file or directory"


@pytest.mark.parametrize("content", [b"trainer: dpsgd", b"trainer = '\xff'"])
def test_grid_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    assert refusal(lambda: Grid.named(str(path))).startswith(f"grid file {path}: ")
