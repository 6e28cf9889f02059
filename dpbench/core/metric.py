"""Defines a metric: the source of its values, their aggregation, and how tables show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

Kind = Literal["value", "ratio", "spread", "over_one_gpu", "over_logical", "logical", "throughput"]
"""``value``: a measured metric. Other kinds are computed from values of a measured metric."""

STANDARD = "÷ std"
"""Column heading of ratios to the standard trainer. Tables with another baseline have another
heading."""

DERIVED: Mapping[Kind, str] = {
    "ratio": STANDARD,
    "spread": "spread",
    "over_one_gpu": "÷ one GPU",
    "over_logical": "÷ logical",
    "logical": "logical",
}
"""For each kind of derived metric, such as ``dram_ratio``, the last part of its column heading.
Throughputs are missing, because their heading is the metric's heading and ``GB/s``."""

Shown = Literal[Kind, "change"]
"""Kinds of values that tables can show by default. ``change`` is relative to a reference run."""

SHOWN: tuple[Shown, ...] = ("value", "change")

Aggregate = Literal["mean", "median", "sum", "max"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
"""Ways to aggregate several values into one value."""


class Aggregation:
    """The source of a metric's values, and how values of steps and ranks are aggregated.

    Attributes:
        over: the aggregation over steps (``repeat``) and over ranks (``rank``). For cases with
            Poisson batches, `dpbench.results.summary.summary` uses other aggregations over steps.
        adds_up: True if the values of all phases add up to the value of the step.
    """

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "mean", "rank": "sum"}
    adds_up: ClassVar[bool] = True


@dataclass(frozen=True)
class Counters(Aggregation):
    """A counted quantity. If ``names`` is not empty, the quantity is a sum of hardware counters.

    Args:
        names: the counters to add, as ``ncu --query-metrics`` names them.
        scale: the factor by which the sum is multiplied.
        chips: pairs of a pattern for names of chips, and the counters that replace ``names`` on
            these chips. A pair without counters means that these chips lack the metric.
        less: the counter that is subtracted instead of added.
    """

    names: tuple[str, ...] = ()
    scale: float = 1
    chips: tuple[tuple[str, tuple[str, ...]], ...] = ()
    less: str = ""


@dataclass(frozen=True)
class Sum(Aggregation):
    """The sum of the metrics in ``parts``. Runs that lack one of them have no such sum."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class Share(Aggregation):
    """The first metric in ``parts`` divided by the second, if a run has both metrics."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "mean"}
    adds_up: ClassVar[bool] = False

    parts: tuple[str, str]


@dataclass(frozen=True)
class Timed(Aggregation):
    """A time or rate. By default, tables show the median over steps and the maximum over ranks."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "max"}


@dataclass(frozen=True)
class Peak(Aggregation):
    """A maximum over time, such as peak memory.

    The values of phases do not add up to the value of the step.
    """

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "max", "rank": "max"}
    adds_up: ClassVar[bool] = False


AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    kind.__name__: kind for kind in (Counters, Sum, Share, Timed, Peak)
}


@dataclass(frozen=True)
class Metric:
    """A quantity of a training step.

    Args:
        name: the name; its end gives the unit, see `UNITS`.
        header: the column heading, of one or two lines; by default made from the name.
        by: the instruments that measure the metric, the preferred instrument first.
        how: the source of the values and their aggregation.
        repeats: the aggregation over steps, if it differs from that of ``how``.
        ranks: the aggregation over ranks, if it differs from that of ``how``.
        nvprof: the name of the metric's throughput in nvprof (see "nvprof Metric Comparison" in the
            documentation of the Nsight Compute CLI).
        logical: the metric of the instrument ``logical`` that counts the same quantity, if any.
        shown: the values that tables show unless the user chooses columns.
        giga: True if tables divide the values by 10⁹. Tables divide all bytes by 10⁹.
        expected: the expected range of the ratio to the baseline.
        higher_is_better: True if a decrease is a regression, False if an increase is.
        signed: True if values can be negative.
        throughput: True if tables can show the values divided by time.
        spread: True if `dpbench.core.metrics.LARGEST_SPREAD` includes the metric's spread over
            steps.
        source: where an instrument finds the value. For ``ncu_kernels``, this is a field of
            `KernelCount`; for ``logical``, a field of `OperatorCount`. For ``torch_profiler``, this
            is the start of an activity's name in a trace.
        table: the kind of table that shows the metric, e.g. ``kernels``; empty for tables of cases.
        of: for a derived metric, the metric from which it is computed.
        kind: for a derived metric, the way in which it is computed.
    """

    name: str
    header: str = ""
    by: tuple[str, ...] = ("ncu", "cupti")
    how: Aggregation = Counters()
    repeats: Aggregate | None = None
    ranks: Aggregate | None = None
    nvprof: str = ""
    logical: str = ""
    shown: tuple[Shown, ...] = SHOWN
    giga: bool = False
    expected: tuple[float, float] | None = None
    higher_is_better: bool = False
    signed: bool = False
    throughput: bool = True
    spread: bool = False
    source: str = ""
    table: str = ""
    of: str = ""
    kind: Kind = "value"

    @property
    def unit(self) -> str:
        """Unit of the metric's values: ``B``, ``s``, ``1/s``, ``J``, ``W`` or ``1``."""
        return unit(self.name)

    @property
    def heading(self) -> str:
        """Heading of the metric's column: ``header``, or words made from the name."""
        words = _UNIT.sub("", self.name).replace("_", " ")
        unit = {"s": "ms", "B": "", "1": "", "1/s": "per s"}.get(self.unit, self.unit)
        return self.header or "\n".join(filter(None, (words, unit)))

    @property
    def short_header(self) -> str:
        """The heading on one line, without "total" or "ms" at its end."""
        return self.heading.replace("\n", " ").removesuffix(" total").removesuffix(" ms")

    @property
    def form(self) -> Literal["percent", "spread", "ratio", "as is", "ms", "giga", "number"]:
        """Format of the metric's values in tables; ``as is`` shows the unit of the row."""
        if self.kind in ("ratio", "over_one_gpu", "over_logical"):
            return "ratio"
        if self.kind == "spread":
            return "spread"
        if isinstance(self.how, Share):
            return "percent"
        if is_counter(self.name):
            return "as is"
        in_giga = self.giga or self.unit == "B" or self.kind == "throughput"
        return "ms" if self.unit == "s" else "giga" if in_giga else "number"

    @property
    def adds_up(self) -> bool:
        """True if the metric's values of phases add up to the value of the step."""
        return self.how.adds_up

    @property
    def parts(self) -> tuple[str, ...]:
        """The metrics from which a sum or share is computed; empty for other metrics."""
        return self.how.parts if isinstance(self.how, Sum | Share) else ()

    def over(self, column: str) -> Aggregate:
        """Return the aggregation over steps (``repeat``) or ranks (``rank``)."""
        return {"repeat": self.repeats, "rank": self.ranks}[column] or self.how.over[column]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON types without default values, for `from_json`."""
        how = {"kind": type(self.how).__name__, **_without_defaults(self.how)}
        return _without_defaults(self) | {"how": how}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metric:
        """Return the metric that `as_json` described."""
        how = _tuples(data["how"])
        return cls(**_tuples(data) | {"how": AGGREGATIONS[how.pop("kind")](**how)})

    @property
    def _counted(self) -> Counters:
        return self.how if isinstance(self.how, Counters) else Counters()

    @property
    def counters(self) -> tuple[str, ...]:
        """The metric's hardware counters on chips that no pattern in `Counters.chips` matches."""
        return self._counted.names

    def on(self, chip: str) -> tuple[str, ...]:
        """Return the metric's hardware counters on a chip, e.g. ``GB202``.

        Returns an empty tuple if the chip lacks the metric. Returns `counters` if no pattern in
        `Counters.chips` matches the chip's name.
        """
        chips = self._counted.chips
        fitting = (names for pattern, names in chips if fnmatchcase(chip.upper(), pattern))
        return next(fitting, self.counters)

    def counted_by(self, names: tuple[str, ...]) -> Metric:
        """Return this metric with these hardware counters on every chip."""
        return replace(self, how=replace(self._counted, names=names, chips=()))

    def derived(self) -> Iterator[Metric]:
        """Yield the metrics that are derived from this metric."""
        short = re.sub(r" (served|mem\.)$", "", self.short_header)
        made: list[tuple[str, Kind]] = [
            (f"{short}\n{header}", kind)
            for kind, header in DERIVED.items()
            if self.logical or kind not in ("over_logical", "logical")
        ]
        if self.unit == "B" and "ncu" in self.by:
            made.append((" ".join(self.heading.split()) + "\nGB/s", "throughput"))
        for header, kind in made:
            yield Metric(
                derived_name(self.name, kind),
                header,
                self.by,
                shown=tuple(each for each in SHOWN if {each, kind} <= {*self.shown}),
                giga=kind == "logical" and self.form == "giga",
                higher_is_better=self.higher_is_better,
                table=self.table,
                of=self.name,
                kind=kind,
            )

    @property
    def formula(self) -> str:
        """The sum of counters that `value` computes, as text without the scale."""
        text = "".join(
            f"{' - ' if name == self._counted.less else ' + '}{name}" for name in self.counters
        )
        return text.removeprefix(" + ")

    @property
    def spellings(self) -> tuple[tuple[str, ...], ...]:
        """Tuples of hardware counters, one for each kind of chip that has the metric."""
        chips = (names for _, names in self._counted.chips)
        return tuple(names for names in (self.counters, *chips) if names)

    def value(self, counted: Mapping[str, float]) -> float:
        """Compute the metric from the values of its `counters`.

        If the counters of a chip replace `counters`, call this method on the result of
        `counted_by`.
        """
        signs = {self._counted.less: -1}
        return self._counted.scale * sum(signs.get(n, 1) * counted[n] for n in self.counters)


def _without_defaults(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    return {f.name: v for f in fields(value) if (v := getattr(value, f.name)) != f.default}


def _tuples(value: Any) -> Any:
    """Convert the lists in JSON to tuples."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_UNIT = re.compile(r"(_total)?_(bytes|seconds|joules|watts)$|_per_second$")

UNITS = {"_bytes": "B", "_seconds": "s", "_per_second": "1/s", "_joules": "J", "_watts": "W"}
"""Maps the last part of a metric's name to the metric's unit."""


def unit(metric: str) -> str:
    """Return the unit that the end of a metric's name tells, or "1" if it tells none."""
    return next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "1")


def derived_name(metric: str, kind: Kind = "ratio") -> str:
    """Return the name of a metric that is derived from ``metric``, e.g. ``dram_ratio``."""
    if kind == "throughput":
        return metric.replace("_bytes", "_throughput")
    return f"{_UNIT.sub('', metric)}_{kind}"


def is_counter(name: str) -> bool:
    """Return True if a metric's name is that of a hardware counter, which contains ``__``."""
    return "__" in name
