"""One number about one case, as a row of the long table."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import ATTENTIONS, AXES, MODEL_SIZES, PHASES, PRECISIONS, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import MODELS, TRAINERS
from dpbench.results.outcome import with_subject
from dpbench.results.rows import COLUMNS, STEP, Measurement
from tests.results.figures import any_text

CASES = st.builds(
    Case,
    trainer=st.sampled_from(["standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc"]),
    batch_size=st.integers(1, 4096),
    seq_len=st.integers(1, 4096),
    model_size=st.sampled_from([*MODEL_SIZES, "32000x1024x12x16"]),
    precision=st.sampled_from(PRECISIONS),
    attention=st.sampled_from(ATTENTIONS),
)
MEASUREMENTS = st.builds(
    Measurement,
    case=CASES,
    instrument=st.sampled_from(["ncu", "timing"]),
    phase=st.sampled_from([STEP, *PHASES]),
    metric=any_text(min_size=1),
    value=st.floats(allow_nan=False),
    unit=st.sampled_from(["B", "s", "1/s", ""]),
    repeat=st.integers(0, 100),
    device=any_text(),
    tool=any_text(),
)
MEASUREMENT = Measurement(
    Case("dpsgd", 8, 256), "ncu", STEP, "dram_read_bytes", 5.0, "B", 0, "H200", "ncu 2025.3"
)


def read(row: dict[str, Any]) -> Measurement:
    return msgspec.convert(with_subject(row), Measurement)


@settings(deadline=None, max_examples=20)
@given(MEASUREMENTS)
def test_measurement_survives_json(measurement: Measurement) -> None:
    assert read(json.loads(json.dumps(measurement.as_row()))) == measurement


def test_row_is_flat_and_spells_everything_out() -> None:
    assert MEASUREMENT.as_row() == {
        "trainer": "dpsgd",
        "batch_size": 8,
        "seq_len": 256,
        "model_size": "1b",
        "precision": "fp32",
        "attention": "sdpa",
        "model": "simple",
        "workload": "transformer",
        "set": "",
        "optimizer": "sgd",
        "micro_batches": 1,
        "trainable": "all",
        "activation_checkpointing": "off",
        "parallel": "none",
        "gpus": 1,
        "sampling": "fixed",
        "compile": "off",
        "instrument": "ncu",
        "phase": "step",
        "metric": "dram_read_bytes",
        "value": 5.0,
        "unit": "B",
        "repeat": 0,
        "device": "H200",
        "tool": "ncu 2025.3",
        "rank": 0,
    }


def test_columns_are_the_fields_of_a_row_with_the_case_first() -> None:
    assert list(MEASUREMENT.as_row()) == COLUMNS
    assert COLUMNS[: len(AXES)] == list(AXES)


def test_changing_a_row_leaves_its_measurement_alone() -> None:
    row = MEASUREMENT.as_row()
    row["trainer"] = row["metric"] = "other"
    assert MEASUREMENT.case.trainer == "dpsgd"
    assert MEASUREMENT.metric == "dram_read_bytes"


def test_reading_a_row_leaves_it_alone() -> None:
    row = MEASUREMENT.as_row()
    read(row)
    assert row == MEASUREMENT.as_row()


@pytest.mark.parametrize("field", ["trainer", "model"])
def test_saved_row_may_name_a_class_that_this_process_does_not_know(field: str) -> None:
    row = {**MEASUREMENT.as_row(), field: "theirs"}
    assert read(row).as_row() == row
    assert "theirs" not in {*TRAINERS, *MODELS}


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"precision": "fp8"}, {"model_size": "huge"}])
def test_saved_case_is_checked_like_any_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        read(MEASUREMENT.as_row() | wrong)
