"""Defines a metric: the source of its numbers, their aggregation, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

Kind = Literal["value", "ratio", "spread", "over_one_gpu", "over_logical", "logical", "throughput"]
"""A metric's own value, or one derived from it."""

STANDARD = "÷ std"
"""The heading of the ratio to standard training."""

DERIVED: Mapping[Kind, str] = {
    "ratio": STANDARD,
    "spread": "spread",
    "over_one_gpu": "÷ one GPU",
    "over_logical": "÷ logical",
    "logical": "logical",
}
"""The metrics derived from a metric, e.g. ``dram_ratio``, with the headings of their columns."""

Shown = Literal[Kind, "change"]
"""What is shown by default; ``change``: in comparisons, with its ratio if that is shown."""

SHOWN: tuple[Shown, ...] = ("value", "change")

Aggregate = Literal["mean", "median", "sum", "max"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
"""How several numbers are aggregated."""


class Aggregation:
    """The source of a metric's numbers, and how they are aggregated.

    Attributes:
        over: how numbers are aggregated over ``repeat`` or ``rank``.
        adds_up: whether phases add up to the step.
    """

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "mean", "rank": "sum"}
    adds_up: ClassVar[bool] = True


@dataclass(frozen=True)
class Counters(Aggregation):
    """A counted quantity; on hardware, the sum of counters.

    Args:
        names: the counters that add up to it, by the names of ``ncu --query-metrics``; they are
            counted unless others are asked for.
        scale: what their sum is multiplied by.
        chips: other counters by pattern of the chip's name; none if such a chip lacks it.
        less: the counter that is subtracted from the others.
    """

    names: tuple[str, ...] = ()
    scale: float = 1
    chips: tuple[tuple[str, tuple[str, ...]], ...] = ()
    less: str = ""


@dataclass(frozen=True)
class Sum(Aggregation):
    """The sum of other metrics, in every run that has all of them."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class Share(Aggregation):
    """One metric divided by another, in every run that has the two."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "mean"}
    adds_up: ClassVar[bool] = False

    parts: tuple[str, str]


@dataclass(frozen=True)
class Timed(Aggregation):
    """A time: the median over steps, and the largest over ranks, which wait for the slowest."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "max"}


@dataclass(frozen=True)
class Peak(Aggregation):
    """The largest value over time. Values of phases do not add up to that of the step."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "mean", "rank": "max"}
    adds_up: ClassVar[bool] = False


HOWS: dict[str, Callable[..., Aggregation]] = {
    kind.__name__: kind for kind in (Counters, Sum, Share, Timed, Peak)
}


@dataclass(frozen=True)
class Metric:
    """One quantity of a training step."""

    name: str  # spelled out; its unit follows from the end, see `UNITS`
    header: str = ""  # heading of its column, one or two lines; from the name if empty
    by: tuple[str, ...] = ("ncu", "cupti")  # the instruments that have it, the preferred one first
    how: Aggregation = Counters()
    # How steps and ranks are aggregated, if not as `how` says.
    repeats: Aggregate | None = None
    ranks: Aggregate | None = None
    # The throughput of nvprof that is this per second ("nvprof Metric Comparison" in the Nsight
    # Compute CLI documentation).
    nvprof: str = ""
    logical: str = ""  # the metric of logical counting that corresponds to it
    shown: tuple[Shown, ...] = SHOWN  # unless columns are chosen
    giga: bool = False  # shown in units of 10⁹, as bytes are
    expected: tuple[float, float] | None = None  # range of the ratio to the baseline
    higher_is_better: bool = False  # whether a fall is worse; otherwise a rise is
    signed: bool = False  # whether it can be negative
    throughput: bool = True  # whether its throughput is shown, too
    spread: bool = False  # whether the row's largest spread includes its own
    # Where an instrument finds it: a field of `KernelCount` or `OperatorCount`, or how an
    # activity's name in a trace of the PyTorch profiler begins.
    source: str = ""
    # The tables that it has a column in, if not those of cases.
    table: str = ""
    # For metrics made by `derived`: the base metric, and how it is derived.
    of: str = ""
    kind: Kind = "value"

    @property
    def unit(self) -> str:
        """``B``, ``s``, ``1/s`` or ``1``."""
        return unit(self.name)

    @property
    def heading(self) -> str:
        """The heading of its column."""
        words = _UNIT.sub("", self.name).replace("_", " ")
        unit = {"s": "ms", "B": "", "1": "", "1/s": "per s"}.get(self.unit, self.unit)
        return self.header or "\n".join(filter(None, (words, unit)))

    @property
    def short_header(self) -> str:
        """The heading on one line, without "total" and "ms"."""
        return self.heading.replace("\n", " ").removesuffix(" total").removesuffix(" ms")

    @property
    def form(self) -> Literal["percent", "spread", "ratio", "as is", "ms", "giga", "number"]:
        """How its values are written for people; ``as is`` with the unit of the row."""
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
        """Whether its phases add up to the step."""
        return self.how.adds_up

    @property
    def parts(self) -> tuple[str, ...]:
        """The metrics of which it is the sum or the share."""
        return self.how.parts if isinstance(self.how, Sum | Share) else ()

    def over(self, column: str) -> Aggregate:
        """How numbers are aggregated over a column, ``repeat`` or ``rank``."""
        return {"repeat": self.repeats, "rank": self.ranks}[column] or self.how.over[column]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, without defaults; the inverse of `from_json`."""
        how = {"kind": type(self.how).__name__, **_without_defaults(self.how)}
        return _without_defaults(self) | {"how": how}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metric:
        """The metric that `as_json` described."""
        how = _tuples(data["how"])
        return cls(**_tuples(data) | {"how": HOWS[how.pop("kind")](**how)})

    @property
    def _counted(self) -> Counters:
        return self.how if isinstance(self.how, Counters) else Counters()

    @property
    def counters(self) -> tuple[str, ...]:
        """The hardware counters that add up to it on chips without special ones."""
        return self._counted.names

    def on(self, chip: str) -> tuple[str, ...]:
        """Its counters on a chip, e.g. ``GB202``; none if the chip lacks them.

        A chip without a name, or that no pattern matches, has the usual ones.
        """
        chips = self._counted.chips
        fitting = (names for pattern, names in chips if fnmatchcase(chip.upper(), pattern))
        return next(fitting, self.counters)

    def counted_by(self, names: tuple[str, ...]) -> Metric:
        """The same metric, made of these counters alone."""
        return replace(self, how=replace(self._counted, names=names, chips=()))

    def derived(self) -> Iterator[Metric]:
        """The metrics derived from it."""
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
        """How it is computed from its counters, in units of its scale."""
        text = "".join(
            f"{' - ' if name == self._counted.less else ' + '}{name}" for name in self.counters
        )
        return text.removeprefix(" + ")

    @property
    def spellings(self) -> tuple[tuple[str, ...], ...]:
        """Its counters on each kind of chip."""
        chips = (names for _, names in self._counted.chips)
        return tuple(names for names in (self.counters, *chips) if names)

    def value(self, counted: Mapping[str, float]) -> float:
        """Its value, computed from the values of its counters."""
        signs = {self._counted.less: -1}
        return self._counted.scale * sum(signs.get(n, 1) * counted[n] for n in self.counters)


def _without_defaults(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {f.name: v for f in fields(value) if (v := getattr(value, f.name)) != f.default}


def _tuples(value: Any) -> Any:
    """JSON with its lists as tuples."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_UNIT = re.compile(r"(_total)?_(bytes|seconds|joules|watts)$|_per_second$")

UNITS = {"_bytes": "B", "_seconds": "s", "_per_second": "1/s", "_joules": "J", "_watts": "W"}
"""Units by the end of a metric's name."""


def unit(metric: str) -> str:
    """The unit in a metric's name; "1" for a plain number."""
    return next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "1")


def derived_name(metric: str, kind: Kind = "ratio") -> str:
    """The name of a derived metric, without the base metric's unit, e.g. ``dram_ratio``."""
    if kind == "throughput":
        return metric.replace("_bytes", "_throughput")
    return f"{_UNIT.sub('', metric)}_{kind}"


def is_counter(name: str) -> bool:
    """Whether it is a hardware counter by its own name."""
    return "__" in name
