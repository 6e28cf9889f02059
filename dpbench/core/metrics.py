r"""Metrics: what each one means, and the registry of all, which a project can extend.

A metric says where its values come from, how they are aggregated, and how tables show them. A
project can register a metric in a ``conftest.py``::

    METRICS.register(Metric("l1_bytes", "L1", ("ncu",), Counters(("l1tex__t_bytes.sum",))))

A package can register metrics for every command with an entry point of the group
``dpbench.metrics``, which names a `Metric` or a list of metrics. A saved run contains the
definitions of its metrics. Hardware counters, such as ``lts__t_sectors.sum``, can be used as
metrics without a definition.
"""

from __future__ import annotations

import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, ValuesView
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from dpbench.core.errors import ConfigurationError, unknown

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
"""Ways to aggregate several values into one value."""


class Aggregation(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag=True):
    """The source of a metric's values, and how values of steps and ranks are aggregated.

    Attributes:
        over: the aggregation over steps (``repeat``) and over ranks (``rank``). For cases with
            Poisson batches, `dpbench.results.summary.summary` uses other aggregations over steps.
        adds_up: True if the values of all phases add up to the value of the step.
    """

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "mean", "rank": "sum"}
    adds_up: ClassVar[bool] = True


class Counters(Aggregation, frozen=True):
    """A counted quantity. If ``names`` is not empty, the quantity is a sum of hardware counters.

    Attributes:
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


class Sum(Aggregation, frozen=True):
    """The sum of the metrics in ``parts``. Runs that lack one of them have no such sum."""

    parts: tuple[str, ...]


class Share(Aggregation, frozen=True):
    """The first metric in ``parts`` divided by the second, if a run has both metrics."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "mean"}
    adds_up: ClassVar[bool] = False

    parts: tuple[str, str]


class Timed(Aggregation, frozen=True):
    """A time or rate. By default, tables show the median over steps and the maximum over ranks."""

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "median", "rank": "max"}


class Peak(Aggregation, frozen=True):
    """A maximum over time, such as peak memory.

    The values of phases do not add up to the value of the step.
    """

    over: ClassVar[Mapping[str, Aggregate]] = {"repeat": "max", "rank": "max"}
    adds_up: ClassVar[bool] = False


class Metric(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A quantity of a training step.

    Attributes:
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
    how: Counters | Sum | Share | Timed | Peak = msgspec.field(default_factory=Counters)
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
        """Unit of the metric's values: ``B``, ``s``, ``1/s``, ``Hz``, ``J``, ``W`` or ``1``."""
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


_UNIT = re.compile(r"(_total)?_(bytes|seconds|hz|joules|watts)$|_per_second$")

UNITS = {
    "_bytes": "B",
    "_seconds": "s",
    "_per_second": "1/s",
    "_hz": "Hz",
    "_joules": "J",
    "_watts": "W",
}
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


SECTOR_BYTES = 32
"""An L2 sector is 32 bytes (Nsight Compute Profiling Guide, "Memory Chart")."""

RATIO = "_ratio"
"""A ratio to the baseline has a name with this end, such as ``dram_ratio``."""


class Metrics(Mapping[str, Metric]):
    """Metrics by name, in the order in which tables show them.

    Entry points are loaded on first use.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._known = {metric.name: metric for metric in metrics}
        self.built_in = frozenset(self._known)
        self._every: dict[str, Metric] = {}
        self._complete = False

    def register(self, *metrics: Metric) -> None:
        """Add metrics; raise `ConfigurationError` if a name already has another definition."""
        self._every = {}
        for metric in metrics:
            if self._known.setdefault(metric.name, metric) != metric:
                raise ConfigurationError(
                    f"metric {metric.name!r} exists already; choose another name"
                )

    def _all(self) -> dict[str, Metric]:
        if not self._complete:
            self._complete = True
            for entry in entry_points(group="dpbench.metrics"):
                named = entry.load()
                self.register(*([named] if isinstance(named, Metric) else named))
        return self._known

    def __getitem__(self, name: str) -> Metric:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def values(self) -> ValuesView[Metric]:
        """Return the metrics, without a look-up of each name."""
        return self._all().values()

    def items(self) -> ItemsView[str, Metric]:
        """Return names and metrics, without a look-up of each name."""
        return self._all().items()

    @contextmanager
    def including(self, *sides: Iterable[Metric]) -> Iterator[None]:
        """Register the metrics of saved runs until the end of a ``with`` block.

        A metric that this process has already registered keeps its definition.
        """
        known = self._all()
        lent = {each.name: each for side in sides for each in side if each.name not in known}
        if not lent:
            yield
            return
        self._known, self._every = known | lent, {}
        try:
            yield
        finally:
            registered = {name: m for name, m in self._known.items() if name not in lent}
            self._known, self._every = known | registered, {}

    def behind(self, names: Collection[str]) -> list[Metric]:
        """Return the metrics with these names, and the sums and shares of these metrics only."""
        known = {*names}
        return [m for m in self.values() if m.name in known or (m.parts and known >= {*m.parts})]

    def definitions(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Return the metrics of `behind` as plain JSON types, to save them with a run."""
        return [msgspec.to_builtins(metric) for metric in self.behind(names)]

    def had_by(self, instrument: str) -> list[Metric]:
        """Return the metrics that an instrument measures."""
        return [metric for metric in self.values() if instrument in metric.by]

    def in_table(self, table: str) -> list[Metric]:
        """Return the metrics that tables of this kind show."""
        return [metric for metric in self.values() if metric.table == table]

    def counted(self, instrument: str) -> list[Metric]:
        """Return the metrics that an instrument computes from hardware counters."""
        return [metric for metric in self.had_by(instrument) if metric.spellings]

    def every(self) -> dict[str, Metric]:
        """Return all measured metrics, all derived metrics and `LARGEST_SPREAD`, by name."""
        if not self._every:
            every = (each for metric in self.values() for each in (metric, *metric.derived()))
            self._every = {each.name: each for each in (*every, LARGEST_SPREAD)}
        return self._every

    def find(self, name: str) -> Metric | None:
        """Return the metric that a user names, or None if the name is unknown.

        The name can be a name in `every`, the name of a hardware counter, or the name of a metric
        derived from a counter. Other accepted spellings are ``l2_bytes`` for ``l2_served_bytes``,
        ``dram_bytes_ratio`` for ``dram_ratio``, and names of nvprof, e.g. ``gld_throughput`` for
        ``global_load_throughput``.
        """
        every, own = self.every(), name.removesuffix(RATIO)
        nvprof = [derived_name(m.name, "throughput") for m in self.values() if m.nvprof == name]
        spellings = [*nvprof, name, re.sub("^l2_bytes$", "l2_served_bytes", name)]
        spellings += [derived_name(own)] if own != name else []
        for spelling in spellings:
            if spelling in every:
                return every[spelling]
        ends: dict[str, Aggregate] = {"sum": "sum", "max": "max"}
        counter = Metric(own, own, ranks=ends.get(own.rpartition(".")[2], "mean"), shown=())
        known = (each for each in (counter, *counter.derived()) if each.name == name)
        return next(known, None) if is_counter(name) else None


LARGEST_SPREAD = Metric("spread", "largest\nspread", kind="spread", shown=())
"""The largest spread over steps in a row of a table, among metrics with ``spread=True``."""


def _dram(operation: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("GB20[0-9]", (f"dram__bytes_op_{operation}.sum",)), ("G[AB]?0B", ()))


def _global(operation: str) -> Counters:
    return Counters((f"l1tex__t_bytes_pipe_lsu_mem_global_op_{operation}.sum",))


_hidden = partial(Metric, shown=())
"""Makes a metric that tables of cases show only if the user names it."""


def _cycles(name: str, counter: str) -> Metric:
    return _hidden(name, "", ("cupti",), Counters((counter,)))


_link = partial(_hidden, by=("cupti",), ranks="mean")
"""Makes a metric of the bytes that the GPU of one rank sends or receives over a link."""


_DIVIDED = ("GA100", "GH100", "GB1[01][02]")
"""Patterns for chips whose L2 cache has two halves. These chips have a counter of the sectors that
one half requests from the other half."""

_UNDIVIDED = ("GV1*", "TU1*", "GA10[!0]", "AD1*", "GB20*", "GB10B")
"""Patterns for chips without the counter of sectors between halves of the L2. On chips that are in
neither tuple, the metrics that `_l2` defines are missing, because the counters are unknown."""

_CROSSINGS = "lts__t_sectors_srcunit_ltcfabric.sum"


def _l2(counter: str, less: str = "", undivided: bool = True) -> Counters:
    """Return the counters of sectors in the L2, with a scale of 32 bytes for each sector.

    Args:
        counter: the part of the counter's name after ``lts__t_sectors``.
        less: a counter to subtract on chips in `_DIVIDED`.
        undivided: False if chips in `_UNDIVIDED` lack the counters.
    """
    named = f"lts__t_sectors{counter}.sum"
    others = ((chip, (named,) if undivided else ()) for chip in _UNDIVIDED)
    divided = (named, less) if less else (named,)
    chips = (*((chip, divided) for chip in _DIVIDED), *others)
    return Counters((), SECTOR_BYTES, chips, less)


_COUNTED, _LOGICAL, _TIMED = ("ncu", "cupti"), ("logical",), ("timing", "cupti")
_CUPTI = ("cupti",)  # not ncu, because under ncu the CPU cannot run ahead of the GPU
_TENSOR, _PEAK = "sm__pipe_tensor_cycles_active.sum", ".peak_sustained_elapsed"
_kernels = partial(_hidden, by=("ncu_kernels",), table="kernels")
_profiler = partial(_hidden, by=("torch_profiler",), table="PyTorch profiler")
_nsys = partial(_hidden, by=("nsys",), table="Nsight Systems")
_VALUE: tuple[Shown, ...] = ("value",)
_AND_RATIO: tuple[Shown, ...] = (*SHOWN, "ratio")

SM_CLOCK = "sm_clock_hz"

POWER_CAP = "power_cap"
"""Products of large matrices reach a card's power cap in normal use. Clocks are not called lowered
if this is the only reason in `CLOCK_REASONS`."""

CLOCK_REASONS: Mapping[str, tuple[str, ...]] = {
    "thermal_slowdown": ("HwThermalSlowdown", "SwThermalSlowdown"),
    "hardware_slowdown": ("HwSlowdown",),
    "power_brake": ("HwPowerBrakeSlowdown",),
    "clock_setting": ("ApplicationsClocksSetting", "DisplayClockSetting"),
    POWER_CAP: ("SwPowerCap",),
}
"""Metrics of the reasons that limit the clocks of a step, with the names that NVML gives them."""

OTHER_COPIES = "memcpy_other_bytes"
"""Bytes of copies whose direction the trace does not name, e.g. between GPUs. A run without such
copies has no rows of this metric."""

# fmt: off
METRICS = Metrics((
    _hidden("dram_read_bytes", "DRAM\nread", _COUNTED,
            Counters(("dram__bytes_read.sum",), chips=_dram("read")),
            nvprof="dram_read_throughput", logical="logical_read_bytes"),
    _hidden("dram_write_bytes", "DRAM\nwrite", _COUNTED,
            Counters(("dram__bytes_write.sum",), chips=_dram("write")),
            nvprof="dram_write_throughput", logical="logical_write_bytes"),
    Metric("dram_bytes", "DRAM\ntotal", _COUNTED, Sum(("dram_read_bytes", "dram_write_bytes")),
           logical="logical_bytes", shown=_AND_RATIO, expected=(2.0, 5.0), spread=True),
    _hidden("logical_read_bytes", "logical\nread", _LOGICAL),
    _hidden("logical_write_bytes", "logical\nwrite", _LOGICAL),
    Metric("logical_bytes", "logical\ntotal", _LOGICAL,
           Sum(("logical_read_bytes", "logical_write_bytes")), shown=_AND_RATIO),
    Metric("step_time_seconds", "step\nms", _TIMED, Timed(), shown=_AND_RATIO, spread=True),
    Metric("peak_memory_bytes", "peak\nmem.", (*_TIMED, *_LOGICAL), Peak(), throughput=False,
           logical="peak_memory_bytes", shown=_AND_RATIO),
    Metric("gpu_busy_share", "busy", _CUPTI, Share(("gpu_busy_cycles", "gpu_elapsed_cycles")),
           shown=_VALUE, higher_is_better=True),
    # Bytes that SMs request from the L2. Unlike the metrics of nvprof, these reads and writes
    # exclude atomics and reductions.
    _hidden("l2_sm_read_bytes", "L2 read\nby SMs", _COUNTED, _l2("_srcunit_tex_op_read"),
            nvprof="l2_read_throughput"),
    _hidden("l2_sm_write_bytes", "L2 write\nby SMs", _COUNTED, _l2("_srcunit_tex_op_write"),
            nvprof="l2_write_throughput"),
    # Sectors that one half of the L2 requests from the other half.
    _hidden("l2_crossing_bytes", "L2\ncrossing", _COUNTED,
            _l2("_srcunit_ltcfabric", undivided=False), throughput=False),
    # Bytes of all sectors that SMs or copy engines request. In an L2 of two halves, both halves
    # count a sector that one half requests from the other, so these sectors are subtracted once.
    Metric("l2_served_bytes", "L2\nserved", _COUNTED, _l2("", _CROSSINGS), shown=_AND_RATIO,
           expected=(1.5, 3.0), throughput=False, spread=True),
    _hidden("l2_atomic_bytes", "L2\natomic", _COUNTED,
            Counters(("lts__t_sectors_op_atom.sum", "lts__t_sectors_op_red.sum"), SECTOR_BYTES),
            throughput=False),
    # On Hopper, the counter of global loads misses loads by TMA and LDGSTS.
    _hidden("global_load_bytes", "global\nload", _COUNTED, _global("ld"), nvprof="gld_throughput"),
    _hidden("global_store_bytes", "global\nstore", _COUNTED, _global("st"),
            nvprof="gst_throughput"),
    # Bytes that one rank sends to other ranks, if each collective uses a ring algorithm.
    Metric("collective_bytes", "sent by\na rank", _LOGICAL, ranks="mean", shown=_AND_RATIO,
           throughput=False, source="collective_bytes"),
    # The largest tensor that a step creates. The allocator needs one free block of its size.
    _hidden("largest_tensor_bytes", "largest\ntensor", _LOGICAL, Peak(), throughput=False),
    _hidden("flops", "GFLOP", _LOGICAL, giga=True),
    _hidden("samples_per_second", "samples\nper s", _TIMED, Timed(), ranks="sum",
            higher_is_better=True),
    # The SM clock at the end of a step, and 1 for each reason why it is not higher, else 0.
    _hidden(SM_CLOCK, "SM clock\nGHz", _TIMED, Timed(), ranks="mean", giga=True, throughput=False,
            higher_is_better=True),
    *(_hidden(reason, by=_TIMED, how=Peak(), repeats="mean", throughput=False)
      for reason in CLOCK_REASONS),
    # Duration of a range by the GPU's clock, with synchronization at both ends.
    _hidden("range_time_seconds", "range\nms", _CUPTI,
            Counters(("gpu__time_duration.sum",), 1e-9), repeats="median", ranks="max"),
    # Busy shares are the part of a range's cycles in which the GPU, or an SM, ran anything. The
    # other two shares are averages relative to the peak: the peak rate of the tensor pipe, and
    # the number of warps that fit the SMs.
    _cycles("gpu_busy_cycles", "gr__cycles_active.sum"),
    _cycles("gpu_elapsed_cycles", "gr__cycles_elapsed.sum"),
    _hidden("sm_busy_share", "SMs\nbusy", _CUPTI, Share(("sm_busy_cycles", "sm_elapsed_cycles")),
            higher_is_better=True),
    _cycles("sm_busy_cycles", "sm__cycles_active.sum"),
    _cycles("sm_elapsed_cycles", "sm__cycles_elapsed.sum"),
    _hidden("tensor_pipe_share", "tensor\npipe", _CUPTI,
            Share(("tensor_pipe_cycles", "tensor_pipe_peak_cycles")), higher_is_better=True),
    _cycles("tensor_pipe_cycles", _TENSOR),
    _cycles("tensor_pipe_peak_cycles", _TENSOR + _PEAK),
    _hidden("warps_active_share", "warps\nactive", _CUPTI,
            Share(("warp_cycles", "warp_peak_cycles")), higher_is_better=True),
    _cycles("warp_cycles", "sm__warps_active.sum"),
    _cycles("warp_peak_cycles", "sm__warps_active.sum" + _PEAK),
    # Duration of a range while Nsight Systems records.
    _nsys("timeline_seconds", "ms", how=Timed()),
    _nsys("timeline_busy_seconds", "GPU busy\nms", how=Timed()),
    _nsys("timeline_busy_share", "busy", how=Share(("timeline_busy_seconds", "timeline_seconds")),
          higher_is_better=True),
    _nsys("timeline_launches", "launches", repeats="median"),
    # Bytes between a GPU and other GPUs or the host, in cases of several GPUs. CUPTI includes the
    # headers of packets; NVML counts the payload only.
    _link("nvlink_payload_sent_bytes", "payload\nsent", logical="collective_bytes"),
    _link("nvlink_payload_received_bytes", "payload\nreceived"),
    _link("nvlink_received_bytes", "NVLink\nreceived", how=Counters(("nvlrx__bytes.sum",))),
    _link("nvlink_sent_bytes", "NVLink\nsent", how=Counters(("nvltx__bytes.sum",))),
    _link("pcie_read_bytes", "PCIe\nread", how=Counters(("pcie__read_bytes.sum",))),
    _link("pcie_write_bytes", "PCIe\nwrite", how=Counters(("pcie__write_bytes.sum",))),
    # Launches, bytes and time of kernels. Copies, memsets and gaps between kernels are excluded.
    _kernels("kernel_launches", source="launches"),
    _kernels("kernel_dram_read_bytes", source="read_bytes"),
    _kernels("kernel_dram_write_bytes", source="write_bytes"),
    _kernels("kernel_l2_total_bytes", source="l2_bytes"),
    _kernels("kernel_time_seconds", ranks="max", source="seconds"),
    _profiler("cpu_time_seconds", "CPU\nms", ranks="max"),
    _profiler("device_time_seconds", "GPU\nms", ranks="max"),
    # Time of a rank in collectives, including the wait for slower ranks. The exposed part is the
    # time in which the rank runs nothing else.
    _profiler("communication_seconds", "in collec-\ntives ms", ranks="max"),
    _profiler("exposed_communication_seconds", "exposed\nms", ranks="max"),
    _profiler("exposed_communication_share", "exposed",
              how=Share(("exposed_communication_seconds", "communication_seconds"))),
    _profiler("phase_peak_memory_bytes", "peak\nmemory", how=Peak()),
    _profiler("memory_growth_bytes", "memory\ngrowth", how=Peak(), repeats="mean",
              signed=True),
    _profiler("memcpy_device_to_device_bytes", "device\nto device", source="Memcpy DtoD"),
    _profiler("memcpy_host_to_device_bytes", "host\nto device", source="Memcpy HtoD"),
    _profiler("memcpy_device_to_host_bytes", "device\nto host", source="Memcpy DtoH"),
    _profiler(OTHER_COPIES, "other"),
    _profiler("memset_bytes", "memset", source="Memset"),
))
# fmt: on
"""The built-in metrics, and metrics that a project registers."""


def expectations(texts: Iterable[str] = ()) -> dict[str, tuple[float, float]]:
    """Return for each metric the expected range of its ratio to the baseline, if there is a range.

    Args:
        texts: ranges ``RATIO:LOW-HIGH``, which replace default ranges. The text ``none`` removes
            all default ranges.
    """
    texts = list(texts)
    usual = {metric.name: metric.expected for metric in METRICS.values() if metric.expected}
    expected = {} if "none" in texts else usual
    for text in texts:
        if text == "none":
            continue
        number = r"\s*(\d+\.?\d*|\.\d+)\s*"
        match = re.fullmatch(rf"\s*(\w+)\s*:{number}-{number}", text)
        if match is None or float(match[2]) > float(match[3]):
            raise ConfigurationError(
                f"expected range {text!r}: write a range such as dram_ratio:2-5, or none"
            )
        ratio = METRICS.find(match[1])
        if ratio is None or ratio.kind != "ratio":
            raise unknown("ratio", match[1], map(derived_name, METRICS))
        expected[ratio.of] = float(match[2]), float(match[3])
    return expected
