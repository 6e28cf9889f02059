"""What a person asks to see: columns, order, groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.core.settings import Settings
from dpbench.show.view import TableOptions, column, shown_by_default


def test_nothing_said_is_the_default() -> None:
    assert TableOptions.of(Settings()) == TableOptions() == TableOptions((), None, ("cell",))


def test_names_are_separated_by_commas_and_each_counts_once() -> None:
    view = TableOptions.of(
        Settings(
            columns="dram_bytes, dram_ratio,dram_bytes",
            sort="step_time_seconds",
            group_by="trainer,seq_len",
        )
    )
    assert [shown.name for shown in view.columns] == ["dram_bytes", "dram_ratio"]
    assert (view.sort, view.group_by) == ("step_time_seconds", ("trainer", "seq_len"))


@pytest.mark.parametrize(
    ("name", "shown", "of", "kind"),
    [
        ("dram_ratio", "dram_ratio", "dram_bytes", "ratio"),
        ("l2_bytes", "l2_served_bytes", "", "value"),
        ("dram_spread", "dram_spread", "dram_bytes", "spread"),
        ("dram_over_logical", "dram_over_logical", "dram_bytes", "over_logical"),
        ("dram_throughput", "dram_throughput", "dram_bytes", "throughput"),
        ("l2_read_throughput", "l2_sm_read_throughput", "l2_sm_read_bytes", "throughput"),
        ("spread", "spread", "", "spread"),
        ("lts__t_sectors.sum_ratio", "lts__t_sectors.sum_ratio", "lts__t_sectors.sum", "ratio"),
    ],
)
def test_column_says_which_number_it_shows(name: str, shown: str, of: str, kind: str) -> None:
    found = column(name)
    assert (found.name, found.of, found.kind) == (shown, of, kind)


def test_what_is_shown_by_default() -> None:
    assert [shown.name for shown in shown_by_default(logical=False)] == [
        *("dram_bytes", "dram_ratio", "step_time_seconds", "step_time_ratio"),
        *("peak_memory_bytes", "peak_memory_ratio", "gpu_busy_share"),
        *("l2_served_bytes", "l2_served_ratio"),
    ]
    assert [shown.name for shown in shown_by_default(logical=True)] == [
        *("logical_bytes", "logical_ratio", "peak_memory_bytes", "peak_memory_ratio"),
        *("collective_bytes", "collective_ratio"),
    ]


def test_axes_sort_and_group() -> None:
    for axis in AXES:
        made = TableOptions.of(Settings(sort=axis, group_by=axis))
        assert made == TableOptions((), axis, (axis,))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: TableOptions.of(Settings(columns="dram")),
            "unknown column 'dram'; choose from dram_bytes, dram_",
        ),
        (lambda: TableOptions.of(Settings(columns="dram_bytes,nope")), "unknown column 'nope'"),
        (lambda: TableOptions.of(Settings(sort="fastest")), "unknown column 'fastest'"),
        (
            lambda: TableOptions.of(Settings(group_by="gpu")),
            "unknown group 'gpu'; choose from gpus, …; did you mean gpus?",
        ),
    ],
)
def test_unknown_names_are_refused_in_one_line(
    wrong: Callable[[], TableOptions], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        wrong()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
