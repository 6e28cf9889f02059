"""Cases: what can be asked for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.child.task import Task
from dpbench.core.case import ATTENTIONS, MODEL_SIZES, PRECISIONS, Case, ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import MODELS, TRAINERS, resolve
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
