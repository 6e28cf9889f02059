"""Finds the chip of a GPU, the counters of a chip, and how many passes the counters need.

In this module, only `chip_of` needs a GPU.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_uint8
from functools import cached_property
from typing import Any

from dpbench.core.errors import unknown
from dpbench.core.metrics import METRICS, Metric
from dpbench.instruments.counters import (
    ALWAYS,
    CountersBusy,
    CounterUnknown,
    available,
    counters,
    resolve,
)
from dpbench.instruments.cupti.library import COUNTER, CountersDoNotCombine, Library

Image = ctypes.Array[c_uint8]
"""A buffer that only CUPTI can interpret."""

LINK_PREFIXES = ("nvlrx__", "nvltx__", "pcie__")
"""Prefixes of the names of link counters.

Link counters count data on NVLink or PCIe. On a GPU without such a link, the counters of
the link have no value.
"""

BUSY_SECONDS = 10.0
"""Seconds for which dpbench tries again while another process uses the counters.

A process under Nsight Compute releases dpbench's lock of the GPU shortly before Nsight Compute
releases the counters.
"""


def image_fields(name: str, image: Image) -> dict[str, Any]:
    """Return the fields with which a C structure passes an image.

    For the image ``ConfigImage``, the field ``pConfigImage`` is the address, and the field
    ``configImageSize`` is the number of bytes.
    """
    return {f"p{name}": ctypes.addressof(image), f"{name[0].lower()}{name[1:]}Size": len(image)}


def known_chips(library: Library) -> list[str]:
    """Return the names of the chips that a CUPTI library supports."""
    answer = library.call("Profiler_Host_GetSupportedChips")
    return [answer.ppChipNames[i].decode() for i in range(answer.numChips)]


class Chip:
    """A GPU chip such as ``GH100``, and the counters that a CUPTI library knows for the chip.

    Args:
        library: the loaded libcupti.
        name: name of the chip.
        availability: the image of the counters that this machine's GPU permits. If None, all
            counters of the chip are permitted.
    """

    def __init__(self, library: Library, name: str, availability: Image | None = None) -> None:
        if availability is None and name not in (chips := known_chips(library)):
            raise unknown("chip", name, chips)
        self.library = library
        self.name = name
        self._availability = availability

    @contextmanager
    def host(self, counters: Iterable[str] = ()) -> Iterator[int]:
        """Create CUPTI's host object for these counters, and free it at the end of the block.

        The image of the permitted counters is ignored for link counters. In a virtual machine it
        may lack NVLink's counters, although the counters can be read.
        """
        linked = any(counter.startswith(LINK_PREFIXES) for counter in counters)
        image = None if linked else self._availability
        answer = self.library.call(
            "Profiler_Host_Initialize",
            pChipName=self.name.encode(),
            pCounterAvailabilityImage=None if image is None else ctypes.addressof(image),
        )
        try:
            yield answer.pHostObject
        finally:
            self.library.call("Profiler_Host_Deinitialize", pHostObject=answer.pHostObject)

    @cached_property
    def counters(self) -> frozenset[str]:
        """Names of all counters of this chip, without the suffix ``.sum``."""
        with self.host() as host:
            answer = self.library.call(
                "Profiler_Host_GetBaseMetrics", pHostObject=host, metricType=COUNTER
            )
            return frozenset(answer.ppMetricNames[i].decode() for i in range(answer.numMetrics))

    def has(self, counters: Iterable[str]) -> bool:
        """Return True if the chip has all of these counters."""
        return all(counter.partition(".")[0] in self.counters for counter in counters)

    def reads(self, counters: Iterable[str]) -> bool:
        """Return True if this machine permits reading all of these counters."""
        try:
            return self.passes(counters) > 0
        except CounterUnknown:
            return False

    def passes(self, counters: Iterable[str]) -> int:
        """Return how many times the work must run to read all of these counters."""
        with closing(Configuration(self, counters)) as configuration:
            return configuration.passes

    def spread(self, counters: Iterable[str], common: Sequence[str]) -> list[list[str]]:
        """Divide counters into groups that each need one pass.

        A group also contains the counters in ``common`` if they fit in the same pass. If several
        groups are needed, link counters form separate groups at the end. Link counters seldom fit
        in one pass with other counters, and each attempt takes milliseconds.
        """
        counters = list(counters)
        if self._fit_one_pass(counters):
            return [counters]
        links = [counter for counter in counters if counter.startswith(LINK_PREFIXES)]
        if others := [counter for counter in counters if links and counter not in links]:
            return [*self.spread(others, common), *self.spread(links, common)]
        groups: list[list[str]] = []
        for counter in (counter for counter in counters if counter not in common):
            starts = [*groups, common, []]
            fitting = (i for i, start in enumerate(starts) if self._fit_one_pass([*start, counter]))
            place = next(fitting, None)
            if place is None:
                raise CounterUnknown(f"the counter {counter} needs several passes on {self.name}")
            groups[place : place + 1] = [[*starts[place], counter]]
        return groups

    def _fit_one_pass(self, counters: Iterable[str]) -> bool:
        try:
            return self.passes(counters) == 1
        except CountersDoNotCombine:
            return False


class Configuration:
    """A set of counters that are read together.

    Attributes:
        names: C array of the counters' names.
        image: the configuration image for CUPTI's profiler.
        passes: how many times the work must run to read all counters.
    """

    def __init__(self, chip: Chip, counters: Iterable[str]) -> None:
        self._counters = list(counters)
        if lacking := [counter for counter in self._counters if not chip.has([counter])]:
            raise CounterUnknown(f"{', '.join(lacking)} does not exist on {chip.name}")
        encoded = [counter.encode() for counter in self._counters]
        self.names = (ctypes.c_char_p * len(encoded))(*encoded)
        self._chip = chip
        with ExitStack() as opened:
            self._host = opened.enter_context(chip.host(self._counters))
            self.image = self._choose(chip.library, self._host)
            image = image_fields("ConfigImage", self.image)
            answer = chip.library.call("Profiler_Host_GetNumOfPasses", **image)
            self.passes = int(answer.numOfPasses)
            self._opened = opened.pop_all()

    @property
    def _named(self) -> dict[str, int]:
        return {"ppMetricNames": ctypes.addressof(self.names), "numMetrics": len(self.names)}

    def _choose(self, library: Library, host: int) -> Image:
        try:
            library.call("Profiler_Host_ConfigAddMetrics", pHostObject=host, **self._named)
        except (CounterUnknown, CountersDoNotCombine) as error:
            named = self._counters
            if isinstance(error, CounterUnknown) and len(named) > 1:
                named = [c for c in named if not self._chip.reads([c])] or named
            raise type(error)(f"{', '.join(named)} on {self._chip.name}: {error.args[0]}") from None
        size = library.call("Profiler_Host_GetConfigImageSize", pHostObject=host).configImageSize
        image: Image = (c_uint8 * size)()
        fields = image_fields("ConfigImage", image)
        library.call("Profiler_Host_GetConfigImage", pHostObject=host, **fields)
        return image

    def evaluate(self, counter_data: Image, index: int) -> dict[str, float]:
        """Return the values of the counters in one range of decoded counter data.

        Link counters without a value are left out.
        """
        values = (ctypes.c_double * len(self.names))(*[math.nan] * len(self.names))
        fields = image_fields("CounterDataImage", counter_data) | self._named
        fields |= {"pHostObject": self._host, "rangeIndex": index, "pMetricValues": values}
        self._chip.library.call("Profiler_Host_EvaluateToGpuValues", **fields)
        counted = dict(zip(self._counters, values, strict=True))
        silent = [counter for counter, value in counted.items() if not math.isfinite(value)]
        if lost := [counter for counter in silent if not counter.startswith(LINK_PREFIXES)]:
            raise CounterUnknown(f"CUPTI read no value for {', '.join(lost)} on {self._chip.name}")
        return {counter: value for counter, value in counted.items() if counter not in silent}

    def close(self) -> None:
        """Free CUPTI's host object."""
        self._opened.close()


# --- counting on a GPU ---------------------------------------------------------------------------


def chip_of(library: Library, index: int, context: int) -> Chip:
    """Return the chip of a GPU, with the counters that the GPU permits.

    While another process uses the counters, this retries for `BUSY_SECONDS`.

    Args:
        library: the loaded libcupti.
        index: CUDA index of the GPU.
        context: handle of a CUDA context on the GPU.
    """
    library.initialize()
    name = library.call("Device_GetChipName", deviceIndex=index).pChipName.decode()
    patient_until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return Chip(library, name, _availability(library, context))
        except CountersBusy:
            if time.monotonic() > patient_until:
                raise
            time.sleep(0.1)


def _availability(library: Library, context: int) -> Image:
    asked = library.call("Profiler_GetCounterAvailability", ctx=context)
    image: Image = (c_uint8 * asked.counterAvailabilityImageSize)()
    fields = image_fields("CounterAvailabilityImage", image)
    library.call("Profiler_GetCounterAvailability", ctx=context, **fields)
    return image


# --- metrics that are counted by default ---------------------------------------------------------

_OWN = [metric for metric in METRICS.counted("cupti") if metric.by == ("cupti",)]

LINKS = tuple(metric.name for metric in _OWN if metric.counters[0].startswith(LINK_PREFIXES))
"""Metrics of NVLink and PCIe.

Metrics of links need a separate pass. By default, these metrics are counted only if the
process sees
several GPUs.
"""

BASIC = (*ALWAYS, *(metric.name for metric in _OWN if metric.name not in LINKS))
"""Metrics for DRAM bytes, time and busy shares.

The built-in metrics of this set fit in one pass on five tested chips, from GA100 to GB202.
"""


def chosen(chip: Chip, names: Iterable[str] | None = None, *, peers: bool = False) -> list[Metric]:
    """Return the metrics to count, which are `BASIC` and the metrics in ``names``.

    Args:
        chip: chip of the GPU.
        names: names of dpbench's metrics, nvprof's metrics or counters. If None, all metrics of
            the chip are returned.
        peers: whether the process sees several GPUs. If False and ``names`` is None, `LINKS` are
            left out.
    """
    ours = available(chip.has, "cupti", chip.name)
    if names is None:
        return [metric for metric in ours.values() if peers or metric.name not in LINKS]
    parts = [part for name in names for part in _parts(name)]
    return resolve([*(name for name in BASIC if name in ours), *parts], chip.name, ours)


def describe(library: Library, name: str) -> str:
    """Return a text with a chip's metrics, their counters and the steps that count them."""
    chip = Chip(library, name)
    metrics = chosen(chip, peers=True)
    common = counters(metric for metric in metrics if metric.name in ALWAYS)
    groups = chip.spread(counters(metrics), common)
    version = "{}.{}".format(*library.cuda_version)
    alone = len(chip.spread(counters(chosen(chip)), common))
    more = f", and {len(groups) - alone} more with several GPUs" if len(groups) > alone else ""
    lines = [f"{name}, libcupti {version}: {alone} step(s) count all metrics by phase{more}"]
    for metric in metrics:
        places = [i for i, group in enumerate(groups, 1) if {*metric.counters} & {*group}]
        step = ", ".join(map(str, places))
        lines.append(f"  {metric.name:<24}step {step:<6}{metric.formula}")
    return "\n".join(lines)


def _parts(name: str) -> tuple[str, ...]:
    metric = METRICS.get(name)
    return (metric and metric.parts) or (name,)
