"""Cases and grids: what can be asked for, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.case import ATTENTIONS, AXES, MODEL_SIZES, PRECISIONS, Case, ModelSize
from dpbench.cli import build_parser
from dpbench.commands.options import chosen_case
from dpbench.errors import ConfigurationError
from dpbench.grid import GRIDS, Grid
from dpbench.registry import MODELS, TRAINERS, arguments, chosen_grid, resolve

CELL: dict[str, Any] = {"trainer": "dpsgd", "batch_size": 8, "seq_len": 256}
ALL_TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")

POSITIVE = st.integers(1, 40_000)  # a product of two stays below 2^31
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "trainer": st.sampled_from(ALL_TRAINERS),
    "batch_size": POSITIVE,
    "seq_len": POSITIVE,
    "model_size": st.sampled_from([*MODEL_SIZES, "32000x1024x12x16"]),
    "precision": st.sampled_from(PRECISIONS),
    "attention": st.sampled_from(ATTENTIONS),
    "model": st.just("simple"),
    "workload": st.just("transformer"),
    "set": st.just(""),
    "optimizer": st.sampled_from(["sgd", "momentum", "adamw"]),
    "micro_batches": st.just(1),
    "trainable": st.sampled_from(["all", "*.bias", "lora:8"]),
}
CASES = st.builds(Case, **VALUES)

quickly = settings(deadline=None, max_examples=20)


def refusal(attempt: Callable[[], object]) -> str:
    """The one line with which an attempt is refused."""
    with pytest.raises(ConfigurationError) as caught:
        attempt()
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tiny", (1_000, 64, 2, 4)),
        ("small", (8_000, 256, 4, 8)),
        ("medium", (16_000, 512, 8, 8)),
        ("1b", (32_000, 2_048, 24, 32)),
        ("32000x1024x12x16", (32_000, 1_024, 12, 16)),
    ],
)
def test_size_has_the_dimensions_that_its_name_says(name: str, size: tuple[int, ...]) -> None:
    assert ModelSize.parse(name) == ModelSize(*size)
    assert Case(**CELL, model_size=name).size == ModelSize(*size)


@quickly
@given(vocabulary=POSITIVE, width=POSITIVE, layers=POSITIVE, heads=POSITIVE)
def test_any_size_can_be_written_out(vocabulary: int, width: int, layers: int, heads: int) -> None:
    size = ModelSize(vocabulary, width * heads, layers, heads)
    assert ModelSize.parse("x".join(map(str, asdict(size).values()))) == size


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1B",
        "2b",
        "32000x1024x12",
        "32000x1024x12x16x1",
        "axbxcxd",
        "1000x64x2x-4",
        "1e3x64x2x4",
    ],
)
def test_unknown_size_is_refused_with_the_sizes_and_the_custom_form(name: str) -> None:
    message = refusal(lambda: Case(**CELL, model_size=name))
    assert repr(name) in message
    assert all(known in message for known in (*MODEL_SIZES, "VOCABULARYxHIDDENxLAYERSxHEADS"))


@pytest.mark.parametrize("dimension", ["vocabulary", "hidden", "layers", "heads"])
@pytest.mark.parametrize("value", [0, -4, 4.0, True, "4"])
def test_dimension_must_be_a_positive_integer(dimension: str, value: object) -> None:
    dimensions: dict[str, Any] = {"vocabulary": 4, "hidden": 4, "layers": 4, "heads": 4}
    message = refusal(lambda: ModelSize(**{**dimensions, dimension: value}))
    assert message == f"model size: {dimension} must be a positive integer, not {value!r}"


def test_custom_size_without_layers_is_refused() -> None:
    assert "layers must be a positive" in refusal(lambda: Case(**CELL, model_size="1000x64x0x4"))


def test_hidden_must_be_divisible_by_heads() -> None:
    for attempt in (
        lambda: ModelSize(1_000, 64, 2, 5),
        lambda: Case(**CELL, model_size="1000x64x2x5"),
    ):
        assert "hidden 64 is not divisible by heads 5" in refusal(attempt)


# --- cases -----------------------------------------------------------------------------------


def test_case_is_fp32_1b_with_fused_attention_unless_told_otherwise() -> None:
    case = Case("dpsgd", 8, 256)
    assert (case.model_size, case.precision, case.attention, case.model) == (
        "1b",
        "fp32",
        "sdpa",
        "simple",
    )


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("precision", "fp16", PRECISIONS),
        ("attention", "flash", ATTENTIONS),
    ],
)
def test_unknown_value_is_refused_with_what_exists(
    field: str, value: str, known: Sequence[str]
) -> None:
    message = refusal(lambda: Case(**{**CELL, field: value}))
    assert message.startswith(f"unknown {field} {value!r}; choose from {', '.join(known)}")


@pytest.mark.parametrize(
    ("field", "words"), [("batch_size", "batch size"), ("seq_len", "sequence length")]
)
@pytest.mark.parametrize("value", [0, -1, 8.0, True, "8", None])
def test_batch_size_and_sequence_length_must_be_positive_integers(
    field: str, words: str, value: object
) -> None:
    message = refusal(lambda: Case(**{**CELL, field: value}))
    assert message == f"{words} must be a positive integer, not {value!r}"


def test_case_may_name_what_this_process_does_not_know() -> None:
    assert Case("theirs", 8, 256, model="net").id == "theirs-bs8-seq256-1b-fp32-net"


def test_case_takes_numbers_as_pandas_hands_them_out() -> None:
    row = {**asdict(Case(**CELL)), "batch_size": np.int64(8), "value": 1.0}
    assert Case.from_row(row) == Case(**CELL)
    assert type(Case.from_row(row).batch_size) is int


def test_case_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Case(**CELL).batch_size = 16  # type: ignore[misc]


@quickly
@given(CASES)
def test_baseline_differs_in_the_trainer_alone(case: Case) -> None:
    assert {**asdict(case.baseline), "trainer": case.trainer} == asdict(case)
    assert case.baseline.trainer == "standard"
    assert case.baseline.baseline == case.baseline


def test_id_says_what_is_measured() -> None:
    assert Case(**CELL).id == "dpsgd-bs8-seq256-1b-fp32"
    assert Case(**CELL, precision="bf16", attention="dp_mha").id == (
        "dpsgd-bs8-seq256-1b-bf16-dp_mha"
    )


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "1b-fp32/report_dpsgd_bs8_seq256.ncu-rep"),
        ({"precision": "tf32"}, "1b-tf32/report_dpsgd_bs8_seq256.ncu-rep"),
        (
            {"model_size": "32000x1024x12x16"},
            "32000x1024x12x16-fp32/report_dpsgd_bs8_seq256.ncu-rep",
        ),
        ({"attention": "dp_mha"}, "1b-fp32-dp_mha/report_dpsgd_bs8_seq256.ncu-rep"),
    ],
)
def test_report_path_is_by_configuration_then_case(options: dict[str, str], path: str) -> None:
    assert Case(**{**CELL, **options}).report_path == Path(path)


NEARBY = st.builds(
    Case, **{**VALUES, "batch_size": st.just(8), "seq_len": st.sampled_from([8, 88])}
)


@quickly
@given(NEARBY, NEARBY)
def test_cases_share_an_id_and_a_report_only_if_they_are_equal(one: Case, other: Case) -> None:
    assert (one.id == other.id) == (one == other)
    assert (one.report_path == other.report_path) == (one == other)


def parsed(arguments: list[str]) -> Case:
    options = build_parser().parse_args(["step", *arguments])
    return chosen_case(options)


@quickly
@given(CASES)
def test_command_line_gives_back_the_same_case(case: Case) -> None:
    assert parsed(arguments(case)) == case


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives cases registries in which nothing was registered by a test."""
    trainers, models = copy.deepcopy(TRAINERS), copy.deepcopy(MODELS)

    def renew() -> None:
        monkeypatch.setattr("dpbench.registry.TRAINERS", copy.deepcopy(trainers))
        monkeypatch.setattr("dpbench.registry.MODELS", copy.deepcopy(models))

    renew()
    return renew


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("mine=collections.abc:Sized", "mine"), ("collections.abc:Sized", "Sized")],
)
def test_command_line_names_an_own_class_to_a_process_that_does_not_know_it(
    fresh: Callable[[], None], spelling: str, name: str
) -> None:
    case = resolve(Case(spelling, 8, 256, model="net=collections:OrderedDict"))
    assert (case.trainer, case.model) == (name, "net")
    options = arguments(case)
    fresh()
    assert parsed(options) == case


# --- grids -----------------------------------------------------------------------------------


def several(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=2, unique=True).map(tuple)


ALONG = {axis: several(values) for axis, values in VALUES.items()}
GRID = st.builds(Grid, name=st.just("mine"), **ALONG)


@quickly
@given(GRID)
def test_grid_has_every_combination_once(grid: Grid) -> None:
    cases = list(grid.cases())
    assert len(cases) == len(set(cases)) == prod(len(getattr(grid, axis)) for axis in AXES)
    for axis in AXES:
        assert {getattr(case, axis) for case in cases} == set(getattr(grid, axis))


@quickly
@given(GRID, st.data())
def test_narrow_replaces_the_named_axes_and_no_other(grid: Grid, data: st.DataObject) -> None:
    axes = data.draw(st.fixed_dictionaries({}, optional=ALONG))
    narrowed = grid.narrow(**{axis: list(axes[axis]) if axis in axes else None for axis in AXES})
    assert asdict(narrowed) == {**asdict(grid), **axes}


@pytest.mark.parametrize("axis", AXES)
def test_grid_without_a_value_along_an_axis_is_refused(axis: str) -> None:
    assert f"'grid1': {axis} has no value" in refusal(lambda: GRIDS["grid1"].narrow(**{axis: []}))


def test_grid_with_an_impossible_case_is_refused_when_it_is_made() -> None:
    assert "'fp8'" in refusal(lambda: GRIDS["grid1"].narrow(precision=["fp32", "fp8"]))
    assert "batch size" in refusal(lambda: GRIDS["grid1"].narrow(batch_size=[8, 0]))


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


@pytest.mark.parametrize("name", GRIDS)
def test_baseline_comes_first_among_the_cases_of_its_cell(name: str) -> None:
    cases = list(Grid.named(name).cases())
    cells = list(dict.fromkeys(case.baseline for case in cases))
    assert cases == [
        case
        for cell in cells
        for case in (cell, *(c for c in cases if c.baseline == cell and c != cell))
    ]


def test_unknown_grid_is_refused_with_the_named_ones() -> None:
    message = refusal(lambda: Grid.named("grid3"))
    assert message == "unknown grid 'grid3'; choose from grid1, grid2 (or a .toml file)"


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
        trainer = ["standard", "DPSGDTrainer"]
        batch_size = [8, 16]
        seq_len = 256
        model_size = "medium"
        """
    )
    grid = chosen_grid(path)
    assert grid.name == "mine"
    assert list(grid.cases()) == [
        Case(trainer, batch_size, 256, model_size="medium")
        for batch_size in (8, 16)
        for trainer in ("standard", "dpsgd")
    ]


def test_grid_file_can_say_every_axis(grid_file: Callable[[str], str]) -> None:
    case = Case("dpsgd_ghost", 4, 32, "tiny", "bf16", "dp_mha", "simple")
    axes = {axis: repr(value) for axis, value in asdict(case).items()} | {"set": "{}"}
    path = grid_file("\n".join(f"{axis} = {value}" for axis, value in axes.items()))
    assert list(Grid.named(path).cases()) == [case]


GOOD = {"trainer": '"dpsgd"', "batch_size": "8", "seq_len": "256"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("batchsize", "8", "unknown key 'batchsize'; choose from trainer, batch_size, seq_len"),
        ("batch_size", '"8"', "batch_size must be int or a list of int, not '8'"),
        ("batch_size", "8.5", "batch_size must be int"),
        ("batch_size", "true", "batch_size must be int"),
        ("batch_size", '[8, "16"]', "batch_size must be int"),
        ("seq_len", "[]", "seq_len must be int or a list of int, not []"),
        ("seq_len", "[[256]]", "seq_len must be int"),
        ("trainer", "1", "trainer must be str or a list of str, not 1"),
        ("trainer", "[]", "trainer must be str"),
        ("model_size", "{ hidden = 64 }", "model_size must be str"),
        ("precision", "16", "precision must be str"),
        ("batch_size", "0", "batch size must be a positive integer, not 0"),
        ("seq_len", "[256, -1]", "sequence length must be a positive integer, not -1"),
        ("model_size", '"2b"', "unknown model size '2b'; choose from tiny, small, medium, 1b"),
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


@pytest.mark.parametrize("missing", [["trainer"], ["batch_size", "seq_len"], list(GOOD)])
def test_grid_file_must_have_trainer_batch_size_and_sequence_length(
    grid_file: Callable[[str], str], missing: list[str]
) -> None:
    path = grid_file("\n".join(f"{k} = {v}" for k, v in GOOD.items() if k not in missing))
    message = refusal(lambda: Grid.named(path))
    assert message == f"grid file {path}: missing {', '.join(missing)}"


def test_grid_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    assert refusal(lambda: Grid.named(str(path))) == f"grid file {path}: No such file or directory"


def test_grid_file_that_is_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "directory.toml"
    path.mkdir()
    assert str(path) in refusal(lambda: Grid.named(str(path)))


@pytest.mark.parametrize(
    "content", [b"trainer = [", b"trainer: dpsgd", b"a = 1\na = 2", b"trainer = '\xff'"]
)
def test_grid_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    assert refusal(lambda: Grid.named(str(path))).startswith(f"grid file {path}: ")


# --- parameters of other workloads -----------------------------------------------------------

PARAMETERS = st.dictionaries(
    st.sampled_from(["a", "b", "image_size"]),
    st.one_of(
        st.integers(),
        st.booleans(),
        st.floats(),
        st.text("aA1.0e/-%=, \n", max_size=5),
        st.sampled_from(["x-fp32", "..", "1", "1.0", "true", "%2D", "NaN"]),
    ),
    max_size=2,
)


def with_parameters(parameters: dict[str, object], precision: str) -> Case | None:
    try:
        return Case("dpsgd", 8, precision=precision, workload="layer", set=parameters)
    except ConfigurationError:
        return None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(PARAMETERS, st.sampled_from(PRECISIONS)), min_size=2, max_size=6))
def test_cases_with_other_parameters_share_neither_id_nor_report(
    given_: list[tuple[dict[str, object], str]],
) -> None:
    cases = {case for each in given_ if (case := with_parameters(*each))}
    assert len({case.id for case in cases}) == len({case.report_path for case in cases})
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert case.id.isprintable()
        assert Case.from_report_path(case.report_path) == case
        assert with_parameters(case.parameters, case.precision) == case


@pytest.mark.parametrize("value", [" ", "two\nlines", "a,b", ""])
def test_parameter_that_no_command_line_could_say_is_refused(value: str) -> None:
    assert "a parameter is NAME=VALUE in printable text without commas" in refusal(
        lambda: Case("dpsgd", 8, workload="layer", set={"layer": value})
    )
