"""What time is made of: the account of each phase, and of what private steps take more."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench import Case, ConfigurationError
from dpbench.core.case import AXES
from dpbench.results.roofline import (
    PARTS,
    Roofs,
    additional,
    find_ceilings,
    read_ceilings,
    time_breakdown,
)
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.summary import summary, to_frame

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
COUNTED = ROOT / "tests/data/logical-1b-bs8-seq256.json"
CEILINGS = Roofs.of(["Card"], 1e12, {"fp32": 1e13, "tf32": 1e14, "bf16": 2e14}, "a test")
DPSGD, STANDARD = Case("dpsgd", 8, 256), Case("standard", 8, 256)


def rows(case: Case, phase: str, *without: str, **values: float) -> list[Measurement]:
    """What is known of a phase: FLOP, bytes, seconds and the busy ones of them."""
    busy = {"range_time_seconds": values["s"], "gpu_elapsed_cycles": values["s"] * 1e9}
    metrics = {
        "flops": {"flops": values["flops"], "logical_read_bytes": 1.0, "logical_write_bytes": 1.0},
        "bytes": {"dram_read_bytes": values["bytes"], "dram_write_bytes": 0.0},
        "seconds": {"step_time_seconds": values["s"]},
        "busy": {**busy, "gpu_busy_cycles": values["busy"] * 1e9},
    }
    return [
        Measurement(case, "logical" if counted else "cupti", phase, name, value, "", 0, where, "")
        for known in metrics
        if known not in without
        for counted in [known == "flops"]
        for where in [NO_HARDWARE if counted else "Card"]
        for name, value in metrics[known].items()
    ]


def step(case: Case, *without: str, **phases: tuple[float, float, float, float]) -> pd.DataFrame:
    """Rows of phases, each (FLOP, bytes, seconds, busy seconds), and of the step, their sum."""
    names = ("flops", "bytes", "s", "busy")
    together = tuple(map(sum, zip(*phases.values(), strict=True)))
    return summary(
        to_frame(
            row
            for phase, values in {**phases, STEP: together}.items()
            for row in rows(case, phase, *without, **dict(zip(names, values, strict=True)))
        )
    )


def by_phase(frame: pd.DataFrame, ceilings: Roofs = CEILINGS) -> pd.DataFrame:
    return time_breakdown(frame, ceilings).set_index("phase")


def seconds(times: pd.DataFrame, phase: str) -> list[float]:
    return times.loc[phase, [f"{part}_seconds" for part in PARTS]].tolist()


def test_a_phase_takes_its_bounds_its_idle_time_and_what_is_left() -> None:
    times = by_phase(step(DPSGD, forward=(10e12, 0.4e12, 3.0, 2.0), noise=(0, 1e12, 2.0, 2.0)))
    assert seconds(times, "forward") == pytest.approx([1.0, 0.4, 1.0, 1.0])
    assert seconds(times, "noise") == pytest.approx([0.0, 1.0, 0.0, 1.0])
    assert times.bound["forward"] == "launch-bound (67%)"


def test_a_steps_longer_bounds_are_those_of_its_phases() -> None:
    """Both roofs bound this step, one after the other, for longer than either would alone."""
    times = by_phase(step(DPSGD, forward=(10e12, 0.4e12, 3.0, 2.0), noise=(0, 1e12, 2.0, 2.0)))
    assert seconds(times, STEP) == pytest.approx([1.0, 1.4, 1.0, 5.0 - 1.0 - (1.0 + 1.0)])


def test_the_additional_time_is_explained_by_what_is_additional() -> None:
    standard = step(STANDARD, forward=(10e12, 0.5e12, 2.0, 2.0))
    private = step(DPSGD, forward=(30e12, 1.5e12, 6.0, 5.0))
    [found] = additional(time_breakdown(pd.concat([standard, private]), CEILINGS)).to_dict(
        "records"
    )
    assert found["more_seconds"] == pytest.approx(4.0)
    shares = [found[f"{part}_share"] for part in PARTS]
    assert shares == pytest.approx([2 / 4, 1 / 4, 1 / 4, 1 / 4])


def test_a_step_that_takes_no_more_than_the_baselines_has_nothing_to_explain() -> None:
    both = [step(case, forward=(1e12, 1e11, 2.0, 2.0)) for case in (STANDARD, DPSGD)]
    assert additional(time_breakdown(pd.concat(both), CEILINGS)).empty
    assert additional(time_breakdown(both[1], CEILINGS)).empty


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ("flops", {"arithmetic", "left"}),
        ("bytes", {"bytes", "left"}),
        ("busy", {"idle", "left"}),
    ],
)
def test_what_was_not_measured_is_unknown_and_not_zero(missing: str, unknown: set[str]) -> None:
    times = by_phase(step(DPSGD, missing, forward=(10e12, 0.4e12, 3.0, 2.0)))
    of_step = times.loc[STEP, [f"{part}_seconds" for part in PARTS]]
    assert {name.removesuffix("_seconds") for name in of_step.index[of_step.isna()]} == unknown


def test_a_step_of_which_one_phase_is_unknown_has_no_longer_bound() -> None:
    frame = step(DPSGD, forward=(10e12, 0.4e12, 3.0, 3.0), noise=(0, 1e12, 2.0, 2.0))
    frame = frame[~((frame.metric == "flops") & (frame.phase == "noise"))]
    times = by_phase(frame)
    assert times.left_seconds.isna().to_dict() == {"forward": False, "noise": True, STEP: True}


def test_the_ceilings_of_one_card_are_not_those_of_another() -> None:
    with pytest.raises(ConfigurationError, match="measured on Card, so the roofs of NVIDIA H200"):
        time_breakdown(step(DPSGD, forward=(1, 1, 1, 1)), find_ceilings("NVIDIA H200"))
    with pytest.raises(ConfigurationError, match="no measured ceilings of NVIDIA H20"):
        find_ceilings("NVIDIA H20")


def test_the_ceilings_that_dpbench_knows_are_those_of_the_recorded_run() -> None:
    assert find_ceilings("NVIDIA H200") == read_ceilings(RESULTS / "h200-ceilings.json")


amount = st.floats(0, 1e14)


@settings(max_examples=4, deadline=None)
@given(amount, amount, st.floats(0.1, 10), st.floats(0, 1))
def test_time_is_its_idle_part_the_longer_bound_and_what_is_left(
    flops: float, moved: float, took: float, busy: float
) -> None:
    times = by_phase(step(DPSGD, forward=(flops, moved, took, busy * took)))
    for phase in ("forward", STEP):
        arithmetic, bytes_, idle, left = seconds(times, phase)
        assert idle + max(arithmetic, bytes_) + left == pytest.approx(took)
        assert (left >= -1e-9) == (max(arithmetic, bytes_) <= took - idle + 1e-9)


# --- the recorded runs -------------------------------------------------------------------------

OF_OPACUS = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
BUILT_IN = ("cupti-grid1-1", "methods-256", "methods-1024", "methods-tf32", "methods-16x1024")
OTHER_MODELS = ("gpt2-256", "llama-256", "bert-512", "vit-32", "resnet-64")


@cache
def breakdown(path: Path) -> pd.DataFrame:
    """The account of a recorded run."""
    return time_breakdown(Run.load(path).summary, find_ceilings("NVIDIA H200"))


def recorded(*names: str) -> pd.DataFrame:
    """What private steps of recorded runs take more than standard ones."""
    found = pd.concat([additional(breakdown(RESULTS / f"h200-{name}.json.xz")) for name in names])
    found = found[found.trainer.isin(OF_OPACUS)]
    return found.drop_duplicates([*AXES])  # a cell is in two grids


def test_bytes_explain_a_part_of_what_privacy_costs_in_time() -> None:
    found = recorded(*BUILT_IN, *OTHER_MODELS)
    assert len(found) == 45
    percent = (found.groupby("trainer").bytes_share.agg(["min", "max"]) * 100).round()
    assert {name: tuple(row) for name, *row in percent.itertuples()} == {
        "dpsgd": (11, 59),
        "dpsgd_fgc": (11, 50),
        "dpsgd_ghost": (7, 31),
    }


def test_arithmetic_explains_more_than_bytes_at_fp32() -> None:
    """Of the recorded models whose operations were counted but one: convolutions are the other."""
    found = recorded(*OTHER_MODELS)
    more = found.arithmetic_share > found.bytes_share
    assert {*found[~more].workload} == {"resnet"}


def test_bounds_stay_within_the_recorded_times() -> None:
    files = (RESULTS / "h200-methods-256.json.xz", COUNTED)
    every = pd.concat([Run.load(path).summary for path in files])
    times = time_breakdown(every[every.precision == "fp32"], find_ceilings("NVIDIA H200"))
    known = times[times.left_seconds.notna()]
    assert len(known) >= 4 * 4
    longer = known[["arithmetic_seconds", "bytes_seconds"]].max(axis="columns")
    assert (longer <= known.seconds).all()
    assert (known.left_seconds >= 0).all()


def test_private_short_steps_are_idle_for_more_of_their_time_at_bf16_than_at_fp32() -> None:
    found = recorded("methods-256").set_index("trainer")
    short, at_fp32 = (found[found.precision == precision] for precision in ("bf16", "fp32"))
    assert (short.idle_share > 2 * at_fp32.idle_share).all()
    assert short.loc["dpsgd_ghost"].idle_share > short.loc["dpsgd_ghost"].bytes_share
    assert short.arithmetic_share.isna().all()  # nobody counted these operations
