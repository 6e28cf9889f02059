r"""Every metric, once: what it is called, how it is had, and how it is shown and judged.

A new metric is one more `Metric` in `METRICS`, whether dpbench's or a project's own::

    METRICS.register(Metric("l1_total_bytes", "L1\ntotal", ("ncu",), ("l1tex__t_bytes.sum",)))

in a ``conftest.py``, or as an entry point of the group ``dpbench.metrics``, which is a `Metric` or
several in a list. Counters of Nsight Compute by their own names (``lts__t_sectors.sum``) need no
declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Literal

from dpbench.errors import ConfigurationError, unknown

SECTOR_BYTES = 32
"""An L2 sector is 32 bytes (Nsight Compute Profiling Guide, "Memory Chart")."""

RATIO = "_ratio"
"""The end of the name of a metric's ratio to the baseline's."""

Kind = Literal["value", "ratio", "spread", "over_logical", "logical", "throughput"]
"""What a number is: a metric's own value, or what follows from it."""

STANDARD = "÷ std"
"""How a header says that a column is a ratio to standard training."""

DERIVED: Mapping[Kind, str] = {
    "ratio": STANDARD,
    "spread": "spread",
    "over_logical": "÷ logical",
    "logical": "logical",
}
"""What follows from a metric and is one, e.g. ``dram_ratio``; and what heads its column."""


@dataclass(frozen=True)
class Metric:
    """One thing that can be known of a step."""

    name: str  # spelled out, with its kind of unit at the end: one of `UNITS`, else it is a number
    header: str = ""  # of its column, on one or two lines; empty if it is in no table of cases
    by: tuple[str, ...] = ("ncu", "cupti")  # the instruments that have it
    # The hardware counters that add up to it, by the names of ``ncu --query-metrics``, and what
    # their sum is multiplied by; it is counted unless others are asked for.
    counters: tuple[str, ...] = ()
    scale: float = 1
    # Other counters for the chips that a pattern fits; none if such a chip lacks it.
    chips: tuple[tuple[str, tuple[str, ...]], ...] = ()
    less: str = ""  # the one of its counters that is taken off the others, not added
    # nvprof's throughput that, times seconds, is the same ("nvprof Metric Comparison" in the
    # Nsight Compute CLI documentation).
    nvprof: str = ""
    # Where it is not measured itself: the metrics that add up to it, or part and whole.
    sum_of: tuple[str, ...] = ()
    share_of: tuple[str, ...] = ()
    logical: str = ""  # what logical counting says in its place
    shown: tuple[Kind, ...] = ()  # what of it is shown unless columns are chosen
    expected: tuple[float, float] | None = None  # range of the ratio to the baseline
    higher_is_better: bool = False  # a fall is a change for the worse; else a rise is
    adds_up: bool = True  # its phases add up to the step
    middle: bool = False  # a case's value is the median over its steps; else it is the mean
    throughput: bool = True  # it is shown divided by the time of a step, too
    spread: bool = False  # its spread over the steps says how far a row can be trusted
    # Where an instrument finds it: a field of `KernelCount`, or how an activity's name in a trace
    # of the PyTorch profiler begins.
    source: str = ""
    # The metric that is shown in its place where a run has both, e.g. one that counts better.
    replaced_by: str = ""
    # If it is one of those that `derived` makes: the metric from which it follows, and how.
    of: str = ""
    kind: Kind = "value"

    @property
    def unit(self) -> str:
        """``B``, ``s``, ``1/s`` or ``1``."""
        return unit(self.name)

    @property
    def short_header(self) -> str:
        """The header on one line, without what goes without saying."""
        return self.header.replace("\n", " ").removesuffix(" total").removesuffix(" ms")

    def on(self, chip: str) -> tuple[str, ...]:
        """Its counters on a chip, e.g. ``GB202``; none if the chip lacks them.

        A chip without a name, or with one that no pattern fits, has the usual ones.
        """
        fitting = (names for pattern, names in self.chips if fnmatchcase(chip.upper(), pattern))
        return next(fitting, self.counters)

    def derived(self) -> Iterator[Metric]:
        """What follows from it, each a metric of its own."""
        made: list[tuple[str, Kind]] = [
            (f"{self.short_header}\n{header}", kind)
            for kind, header in DERIVED.items()
            if self.logical or kind not in ("over_logical", "logical")
        ]
        if self.unit == "B" and "ncu" in self.by:
            made.append((" ".join(self.header.split()) + "\nGB/s", "throughput"))
        for header, kind in made:
            yield Metric(
                derived_name(self.name, kind),
                header if self.header else "",
                self.by,
                shown=_VALUE if kind in self.shown else (),
                higher_is_better=self.higher_is_better,
                replaced_by=self.replaced_by and derived_name(self.replaced_by, kind),
                of=self.name,
                kind=kind,
            )

    @property
    def formula(self) -> str:
        """How its counters make it, in units of `scale`."""
        signs = (" - " if name == self.less else " + " for name in self.counters)
        return "".join(map("".join, zip(signs, self.counters, strict=True))).removeprefix(" + ")

    @property
    def spellings(self) -> tuple[tuple[str, ...], ...]:
        """Its counters as each kind of chip has them."""
        return tuple(filter(None, (self.counters, *(names for _, names in self.chips))))

    def value(self, counted: Mapping[str, float]) -> float:
        """What it is where its counters have these values."""
        signs = {self.less: -1}
        return self.scale * sum(signs.get(name, 1) * counted[name] for name in self.counters)


UNITS = {"_bytes": "B", "_seconds": "s", "_per_second": "1/s", "_joules": "J", "_watts": "W"}
"""Units by the end of a metric's name."""


def unit(metric: str) -> str:
    """The unit that a metric's name says; a number has "1"."""
    return next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "1")


def derived_name(metric: str, kind: Kind = "ratio") -> str:
    """The name of what follows from a metric, which has none of its unit, e.g. ``dram_ratio``."""
    if kind == "throughput":
        return metric.replace("_bytes", "_throughput")
    without_unit = re.sub(r"(_total)?_(bytes|seconds|joules|watts)$|_per_second$", "", metric)
    return f"{without_unit}_{kind}"


class Metrics(Mapping[str, Metric]):
    """Metrics by name, in the order in which tables show them; entry points are read on use."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._known = {metric.name: metric for metric in metrics}
        self._every: dict[str, Metric] = {}
        self._complete = False

    def register(self, *metrics: Metric) -> None:
        """Add metrics; each name means one thing."""
        self._every = {}
        for metric in metrics:
            if self._known.setdefault(metric.name, metric) != metric:
                raise ConfigurationError(f"metric {metric.name!r} exists; choose another name")

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

    def had_by(self, instrument: str) -> list[Metric]:
        """Those of an instrument."""
        return [metric for metric in self.values() if instrument in metric.by]

    def counted(self, instrument: str) -> list[Metric]:
        """The metrics that an instrument has as sums of hardware counters."""
        return [metric for metric in self.had_by(instrument) if metric.spellings]

    def every(self) -> dict[str, Metric]:
        """These and what follows from them, by name, and the largest spread of a case."""
        if not self._every:
            every = (each for metric in self.values() for each in (metric, *metric.derived()))
            self._every = {each.name: each for each in (*every, LARGEST_SPREAD)}
        return self._every

    def find(self, name: str) -> Metric | None:
        """What a person's name means: one of `every`, or a hardware counter by its own name.

        ``l2_bytes`` is ``l2_total_bytes``, ``dram_bytes_ratio`` the same as ``dram_ratio``, and
        nvprof's ``gld_throughput`` is ``global_load_throughput``.
        """
        every, own = self.every(), name.removesuffix(RATIO)
        nvprof = [derived_name(m.name, "throughput") for m in self.values() if m.nvprof == name]
        spellings = [*nvprof, name, re.sub("_bytes$", "_total_bytes", name)]
        spellings += [derived_name(own)] if own != name else []
        for spelling in spellings:
            if spelling in every:
                return every[spelling]
        counter = Metric(own, own)
        known = (each for each in (counter, *counter.derived()) if each.name == name)
        return next(known, None) if "__" in name else None


LARGEST_SPREAD = Metric("spread", "largest\nspread", kind="spread")
"""The largest of the spreads that say how far a row can be trusted."""


def _dram(operation: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("GB20[0-9]", (f"dram__bytes_op_{operation}.sum",)), ("G[AB]?0B", ()))


def _sectors(*operations: str) -> tuple[str, ...]:
    return tuple(f"lts__t_sectors_op_{operation}.sum" for operation in operations)


_DIVIDED = ("GA100", "GH100", "GB1[01][02]")
"""Chips that count what crosses between the two halves of their L2."""

_UNDIVIDED = ("GV1*", "TU1*", "GA10[!0]", "AD1*", "GB20*", "GB10B")
"""Chips that do not. Of one that fits neither nobody has looked which counters it has."""

_CROSSINGS = "lts__t_sectors_srcunit_ltcfabric.sum"


def _l2(
    counter: str, *crossings: str, undivided: bool = True
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A counter of the L2, with that of crossings on chips that have it."""
    named = f"lts__t_sectors{counter}.sum"
    others = ((chip, (named,) if undivided else ()) for chip in _UNDIVIDED)
    return (*((chip, (named, *crossings)) for chip in _DIVIDED), *others)


_COUNTED, _LOGICAL, _TIMED = ("ncu", "cupti"), ("logical",), ("timing", "cupti")
_CUPTI = ("cupti",)  # under ncu the CPU does not run ahead of the GPU: no time, no busy share
_TENSOR, _PEAK = "sm__pipe_tensor_cycles_active.sum", ".peak_sustained_elapsed"
_KERNELS, _PROFILER, _NSYS = ("ncu_kernels",), ("torch_profiler",), ("nsys",)
_VALUE: tuple[Kind, ...] = ("value",)
_AND_RATIO: tuple[Kind, ...] = ("value", "ratio")

OTHER_COPIES = "memcpy_other_bytes"
"""Copies in no direction that a trace names, between two GPUs, say; rows only if there are any."""

# fmt: off
METRICS = Metrics((
    Metric("dram_read_bytes", "DRAM\nread", _COUNTED, ("dram__bytes_read.sum",),
           chips=_dram("read"), nvprof="dram_read_throughput", logical="logical_read_bytes",
           shown=_VALUE),
    Metric("dram_write_bytes", "DRAM\nwrite", _COUNTED, ("dram__bytes_write.sum",),
           chips=_dram("write"), nvprof="dram_write_throughput", logical="logical_write_bytes",
           shown=_VALUE),
    Metric("dram_bytes", "DRAM\ntotal", _COUNTED, sum_of=("dram_read_bytes", "dram_write_bytes"),
           logical="logical_bytes", shown=_AND_RATIO, expected=(2.0, 5.0), spread=True),
    # What SMs ask the L2 for. Atomics and reductions are left out of reads and writes; nvprof
    # counted them in both.
    Metric("l2_sm_read_bytes", "L2 read\nby SMs", _COUNTED, (), SECTOR_BYTES,
           _l2("_srcunit_tex_op_read"), nvprof="l2_read_throughput"),
    Metric("l2_sm_write_bytes", "L2 write\nby SMs", _COUNTED, (), SECTOR_BYTES,
           _l2("_srcunit_tex_op_write"), nvprof="l2_write_throughput"),
    # A sector whose home is the other half of the L2 is asked for there, and counted in both.
    Metric("l2_crossing_bytes", "L2\ncrossing", _COUNTED, (), SECTOR_BYTES,
           _l2("_srcunit_ltcfabric", undivided=False), throughput=False),
    # All sectors, whoever asked, SMs or copy engines; without crossings where they are counted.
    Metric("l2_served_bytes", "L2\nserved", _COUNTED, (), SECTOR_BYTES, _l2("", _CROSSINGS),
           less=_CROSSINGS, shown=_AND_RATIO, expected=(1.5, 3.0), throughput=False, spread=True),
    # These count crossings twice, and stay for what was measured before the ones above were.
    Metric("l2_read_bytes", "old L2\nread", _COUNTED, _sectors("read"), SECTOR_BYTES,
           replaced_by="l2_sm_read_bytes"),
    Metric("l2_write_bytes", "old L2\nwrite", _COUNTED, _sectors("write"), SECTOR_BYTES,
           replaced_by="l2_sm_write_bytes"),
    Metric("l2_atomic_bytes", "L2\natomic", _COUNTED, _sectors("atom", "red"), SECTOR_BYTES,
           throughput=False),
    Metric("l2_total_bytes", "old L2\ntotal", _COUNTED, ("lts__t_bytes.sum",), shown=_AND_RATIO,
           expected=(1.5, 3.0), throughput=False, spread=True, replaced_by="l2_served_bytes"),
    # Misses loads by TMA and LDGSTS on Hopper.
    Metric("global_load_bytes", "global\nload", _COUNTED,
           ("l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",), nvprof="gld_throughput"),
    Metric("global_store_bytes", "global\nstore", _COUNTED,
           ("l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",), nvprof="gst_throughput"),
    Metric("logical_read_bytes", "logical\nread", _LOGICAL, shown=_VALUE),
    Metric("logical_write_bytes", "logical\nwrite", _LOGICAL, shown=_VALUE),
    Metric("logical_bytes", "logical\ntotal", _LOGICAL, shown=_AND_RATIO,
           sum_of=("logical_read_bytes", "logical_write_bytes")),
    Metric("peak_memory_bytes", "peak\nmem.", (*_TIMED, *_LOGICAL), logical="peak_memory_bytes",
           shown=_VALUE, adds_up=False),
    Metric("flops", "GFLOP", _LOGICAL),
    Metric("step_time_seconds", "step\nms", _TIMED, shown=_VALUE, middle=True, spread=True),
    Metric("gpu_busy_share", "busy", _CUPTI, share_of=("gpu_busy_cycles", "gpu_elapsed_cycles"),
           shown=_VALUE, higher_is_better=True, adds_up=False, middle=True),
    Metric("samples_per_second", "samples\nper s", _TIMED, higher_is_better=True, middle=True),
    # How long a range took by the GPU's clock, synchronized at its borders.
    Metric("range_time_seconds", "range\nms", _CUPTI, ("gpu__time_duration.sum",), 1e-9,
           middle=True),
    # Of the range's time, when anything ran; of all SMs' time, when an SM had a warp; of what
    # tensor cores, and the slots for warps, could do in that time, what they did.
    Metric("gpu_busy_cycles", by=_CUPTI, counters=("gr__cycles_active.sum",)),
    Metric("gpu_elapsed_cycles", by=_CUPTI, counters=("gr__cycles_elapsed.sum",)),
    Metric("sm_busy_share", "SMs\nbusy", _CUPTI, share_of=("sm_busy_cycles", "sm_elapsed_cycles"),
           higher_is_better=True, adds_up=False, middle=True),
    Metric("sm_busy_cycles", by=_CUPTI, counters=("sm__cycles_active.sum",)),
    Metric("sm_elapsed_cycles", by=_CUPTI, counters=("sm__cycles_elapsed.sum",)),
    Metric("tensor_pipe_share", "tensor\npipe", _CUPTI, higher_is_better=True, adds_up=False,
           share_of=("tensor_pipe_cycles", "tensor_pipe_peak_cycles"), middle=True),
    Metric("tensor_pipe_cycles", by=_CUPTI, counters=(_TENSOR,)),
    Metric("tensor_pipe_peak_cycles", by=_CUPTI, counters=(_TENSOR + _PEAK,)),
    Metric("warps_active_share", "warps\nactive", _CUPTI, higher_is_better=True, adds_up=False,
           share_of=("warp_cycles", "warp_peak_cycles"), middle=True),
    Metric("warp_cycles", by=_CUPTI, counters=("sm__warps_active.sum",)),
    Metric("warp_peak_cycles", by=_CUPTI, counters=("sm__warps_active.sum" + _PEAK,)),
    # By Nsight Systems, between the first and last moment of a range, under its recording.
    Metric("timeline_seconds", "ms", _NSYS, middle=True),
    Metric("timeline_busy_seconds", "GPU busy\nms", _NSYS, middle=True),
    Metric("timeline_busy_share", "busy", _NSYS, higher_is_better=True, adds_up=False, middle=True,
           share_of=("timeline_busy_seconds", "timeline_seconds")),
    Metric("timeline_launches", "launches", _NSYS, middle=True),
    # What a GPU exchanges with others and with the host; counted where there are others.
    Metric("nvlink_received_bytes", "NVLink\nreceived", _CUPTI, ("nvlrx__bytes.sum",)),
    Metric("nvlink_sent_bytes", "NVLink\nsent", _CUPTI, ("nvltx__bytes.sum",)),
    Metric("pcie_read_bytes", "PCIe\nread", _CUPTI, ("pcie__read_bytes.sum",)),
    Metric("pcie_write_bytes", "PCIe\nwrite", _CUPTI, ("pcie__write_bytes.sum",)),
    # Of kernels alone, under the profiler: without copies, memsets and the gaps between them.
    Metric("kernel_launches", by=_KERNELS, source="launches"),
    Metric("kernel_dram_read_bytes", by=_KERNELS, source="read_bytes"),
    Metric("kernel_dram_write_bytes", by=_KERNELS, source="write_bytes"),
    Metric("kernel_l2_total_bytes", by=_KERNELS, source="l2_bytes"),
    Metric("kernel_time_seconds", by=_KERNELS, source="seconds"),
    Metric("cpu_time_seconds", "CPU\nms", _PROFILER),
    Metric("device_time_seconds", "GPU\nms", _PROFILER),
    Metric("phase_peak_memory_bytes", "peak\nmemory", _PROFILER, adds_up=False),
    Metric("memory_growth_bytes", "memory\ngrowth", _PROFILER, adds_up=False),
    Metric("memcpy_device_to_device_bytes", "device\nto device", _PROFILER, source="Memcpy DtoD"),
    Metric("memcpy_host_to_device_bytes", "host\nto device", _PROFILER, source="Memcpy HtoD"),
    Metric("memcpy_device_to_host_bytes", "device\nto host", _PROFILER, source="Memcpy DtoH"),
    Metric(OTHER_COPIES, "other", _PROFILER),
    Metric("memset_bytes", "memset", _PROFILER, source="Memset"),
))
# fmt: on
"""What can be in a run besides counters by their own names, which have ``__`` in them."""


def expectations(texts: Iterable[str] = ()) -> dict[str, tuple[float, float]]:
    """Expected ranges of ratios by metric: the usual ones, and what ``RATIO:LOW-HIGH`` sets.

    ``none`` drops the usual ones.
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
            raise ConfigurationError(f"expectation {text!r}: write dram_ratio:2-5, or none")
        ratio = METRICS.find(match[1])
        if ratio is None or ratio.kind != "ratio":
            raise unknown("ratio", match[1], map(derived_name, METRICS))
        expected[ratio.of] = float(match[2]), float(match[3])
    return expected
