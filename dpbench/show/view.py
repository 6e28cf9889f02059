"""The options of tables: columns, the order of lines, and the grouping of cases."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpbench.core.case import AXES, BASELINE_TRAINER
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS, Metric, expectations
from dpbench.core.settings import Settings

if TYPE_CHECKING:
    from dpbench.results.roofline import Roofs


def columns() -> dict[str, Metric]:
    """Return all columns by name, without the metrics that only the tables of profilers show.

    Counters by ncu's own names are left out, too, but `column` finds them.
    """
    return {name: each for name, each in METRICS.every().items() if not each.table}


def column(name: str) -> Metric:
    """Return the column with this name.

    Raises:
        ConfigurationError: there is no column with this name.
    """
    metric = METRICS.find(name)
    if metric and ("__" in name or metric.name in columns()):
        return metric
    hint = "also dram_ratio, _spread, _over_logical, _over_one_gpu, …, spread, or an ncu counter"
    raise unknown("column", name, columns(), hint)


def shown_by_default(*, logical: bool) -> list[Metric]:
    """Return the default columns for runs that only count, or for runs that measure on hardware.

    A metric that a project adds is a default column in both cases, if its definition says so.
    """
    shown = [metric for metric in METRICS.every().values() if "value" in metric.shown]
    return [
        metric
        for metric in shown
        if (metric.of or metric.name) not in METRICS.built_in
        or ("logical" in metric.by if logical else metric.by != ("logical",))
    ]


NAME = "name"
"""The value of ``sort`` that orders the lines of a table by the text in their first column."""

OF_TESTS = ("name", "fullname", "func", "fullfunc", "param")
PARAM = "param:"
"""The labels that group cases by the tests that requested them. ``param:NAME`` groups cases by one
parameter of the test."""

NO_TEST = "-"

GROUPS = ("cell", "device", "phase", *AXES)
"""The labels that do not depend on tests. ``cell`` groups cases that have the same baseline, and an
axis groups cases that have the same value of the axis."""


@dataclass(frozen=True)
class TableOptions:
    """The options of the tables of a run.

    Args:
        columns: the columns of the tables. If empty, tables have the columns of `shown_by_default`,
            and tables of phases, throughputs and other counters are shown, too.
        sort: the order of lines: the name of a column, an axis, or `NAME`.
        group_by: the labels by which cases are grouped into tables. The cases of a table always
            have the same device, too.
        top: the most kernels, operators and source lines in a table.
        expected: for each metric, the expected range of its ratio. The default ranges are for
            ratios to the trainer ``standard``.
        baseline: the trainer that ratios divide by.
        ceilings: the measured highest rates (roofs) of the card. If None, uses the roofs that
            dpbench has.
    """

    columns: tuple[Metric, ...] = ()
    sort: str | None = None
    group_by: tuple[str, ...] = ("cell",)
    top: int = Settings.top
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)
    baseline: str = BASELINE_TRAINER
    ceilings: Roofs | None = None

    @classmethod
    def of(cls, asked: Settings | Namespace, baseline: str = BASELINE_TRAINER) -> TableOptions:
        """Make options from the settings of a command line, in which commas separate names."""
        if asked.top < 1:
            raise ConfigurationError(
                f"the number of kernels or source lines in a table must be at least 1, "
                f"not {asked.top}"
            )
        labels = listed_names(asked.group_by) or ("cell",)
        for label in labels:
            if label not in (*GROUPS, *OF_TESTS) and not label.startswith(PARAM):
                raise unknown("group", label, (*GROUPS, *OF_TESTS, f"{PARAM}NAME"))
        if asked.sort not in (None, NAME, *AXES):
            column(str(asked.sort))
        no_usual = ["none"] if baseline != BASELINE_TRAINER else []
        expected = expectations([*asked.expect, *no_usual])
        chosen = tuple(map(column, listed_names(asked.columns)))
        return cls(chosen, asked.sort, labels, asked.top, expected, baseline)


def label_of(test: Mapping[str, Any], label: str) -> str:
    """Return the value of a label for a test. The labels are those of pytest-benchmark."""
    function, bracket, params = str(test["test"]).partition("[")
    name = function.rpartition("::")[2]
    if label.startswith(PARAM):
        parameter = label.removeprefix(PARAM)
        return f"{parameter}={test['params'].get(parameter, NO_TEST)}"
    labels = {"func": name, "fullfunc": function, "name": f"{name}{bracket}{params}"}
    labels |= {"fullname": f"{function}{bracket}{params}"}
    return (labels | {"param": params.removesuffix("]") or NO_TEST})[label]


def listed_names(listed: str | None) -> tuple[str, ...]:
    """Split a text at its commas into names, without duplicates."""
    names = (name.strip() for name in (listed or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))
