"""Shards divide a grid by cells, and runs of them are one again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.commands.merge import Shard, cells, merge_runs
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.grid import GRIDS, Grid
from dpbench.results.conditions import new_run
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome
from dpbench.results.rows import NO_HARDWARE, Measurement
from dpbench.results.run import Run

GRID1 = GRIDS["grid1"]


@settings(deadline=None)
@given(
    trainers=st.lists(st.sampled_from(["standard", "dpsgd", "fused"]), min_size=1, unique=True),
    batch_sizes=st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    seq_lens=st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    of=st.integers(1, 9),
)
def test_every_cell_is_whole_in_one_shard(
    trainers: list[str], batch_sizes: list[int], seq_lens: list[int], of: int
) -> None:
    grid = Grid(
        "",
        {
            "trainer": tuple(trainers),
            "batch_size": tuple(batch_sizes),
            "seq_len": tuple(seq_lens),
        },
    )
    shards = [Shard(number, of).cases(grid.cases()) for number in range(1, of + 1)]
    assert sorted(case.id for shard in shards for case in shard) == sorted(
        case.id for case in grid.cases()
    )
    sizes = [len(cells(shard)) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    for shard in shards:
        assert all(len(cell) == len(trainers) for cell in cells(shard).values())


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "1/2/3"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a shard is K/N"):
        Shard.parse(text)


def number(case: Case) -> Measurement:
    return Measurement(
        case,
        instrument="logical",
        phase="step",
        metric="logical_bytes",
        value=1.0,
        unit="B",
        repeat=0,
        device=NO_HARDWARE,
        tool="",
    )


def run_of(
    name: str,
    cases: list[Case],
    shard: str | None = None,
    grid: Grid = GRID1,
    **environment: Any,
) -> Run:
    """A complete run in which each case has one number."""
    run = new_run({"gpu": {"name": "NVIDIA H200"}, **environment}, grid.as_json(), shard=shard)
    outcomes = [Outcome(case, (number(case),), instruments=("logical",)) for case in cases]
    session = run.session | {"status": COMPLETE, "cases_asked": len(cases)}
    return Run.of(name, outcomes, run.environment, session)


def shards(of: int = 2) -> list[Run]:
    every = [Shard(number, of) for number in range(1, of + 1)]
    return [run_of(f"{shard}", shard.cases(GRID1.cases()), str(shard)) for shard in every]


def test_shards_are_a_complete_run_of_the_grid() -> None:
    run, notes = merge_runs(shards())
    assert run.status == COMPLETE
    assert notes == []
    assert {outcome.case for outcome in run.outcomes} == {*GRID1.cases()}
    assert run.cases_asked == len(GRID1.cases())
    assert "shard" not in run.session["grid"]


def test_a_missing_shard_is_named_and_the_run_is_not_complete() -> None:
    first, _, third = shards(3)
    run, notes = merge_runs([third, first])
    assert run.status == INTERRUPTED
    assert notes == ["shard 2/3 is missing"]


def test_cases_that_a_shard_lacks_are_counted() -> None:
    _, second = shards()
    run, notes = merge_runs([run_of("", [second.outcomes[0].case], "2/2")])
    assert run.status == INTERRUPTED
    lacking = len(second.outcomes) - 1
    assert notes == [
        "shard 1/2 is missing",
        f"{lacking} of {lacking + 1} cases of shard 2/2 are missing",
    ]


def test_a_shard_by_another_instrument_is_missing_by_the_first() -> None:
    first, second = shards()
    timed = [replace(outcome, instruments=("timing",)) for outcome in second.outcomes]
    other = Run.of("2", timed, second.environment, second.session)
    run, notes = merge_runs([first, other])
    assert run.status == INTERRUPTED
    assert notes == ["shard 2/2 is missing by logical", "shard 1/2 is missing by timing"]


def test_shards_of_different_grids_are_refused_by_what_differs() -> None:
    first, _ = shards()
    grid = GRID1.with_axes(trainer=["standard", "fused"])
    other = run_of("2/2", Shard(2, 2).cases(grid.cases()), "2/2", grid)
    with pytest.raises(
        ConfigurationError, match=r"grid's trainer \['standard', 'dpsgd', .*'fused'"
    ):
        merge_runs([first, other])


def test_runs_of_several_grids_keep_what_these_have_in_common_and_each_its_own() -> None:
    both = [GRIDS["grid1"], GRIDS["grid2"].with_axes(batch_size=[32])]
    first, second = (run_of(grid.name, grid.cases(), grid=grid) for grid in both)
    run, notes = merge_runs([first, second])
    assert (run.status, notes) == (COMPLETE, [])
    assert run.grid["trainer"] == list(GRID1.values("trainer"))
    assert not {"name", "batch_size", "seq_len"} & {*run.grid}
    assert [part["grid"]["name"] for part in run.parts] == ["grid1", "grid2"]
    assert [part["grid"]["batch_size"] for part in run.parts] == [[8, 16], [32]]
    third = run_of("3", [], grid=GRID1)
    assert len(merge_runs([run, third])[0].parts) == 2


def test_runs_whose_ratios_are_to_different_baselines_are_refused() -> None:
    grid = GRID1.with_axes("dpsgd", batch_size=[32])
    with pytest.raises(ConfigurationError, match="ratios to standard -> dpsgd"):
        merge_runs([run_of("1", GRID1.cases()), run_of("2", grid.cases(), grid=grid)])


def test_what_was_measured_twice_is_refused_by_its_name() -> None:
    first, _ = shards()
    with pytest.raises(ConfigurationError, match=r"both have \S+-1b-fp32 by logical"):
        merge_runs([first, run_of("again", [first.outcomes[0].case])])


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"gpu": {"name": "NVIDIA H100"}}, "GPU NVIDIA H200 -> NVIDIA H100"),
        ({"code": {"commit": "b"}}, "commit a -> b"),
    ],
)
def test_other_conditions_are_refused_by_name(environment: dict[str, Any], named: str) -> None:
    known = {"versions": {"torch": "2.11"}, "code": {"commit": "a"}}
    with pytest.raises(ConfigurationError, match=named):
        merge_runs([run_of("", [], **known), run_of("", [], **(known | environment))])


def test_another_cpu_is_said_and_not_refused() -> None:
    machines = [{"machine": {"cpu": cpu}} for cpu in ("Xeon", "EPYC")]
    _, notes = merge_runs([run_of("a", [], **machines[0]), run_of("b", [], **machines[1])])
    assert notes == ["b: CPU Xeon -> EPYC"]
