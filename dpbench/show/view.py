"""What a person wants to see of a run: which columns, in which order, in which tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpbench.case import AXES, BASELINE_TRAINER
from dpbench.errors import ConfigurationError, unknown
from dpbench.metrics import METRICS, Metric, expectations
from dpbench.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

    from dpbench.results.outcome import Outcome

IN_OTHER_TABLES = {"ncu_kernels", "nsys", "torch_profiler"}
"""The instruments whose metrics stand in tables of their own, not in those of cases."""


def columns() -> dict[str, Metric]:
    """Every column by name. Counters that were asked for by ncu's own names are columns too."""
    every = METRICS.every().items()
    return {name: each for name, each in every if not IN_OTHER_TABLES.issuperset(each.by)}


def column(name: str) -> Metric:
    """The column with a name."""
    metric = METRICS.find(name)
    if metric and ("__" in name or metric.name in columns()):
        return metric
    kinds = ("value", "throughput")
    values = [name for kind in kinds for name, each in columns().items() if each.kind == kind]
    hint = "also dram_ratio, dram_spread, dram_over_logical and so on, spread, or an ncu counter"
    raise unknown("column", name, values, hint)


def shown_by_default(*, logical: bool) -> list[Metric]:
    """What is shown of logical counting, or of counters and times, unless columns are chosen.

    Of both, whatever a project has declared.
    """
    shown = [metric for metric in METRICS.every().values() if "value" in metric.shown]
    return [
        metric
        for metric in shown
        if (metric.of or metric.name) not in METRICS.built_in
        or ("logical" in metric.by if logical else metric.by != ("logical",))
    ]


def without_replaced(
    shown: Iterable[Metric], known: Callable[[Metric], Collection[Any]]
) -> list[Metric]:
    """Of each column that another replaces and that one, those that are needed.

    ``known`` says for which cases a column has a number: the old one stays where it has some
    that the other has not, and alone where that one has none.
    """
    shown, every = list(shown), METRICS.every()
    pairs = [(each.name, each.replaced_by) for each in shown if each.replaced_by in every]
    numbers = {name: {*known(every[name])} for pair in pairs for name in pair}
    left_out = {old if numbers[old] <= numbers[new] else "" for old, new in pairs}
    left_out |= {new for old, new in pairs if numbers[old] and not numbers[new]}
    return [each for each in shown if each.name not in left_out]


def usual_columns() -> list[Metric]:
    """What is shown of runs with both, each once."""
    both = [*shown_by_default(logical=False), *shown_by_default(logical=True)]
    return list(dict.fromkeys(both))


NAME = "name"
"""The order by what stands in the first column."""

OF_TESTS = ("name", "fullname", "func", "fullfunc", "param")
PARAM = "param:"
"""What of the tests that asked for them cases in a table have in common; or one parameter."""

NO_TEST = "-"

GROUPS = ("cell", "device", "phase", *AXES)
"""What can share a table: the cases with one baseline (``cell``), or with one value of an axis."""


@dataclass(frozen=True)
class View:
    """Columns, order and grouping of the tables by case, and how many kernels are shown.

    Without ``columns`` they are those of `shown_by_default`, with every table that goes with
    them; ``sort`` is a column's name or an axis. Rows of different devices never share a table.
    ``expected`` has by metric the expected range of its ratio to standard. Ratios are to the
    trainer ``baseline``; the usual ranges are of ratios to the standard one.
    """

    columns: tuple[Metric, ...] = ()
    sort: str | None = None
    group_by: tuple[str, ...] = ("cell",)
    top: int = Settings.top
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)
    baseline: str = BASELINE_TRAINER

    @classmethod
    def of(cls, asked: Settings | Namespace, baseline: str = BASELINE_TRAINER) -> View:
        """The view that was asked for on a command line: names separated by commas."""
        if asked.top < 1:
            raise ConfigurationError(f"a table shows 1 kernel or more, not {asked.top}")
        labels = _names(asked.group_by) or ("cell",)
        for label in labels:
            if label not in (*GROUPS, *OF_TESTS) and not label.startswith(PARAM):
                raise unknown("group", label, (*GROUPS, *OF_TESTS, f"{PARAM}NAME"))
        if asked.sort not in (None, NAME, *AXES):
            column(str(asked.sort))
        no_usual = ["none"] if baseline != BASELINE_TRAINER else []
        expected = expectations([*asked.expect, *no_usual])
        chosen = tuple(map(column, _names(asked.columns)))
        return cls(chosen, asked.sort, labels, asked.top, expected, baseline)

    def under_tests(self, summary: pd.DataFrame, outcomes: Iterable[Outcome]) -> pd.DataFrame:
        """A summary with the labels of tests as columns, each case once for each that it has."""
        labels = [name for name in self.group_by if name in OF_TESTS or name.startswith(PARAM)]
        rows = [
            {**vars(outcome.case), "counted": name == "logical"}
            | {label: label_of(test, label) for label in labels}
            for outcome in outcomes
            for name in outcome.instruments
            for test in outcome.tests or [{"test": NO_TEST, "params": {}}]
        ]
        if not (rows and labels):
            return summary.assign(**dict.fromkeys(labels, NO_TEST))
        import pandas as pd

        counted = summary.assign(counted=summary.instrument == "logical")
        tests = pd.DataFrame(rows).drop_duplicates()
        return counted.merge(tests, on=[*AXES, "counted"], how="left")


def label_of(test: Mapping[str, Any], label: str) -> str:
    """What a test is called in a group, as pytest-benchmark has it."""
    function, bracket, params = str(test["test"]).partition("[")
    name = function.rpartition("::")[2]
    if label.startswith(PARAM):
        parameter = label.removeprefix(PARAM)
        return f"{parameter}={test['params'].get(parameter, NO_TEST)}"
    labels = {"func": name, "fullfunc": function, "name": f"{name}{bracket}{params}"}
    labels |= {"fullname": f"{function}{bracket}{params}"}
    return (labels | {"param": params.removesuffix("]") or NO_TEST})[label]


def _names(listed: str | None) -> tuple[str, ...]:
    names = (name.strip() for name in (listed or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))
