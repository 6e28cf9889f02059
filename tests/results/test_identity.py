"""What tells one number from another: one list, and how several numbers become one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS, Counters, Metric
from dpbench.core.subject import Script
from dpbench.results.gate import Gate
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome
from dpbench.results.rows import IDENTITY, NUMBER, STEP, Measurement, checked
from dpbench.results.run import Run
from dpbench.results.summary import summary, to_frame
from tests.results.figures import GB, column, notes, rows, summarised, tables_of
from tests.results.verdicts import failures

NEW_FIELD = """
import importlib.util, sys
from dataclasses import replace
from pathlib import Path

spec = importlib.util.find_spec("dpbench.results.rows")
source, field = Path(spec.origin).read_text(), "    rank: int = 0\\n"
assert source.count(field) == 1
changed = source.replace(field, field + "    host: str = ''\\n")
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
exec(compile(changed, spec.origin, "exec"), vars(module))

from dpbench.core.case import Case
from dpbench.results.gate import Gate
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome
from dpbench.results.schema import check_rows
from dpbench.results.run import Run
from dpbench.results.rows import Measurement
from dpbench.results.roofline import time_breakdown, additional
from dpbench.results.roofline import find_ceilings
from dpbench.show.tables import tables

def run(name, worse=1.0):
    outcomes = []
    for n, trainer in enumerate(("standard", "dpsgd"), 1):
        case, rows = Case(trainer, 8, 256), []
        for size, host in enumerate(("a", "b"), 1):
            values = {"dram_read_bytes": 1e10, "dram_write_bytes": 2e10, "step_time_seconds": 1.0}
            for metric, value in values.items():
                value *= n * size * (worse if host == "b" and trainer == "dpsgd" else 1)
                unit = "s" if "seconds" in metric else "B"
                where = "cupti", "step", metric, value, unit, 0, "NVIDIA H200", "tool"
                rows.append(Measurement(case, *where, host=host))
        outcomes.append(Outcome(case, tuple(rows)))
    return Run.of(name, outcomes)

before, after = run("before"), run("after", worse=1.5)
check_rows(before.document["rows"])
values = before.summary[before.summary.metric == "dram_bytes"]
assert sorted(zip(values.trainer, values.host, values.value)) == [
    ("dpsgd", "a", 6e10), ("dpsgd", "b", 12e10), ("standard", "a", 3e10), ("standard", "b", 6e10)
], values
assert {*before.summary.value[before.summary.metric == "dram_ratio"]} == {1.0, 2.0}
verdict = Gate(before, after).compare([Limit.parse("dram_bytes:5%")])
assert [(row["trainer"], row["host"]) for row in verdict.regressions] == [("dpsgd", "b")]
table = tables(before.summary)[0]
assert [line[0] for line in table.cells] == [
    f"{trainer} bs8 seq256 host {host}" .replace(" bs8 seq256", "")
    for trainer in ("standard", "dpsgd") for host in "ab"
], table.cells
times = time_breakdown(before.summary, find_ceilings("NVIDIA H200"))
assert [*additional(times).more_seconds] == [1.0, 2.0]
"""


def test_new_field_of_a_measurement_tells_rows_apart_everywhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEW_FIELD], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_number_is_told_apart_by_all_that_tells_rows_apart() -> None:
    assert {*NUMBER} == {"case", *IDENTITY} - {*AXES, "repeat", "rank"}


def test_what_is_left_over_is_an_error_that_names_the_column() -> None:
    step = rows("standard", {"dram_read_bytes": 1.0})
    again = [replace(row, tool="tool 2") for row in step]
    with pytest.raises(ValueError, match=r"2 rows of dram_read_bytes@step of .* differ in tool"):
        summary(to_frame([*step, *again]))
    with pytest.raises(ValueError, match=r"standard-bs16.* by ncu differ in nothing but"):
        summary(to_frame([*step, *step]))


# --- ranks ---------------------------------------------------------------------------------------


def of_ranks(trainer: str, metric: str, *values: float) -> list[Measurement]:
    """The same number of each rank."""
    return [
        replace(row, rank=rank)
        for rank, value in enumerate(values)
        for row in rows(trainer, {metric: value})
    ]


@pytest.mark.parametrize(
    ("metric", "values", "value"),
    [
        ("dram_read_bytes", (20.0, 30.0), 50.0),
        ("step_time_seconds", (2.0, 3.0), 3.0),
        ("peak_memory_bytes", (5.0, 3.0), 5.0),
        ("samples_per_second", (4.0, 4.0), 8.0),
        ("lts__t_sectors.sum", (1.0, 2.0), 3.0),
        ("lts__t_sectors.max", (1.0, 2.0), 2.0),
        ("lts__t_sectors.avg", (1.0, 2.0), 1.5),
    ],
)
def test_ranks_become_one_number_as_the_metric_says(
    metric: str, values: tuple[float, ...], value: float
) -> None:
    [row] = summarised(of_ranks("standard", metric, *values)).to_dict("records")
    assert (row["value"], row["steps"], row["ranks"]) == (value, 1, 2)


def test_share_of_ranks_is_the_mean_of_theirs() -> None:
    parts = {"sm_busy_cycles": (1.0, 3.0), "sm_elapsed_cycles": (4.0, 4.0)}
    found = [row for metric, values in parts.items() for row in of_ranks("dpsgd", metric, *values)]
    values = summarised(found).set_index("metric").value
    assert values["sm_busy_share"] == 0.5
    assert values["sm_busy_cycles"] == 4.0


def test_sum_of_which_a_rank_is_missing_is_refused() -> None:
    both = of_ranks("dpsgd", "dram_read_bytes", 1.0, 2.0)
    with pytest.raises(ConfigurationError, match="some ranks have no dram_read_bytes of step 1"):
        summary(to_frame([*both, replace(both[0], repeat=1)]))
    lost = [*both, *of_ranks("dpsgd", "dram_write_bytes", 1.0)]
    with pytest.raises(ConfigurationError, match="have no dram_write_bytes"):
        summary(to_frame(lost))


def test_a_case_of_which_a_rank_is_missing_is_refused() -> None:
    two = [
        replace(row, case=replace(row.case, parallel="ddp", gpus=2))
        for row in of_ranks("dpsgd", "step_time_seconds", 1.0, 2.0)
    ]
    assert summarised(two).ranks.tolist() == [2]
    with pytest.raises(ConfigurationError, match="step_time_seconds of only 1 of 2 ranks"):
        summary(to_frame(two[:1]))


def test_a_script_in_another_number_of_ranks_is_not_judged() -> None:
    one, two, three = (
        Run.of(
            f"of {len(values)}",
            [
                Outcome(
                    Script("train"),
                    tuple(
                        replace(row, case=Script("train"))
                        for row in of_ranks("dpsgd", "dram_read_bytes", *values)
                    ),
                )
            ],
        )
        for values in ((6.0,), (2.0, 2.0), (1.0, 1.0, 1.0))
    )
    limits = [Limit.parse("dram_read_bytes:1%")]
    assert not failures(Gate(two, two).compare(limits))
    for before, after in ((one, two), (two, three), (three, one)):
        (unjudged,) = Gate(before, after).compare(limits).unjudged
        assert unjudged.why.startswith(f"{before.name} has {before.name[-1]} ranks, but ")


def test_metric_that_nobody_declared_has_no_value_of_several_ranks() -> None:
    with pytest.raises(
        ConfigurationError,
        match="queue_size was measured in several ranks, but does not define how",
    ):
        summary(to_frame(of_ranks("dpsgd", "queue_size", 1.0, 2.0)))


def test_tables_say_what_is_of_several_ranks() -> None:
    ranks = of_ranks("standard", "dram_read_bytes", 2 * GB, 3 * GB)
    ranks += of_ranks("standard", "dram_write_bytes", 1 * GB, 1 * GB)
    assert column(tables_of(ranks)[0], "DRAM total")["standard"] == "7.00"
    assert "Over 2 ranks: counts are sums, times and peaks are maxima" in notes(ranks)
    assert "Ranks differ, largest ÷ mean: DRAM total 1.14 (standard, step)" in notes(ranks)
    even = of_ranks("standard", "dram_read_bytes", 1 * GB, 1.1 * GB)
    assert "differ" not in notes(even)
    assert "anks" not in notes(rows("standard", {"dram_read_bytes": 1 * GB}))


def test_phase_that_only_another_rank_has_is_zero() -> None:
    first, second = of_ranks("dpsgd", "dram_read_bytes", 1.0, 2.0)
    found = [replace(first, phase="forward"), replace(second, phase="forward")]
    found.append(replace(second, phase="clip"))
    [zero] = checked(first.case, found)[0][3:]
    assert (zero.phase, zero.rank, zero.value) == ("clip", 0, 0.0)
    assert STEP not in {row.phase for row in found}


def test_every_kind_says_how_steps_and_ranks_become_one() -> None:
    for metric in METRICS.values():
        assert {metric.over("repeat"), metric.over("rank")} <= {"mean", "median", "sum", "max"}
    assert METRICS["range_time_seconds"].over("rank") == "max"
    assert isinstance(METRICS["range_time_seconds"].how, Counters)


# --- names that look like others -----------------------------------------------------------------


def test_metric_whose_name_ends_like_a_ratio_is_judged_as_what_it_is() -> None:
    """Of a script nothing is a ratio to a baseline; the metric is one of its own."""
    own = Metric("compression_ratio", by=("zip",))
    case = Script("train.py")

    def run(name: str, value: float) -> Run:
        row = Measurement(case, "zip", STEP, own.name, value, "1", 0, "cpu", "zip 1")
        return Run.of(name, [Outcome(case, (row,), instruments=("zip",))])

    with METRICS.including([own]):
        verdict = Gate(run("before", 2.0), run("after", 3.0)).compare(
            [Limit.parse("compression_ratio:5%")]
        )
    assert [row["metric"] for row in verdict.regressions] == ["compression_ratio"]
    assert not verdict.unjudged
