"""Two runs side by side."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.results.gate import Gate, pairs
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.storage import check_comparable
from dpbench.results.summary import to_frame

H200 = "NVIDIA H200"


def measured(
    values: dict[tuple[str, str, str], float], instrument: str = "ncu", device: str = H200
) -> pd.DataFrame:
    """A long table of {(trainer, metric, phase): value}."""
    return to_frame(
        Measurement(Case(t, 8, 256), instrument, phase, metric, value, "B", 0, device, "")
        for (t, metric, phase), value in values.items()
    )


def dram(trainer: str, value: float, phase: str = STEP) -> dict[tuple[str, str, str], float]:
    """DRAM bytes, half of them read."""
    names = ("dram_read_bytes", "dram_write_bytes")
    return {(trainer, name, phase): value / 2 for name in names}


BEFORE = dram("standard", 100) | dram("dpsgd", 400) | dram("dpsgd", 90, "clip")


def run(frame: pd.DataFrame) -> Run:
    return Run(Path("run"), {"rows": frame.to_dict("records")})


def compare(before: pd.DataFrame, after: pd.DataFrame, across: bool = False) -> pd.DataFrame:
    return Gate(run(before), run(after), across=across).compare().changes


def changes(before: pd.DataFrame, after: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    found = compare(before, after)
    keys = zip(found.trainer, found.metric, found.phase, strict=True)
    return dict(zip(keys, found.relative, strict=True))


def test_each_metric_ratio_and_phase_is_compared() -> None:
    found = changes(measured(BEFORE), measured(BEFORE | dram("dpsgd", 500)))
    assert found["standard", "dram_bytes", STEP] == 0
    assert found["dpsgd", "dram_bytes", STEP] == 0.25
    assert found["dpsgd", "dram_write_bytes", STEP] == 0.25
    assert found["dpsgd", "dram_ratio", STEP] == 0.25
    assert found["dpsgd", "dram_bytes", "clip"] == 0
    assert ("standard", "dram_ratio", STEP) not in found


def test_only_cases_that_both_measured_are_compared() -> None:
    found = compare(
        measured(BEFORE | dram("dpsgd_fgc", 5)), measured(BEFORE | dram("dpsgd_ghost", 5))
    )
    assert set(found.trainer) == {"standard", "dpsgd"}


@pytest.mark.parametrize("across", [False, True])
def test_nothing_is_compared_with_nothing(across: bool) -> None:
    nothing, something = run(to_frame([])), run(measured(BEFORE))
    for pair in ((nothing, something), (something, nothing)):
        assert not pairs(*pair, across=across).shared.any()


def test_ratio_without_its_baseline_is_not_shown_as_if_it_were_gone() -> None:
    alone = {key: value for key, value in BEFORE.items() if key[0] == "dpsgd"}
    found = compare(measured(BEFORE), measured(alone))
    assert set(found.metric) == {"dram_bytes", "dram_read_bytes", "dram_write_bytes"}


# --- different sources ----------------------------------------------------------------------


def test_different_devices_and_instruments_are_refused() -> None:
    before = measured(BEFORE)
    for other in (
        measured(BEFORE, device="NVIDIA A100"),
        measured(BEFORE, "logical", device="logical (no hardware)"),
    ):
        here = f"{other.instrument[0]} on {other.device[0]}"
        with pytest.raises(ConfigurationError, match="cannot be compared") as caught:
            check_comparable(run(before), run(other).sources, "that", across=False, option="--yes")
        assert f"run has ncu on {H200}, but that has {here}" in str(caught.value)
        assert ("--yes" in str(caught.value)) is (other.instrument[0] == "ncu")


def test_devices_are_compared_on_request_and_labelled() -> None:
    found = compare(measured(BEFORE), measured(BEFORE, device="NVIDIA A100"), across=True)
    assert set(found.device) == {"NVIDIA H200 -> NVIDIA A100"}
    assert (found.change == 0).all()


def test_shared_instrument_is_compared_with_itself() -> None:
    both = pd.concat([measured(BEFORE), measured(BEFORE, "timing")])
    assert set(compare(both, measured(BEFORE, "timing")).instrument) == {"timing"}
    assert set(compare(both, measured(BEFORE, "timing"), across=True).instrument) == {"timing"}


# --- what always holds -----------------------------------------------------------------------

some_numbers = st.fixed_dictionaries(
    {
        (trainer, metric, phase): st.floats(1, 1e15)
        for trainer in ("standard", "dpsgd")
        for metric in ("dram_read_bytes", "dram_write_bytes", "l2_served_bytes")
        for phase in (STEP, "backward")
    }
)


@settings(deadline=None, max_examples=4)
@given(before=some_numbers, after=some_numbers, power=st.integers(-10, 10))
def test_unit_of_measurement_does_not_matter(
    before: dict[tuple[str, str, str], float],
    after: dict[tuple[str, str, str], float],
    power: int,
) -> None:
    scaled = [measured({k: v * 2.0**power for k, v in run.items()}) for run in (before, after)]
    assert changes(*scaled) == changes(measured(before), measured(after))
