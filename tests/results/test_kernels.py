"""Launches folded to kernels: nothing is lost, and what launched them is kept."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.case import PHASES, Case
from dpbench.metrics import METRICS
from dpbench.results.kernels import (
    KernelCount,
    KernelLaunch,
    KernelSpeed,
    dram_bytes_of_step,
    fold,
    kernel_frame,
    kernel_rows,
    kernel_table,
)
from dpbench.results.rows import STEP, Measurement
from dpbench.show.kernels import kernel_tables, wrapped
from dpbench.show.layout import as_markdown, as_text

FILL = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(int)"
NORM = "void at::native::reduce_kernel<(int)512, at::native::ReduceOp<at::native::NormTwoOps>>(T3)"
STRANGE = "my_kernel(float *)"

amounts = st.integers(0, 2**40).map(float)
launches = st.lists(
    st.builds(
        KernelLaunch,
        repeat=st.integers(0, 1),
        phase=st.sampled_from(PHASES),
        ordinal=st.just(0),
        name=st.sampled_from([FILL, NORM, STRANGE]),
        grid=st.just((1, 1, 1)),
        read_bytes=amounts,
        write_bytes=amounts,
        l2_bytes=amounts,
        seconds=st.integers(0, 2**20).map(float),
    )
)


def launch(
    name: str = FILL, phase: str = "clip", ordinal: int = 0, **numbers: float
) -> KernelLaunch:
    values = {"read_bytes": 1e9, "write_bytes": 5e8, "l2_bytes": 3e9, "seconds": 1e-3, **numbers}
    return KernelLaunch(0, phase, ordinal, name, (8, 1, 1), **values)


@given(launches)
def test_folding_loses_no_launch_and_no_byte(found: list[KernelLaunch]) -> None:
    counts = fold(found)
    assert sum(count.launches for count in counts) == len(found)
    assert sum(count.read_bytes for count in counts) == sum(each.read_bytes for each in found)
    assert len({(c.repeat, c.phase, c.name) for c in counts}) == len(counts)
    assert [c.dram_bytes for c in counts] == sorted((c.dram_bytes for c in counts), reverse=True)


@given(launches)
def test_phases_add_up_to_the_step_in_rows(found: list[KernelLaunch]) -> None:
    rows = kernel_rows(
        Case("dpsgd", 8, 256), fold(found), instrument="ncu_kernels", device="x", tool="y"
    )
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for row in rows:
        if row.phase != STEP:
            sums[row.repeat, row.metric] += row.value
    assert {(r.repeat, r.metric): r.value for r in rows if r.phase == STEP} == sums
    assert {row.metric for row in rows} <= {metric.name for metric in METRICS.had_by("ncu_kernels")}


def test_kernels_of_some_phases_are_not_called_the_step() -> None:
    what = {"instrument": "ncu_kernels", "device": "x", "tool": "y"}
    rows = kernel_rows(Case("dpsgd", 8, 256), fold([launch()]), **what, whole=False)
    assert {row.phase for row in rows} == {"clip"}


def test_reads_alone_are_not_the_bytes_of_a_step() -> None:
    read, write = (
        Measurement(Case("dpsgd", 8, 256), "ncu", STEP, f"dram_{way}_bytes", 2e9, "B", 0, "x", "y")
        for way in ("read", "write")
    )
    assert dram_bytes_of_step([read, write]) == 4e9
    assert dram_bytes_of_step([read]) is None


def test_the_operator_stays_with_the_launches_that_it_made() -> None:
    known = {(0, "clip", 0): "aten::zeros_like", (0, "clip", 2): "aten::zeros_like"}
    counts = fold([launch(ordinal=place) for place in range(3)], known)
    assert {(count.operator, count.launches) for count in counts} == {
        ("aten::zeros_like", 2),
        (None, 1),
    }


def test_kernels_survive_json() -> None:
    [count] = fold([launch()], {(0, "clip", 0): "aten::fill_"})
    row = json.loads(json.dumps({"trainer": "dpsgd", **count.as_row()}))
    assert row["kernel"] == "vectorized_elementwise_kernel<FillFunctor>"
    assert row["category"] == "set"
    assert KernelCount.from_row(row) == count
    speed = KernelSpeed("clip", FILL, (8, 1, 1), 1e-3, 1, 2, 3, 4, 5, 6, "wait")
    assert KernelSpeed.from_row(json.loads(json.dumps(speed.as_row()))) == speed


def test_a_table_has_share_and_fraction_of_the_bandwidth_per_step() -> None:
    two_steps = [launch(), launch(NORM, seconds=2e-3)]
    two_steps += [KernelLaunch(1, *list(vars(each).values())[1:]) for each in two_steps]
    table = kernel_table(
        kernel_frame(fold(two_steps)), ["category"], step_bytes=6e9, bandwidth=3e12
    )
    assert table.loc["set", "launches"] == 1
    assert table.loc["set", "share"] == pytest.approx(0.25)
    assert table.loc["set", "ceiling"] == pytest.approx(0.5)
    assert table.loc["reduction", "ceiling"] == pytest.approx(0.25)


def test_without_a_bandwidth_or_a_step_nothing_is_made_up() -> None:
    table = kernel_table(kernel_frame(fold([launch(), launch(NORM)])))
    assert table.ceiling.isna().all()
    assert table.share.sum() == pytest.approx(1)


def test_the_text_names_the_top_kernels_and_what_has_no_category() -> None:
    many = [launch(f"kernel_{i}(int)", read_bytes=i * 1e9) for i in range(30)]
    text = as_text(kernel_tables(fold([*many, launch(FILL)]), "case", top=3))
    assert "case: bytes by kernel (top 3 of 31)" in text
    assert "kernel_29" in text
    assert text.count("kernel_") == 3 + 30  # the table, and the note below
    assert "No category fits: kernel_0, kernel_1" in text
    assert "the step itself was not" in text


@pytest.mark.parametrize("width", [5, 24])
def test_a_wrapped_name_loses_nothing_and_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpbench.show.kernels.NAME_WIDTH", width)
    for name in ("a_very_long_kernel_name<AndWhatItDoesWithoutUnderscores>", "gemvx::kernel", "a"):
        lines = wrapped(name).split("\n")
        assert "".join(lines) == name
        assert max(map(len, lines)) <= width


def test_markdown_keeps_each_name_whole_and_in_sight() -> None:
    text = as_markdown(kernel_tables(fold([launch()]), "case"))
    assert r"| vectorized_elementwise_kernel\<FillFunctor\> |" in text


def test_without_kernels_there_is_no_table() -> None:
    assert kernel_tables((), "case") == []
