"""Cases: what can be asked for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.child.task import Task
from dpbench.commands.case_arguments import chosen_case
from dpbench.commands.cli import build_parser
from dpbench.core.case import ATTENTIONS, MODEL_SIZES, PRECISIONS, Case, ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import joined, parted
from dpbench.core.registry import MODELS, TRAINERS, import_named, resolve
from dpbench.instruments.timing import Timing

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


@quickly
@given(vocabulary=POSITIVE, width=POSITIVE, layers=POSITIVE, heads=POSITIVE)
def test_any_size_can_be_written_out(vocabulary: int, width: int, layers: int, heads: int) -> None:
    size = ModelSize(vocabulary, width * heads, layers, heads)
    assert ModelSize.parse("x".join(map(str, asdict(size).values()))) == size


@pytest.mark.parametrize(
    "name",
    [
        "",
        "32000x1024x12",
        "1000x64x2x-4",
    ],
)
def test_unknown_size_is_refused_with_the_sizes_and_the_custom_form(name: str) -> None:
    message = refusal(lambda: Case(**CELL, model_size=name))
    assert repr(name) in message
    assert all(known in message for known in (*MODEL_SIZES, "VOCABULARYxHIDDENxLAYERSxHEADS"))


@pytest.mark.parametrize(("dimension", "value"), [("heads", 0), ("hidden", 4.0)])
def test_dimension_must_be_a_positive_integer(dimension: str, value: object) -> None:
    dimensions: dict[str, Any] = {"vocabulary": 4, "hidden": 4, "layers": 4, "heads": 4}
    message = refusal(lambda: ModelSize(**{**dimensions, dimension: value}))
    assert message == f"model size: {dimension} must be a positive integer, not {value!r}"


def test_hidden_must_be_divisible_by_heads() -> None:
    for attempt in (
        lambda: ModelSize(1_000, 64, 2, 5),
        lambda: Case(**CELL, model_size="1000x64x2x5"),
    ):
        assert "hidden 64 is not divisible by heads 5" in refusal(attempt)


# --- cases -----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("value", [0, True, "8"])
def test_batch_size_and_sequence_length_must_be_positive_integers(
    field: str, words: str, value: object
) -> None:
    message = refusal(lambda: Case(**{**CELL, field: value}))
    assert message == f"{words} must be a positive integer, not {value!r}"


def test_case_takes_numbers_as_pandas_hands_them_out() -> None:
    row = {**asdict(Case(**CELL)), "batch_size": np.int64(8), "value": 1.0}
    assert Case.from_row(row) == Case(**CELL)
    assert type(Case.from_row(row).batch_size) is int


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "1b-fp32/report_dpsgd_bs8_seq256.ncu-rep"),
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


def told(case: Case) -> str:
    """What the process of a case is told."""
    return json.dumps(Task(case, Timing(Path())).as_json())


def understood(task: str) -> Case:
    return Task.from_json(json.loads(task)).case


@quickly
@given(CASES)
def test_task_gives_back_the_same_case(case: Case) -> None:
    assert understood(told(case)) == case


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives cases registries in which nothing was registered by a test."""
    known = [dict(registry._targets) for registry in (TRAINERS, MODELS)]

    def renew() -> None:
        for registry, targets in zip((TRAINERS, MODELS), known, strict=True):
            monkeypatch.setattr(registry, "_targets", dict(targets))

    return renew


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("mine=collections.abc:Sized", "mine"), ("collections.abc:Sized", "Sized")],
)
def test_task_names_an_own_class_to_a_process_that_does_not_know_it(
    fresh: Callable[[], None], spelling: str, name: str
) -> None:
    case = resolve(Case(spelling, 8, 256, model="net=collections:OrderedDict"))
    assert (case.trainer, case.model) == (name, "net")
    task = told(case)
    fresh()
    assert understood(task) == case


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


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(PARAMETERS, PARAMETERS), min_size=2, max_size=6))
def test_trainers_with_other_parameters_share_neither_id_nor_report(
    given_: list[tuple[dict[str, object], dict[str, object]]],
) -> None:
    cases = {
        replace(case, trainer=joined("dpsgd", other.set), optimizer=joined("adamw", other.set))
        for one, two in given_
        if (case := with_parameters(one, "fp32")) and (other := with_parameters(two, "bf16"))
    }
    assert len({case.id for case in cases}) == len({case.report_path for case in cases})
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert Case.from_row(json.loads(json.dumps(asdict(case)))) == case


@pytest.mark.parametrize(
    ("spelling", "name", "parameters"),
    [
        ("dpsgd", "dpsgd", ""),
        ("dpsgd:clip=per_layer", "dpsgd", "clip=per_layer"),
        ("package.module:Class", "package.module:Class", ""),
        ("mine=package.module:Class", "mine=package.module:Class", ""),
        ("package.module:Class:alpha=2", "package.module:Class", "alpha=2"),
        ("mine=package.module:Class:alpha=2", "mine=package.module:Class", "alpha=2"),
        ("m:Outer.Inner:a=b:c=d,e=f=g", "m:Outer.Inner", "a=b:c=d,e=f=g"),
        ("dpsgd:target=m:Class", "dpsgd", "target=m:Class"),
    ],
)
def test_a_name_ends_where_its_parameters_begin(spelling: str, name: str, parameters: str) -> None:
    assert parted(spelling) == (name, parameters)
    assert joined(name, parameters) == spelling


def test_parameters_are_the_same_in_whichever_order_they_are_written() -> None:
    assert Case("dpsgd: b=2.50,a=True", 8, 256) == Case("dpsgd:a=true,b=2.5", 8, 256)


def test_name_without_parameters_is_in_id_and_report_as_it_was() -> None:
    case = Case("dpsgd", 8, 256, optimizer="adamw", trainable="lora:8")
    assert case.id == "dpsgd-bs8-seq256-1b-fp32-optimizer=adamw-trainable=lora:8"
    folder = "1b-fp32-optimizer=adamw-trainable=lora@3A8"
    assert case.report_path == Path(folder, "report_dpsgd_bs8_seq256.ncu-rep")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainer": "dpsgd:clip"}, "write a parameter as dpsgd:NAME=VALUE"),
        ({"trainer": "dpsgd:per-layer=1"}, "a parameter is NAME=VALUE in printable text"),
        ({"trainer": "dpsgd:clip=flat,per_layer"}, "a parameter is NAME=VALUE in printable text"),
        (
            {"trainer": "dpsgd:clips=flat"},
            "unknown parameter of trainer dpsgd 'clips'; choose from clip, grad_sample, learning_",
        ),
        (
            {"trainer": "dpsgd:batch_size=4"},
            "unknown parameter of trainer dpsgd 'batch_size'; choose from clip, grad_sample",
        ),
        ({"optimizer": "sgd:lr=1"}, "unknown parameter of optimizer sgd 'lr'; choose from moment"),
        ({"optimizer": "adamw:fused=1"}, "fused of optimizer adamw must be true or false, not 1"),
        (
            {"optimizer": "sgd:momentum=-1"},
            "sgd:momentum=-1 cannot step: Invalid momentum value: -1",
        ),
        ({"optimizer": "torch.optim:LBFGS"}, "optimizer LBFGS cannot step: LBFGS.step() missing 1"),
        ({"optimizer": "torch.optim:Adan"}, "unknown class of torch.optim 'Adan'; choose from A"),
        ({"model": "simple:size=1"}, "unknown parameter of model simple 'size'; choose from none"),
        (
            {"workload": "transformer:depth=3"},
            "unknown parameter of workload transformer 'depth'; choose from seq_len, model_size",
        ),
        ({"workload": "transformer:seq_len=8"}, "seq_len is given twice, as 256 and as 8"),
        (
            {"trainer": "tests.core.test_case:Own:beta"},
            "with parameters as package.module:Class:NAME=VALUE",
        ),
        (
            {"trainer": "tests.core.test_case:Absent"},
            "unknown class of tests.core.test_case 'Absent'; choose from Own",
        ),
        *(
            ({"trainer": f"tests.core.test_case:Own:{given}"}, f"of trainer Own {said}")
            for given, said in {
                "beta=abc": "must be a number, not 'abc'",
                "beta=true": "must be a number, not True",
                "steps=1.5": "must be an integer, not 1.5",
                "nested=1": "must be true or false, not 1",
                "way=other": "'other'; choose from one, two",
                "maybe=none": "must be an integer, not 'none'",
                "max_grad_norm=nan": "must be a number, not 'nan'",
            }.items()
        ),
    ],
)
def test_wrong_parameter_is_refused_in_a_line(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: import_named(resolve(Case(**{**CELL, **options}))))


class Own:
    """A trainer with annotated parameters."""

    def __init__(
        self,
        model: object,
        *,
        beta: float = 0.5,
        steps: int = 1,
        nested: bool = False,
        way: Literal["one", "two"] = "one",
        maybe: int | None = None,
        name: str = "",
        unknown: NotDefinedHere | None = None,  # type: ignore[name-defined]  # noqa: F821
        free=None,  # type: ignore[no-untyped-def]
        max_grad_norm: float = 1.0,
    ) -> None:
        self.given = (beta, steps, nested, way, maybe, name, unknown, free)

    def train_step(self, batch: object) -> None:
        """Do nothing."""


def test_parameters_become_what_their_annotations_say() -> None:
    text = "beta=1,steps=2,nested=true,way=two,maybe=3,name=4,unknown=x,free=5"
    made = TRAINERS[f"tests.core.test_case:Own:{text}"](None)
    assert made.given == (1, 2, True, "two", 3, "4", "x", 5)


def parsed(arguments: list[str]) -> Case:
    return chosen_case(build_parser("step").parse_args(["step", *arguments]))


def test_transformers_options_are_parameters_of_the_workload() -> None:
    by_options = Case("dpsgd", 8, 128, "tiny", attention="dp_mha")
    said = "seq_len=128,model_size=tiny,attention=dp_mha"
    assert Case("dpsgd", 8, workload=f"transformer:{said}") == by_options
    assert Case("dpsgd", 8, set=said) == by_options
    assert parsed([f"--workload=transformer:{said}", "--trainer=dpsgd"]) == by_options
    assert parsed([*(f"--set={each}" for each in said.split(",")), "--trainer=dpsgd"]) == by_options


def test_workload_may_have_its_parameters_in_its_name() -> None:
    case = Case("dpsgd", 8, workload="layer:width=64", set={"length": 3})
    assert case == Case("dpsgd", 8, workload="layer", set="width=64,length=3")
    assert case.id == "dpsgd-bs8-layer,length=3,width=64-fp32"


@pytest.mark.parametrize("value", [" ", "two\nlines", "a,b", ""])
def test_parameter_that_no_command_line_could_say_is_refused(value: str) -> None:
    assert "a parameter is NAME=VALUE in printable text without commas" in refusal(
        lambda: Case("dpsgd", 8, workload="layer", set={"layer": value})
    )
