"""The roofline: which roof of a card, bandwidth or arithmetic, bounds each phase of a step.

A phase that does F operations and moves M bytes takes at least ``max(F / peak, M / bandwidth)``
seconds; F / M, its arithmetic intensity, decides which of the two applies (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009).

Operations are counted, not measured: those of matrix products and attention, by PyTorch's own
counter. Bytes are DRAM bytes where they were measured, logical bytes elsewhere; no table mixes
them.

The roofs of a card come from NVIDIA's documents, or were measured (``cards.toml`` has both).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.core.case import PRODUCTS
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.files import read_file
from dpbench.core.metrics import METRICS
from dpbench.results.rows import OF_CASE, PLACE, STEP

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Roofs:
    """The highest rates that a card can reach."""

    name: str  # for people
    devices: tuple[str, ...]  # its names in measured rows, as NVML and CUDA give them
    bandwidth: float  # of its memory, read and written together, B/s
    flops: Mapping[str, float]  # dense FLOP/s by precision; a multiply-add counts as two
    source: str  # what the figures are, e.g. NVIDIA H200 Tensor Core GPU data sheet
    memory: float | None = None  # bytes, if the document says so

    @classmethod
    def of(
        cls, devices: Iterable[str], bandwidth: float, flops: Mapping[str, float], source: str
    ) -> Roofs:
        """The roofs of devices; under autocast, those for 16-bit products."""
        names = tuple(devices)
        known = {name: float(flops[name]) for name in PRODUCTS}
        known |= {f"{name}-amp": float(flops[name]) for name in ("bf16", "fp16") if name in flops}
        return cls(names[0], names, float(bandwidth), known, source)

    def ridge(self, precision: str) -> float:
        """FLOP per byte above which arithmetic, not bandwidth, bounds the card."""
        return self.flops[precision] / self.bandwidth


def _read_cards() -> Iterator[tuple[str, Roofs]]:
    for key, sheet in _CARDS_TOML["cards"].items():
        sparse = {name: peak / 2 for name, peak in sheet.get("tflops_with_sparsity", {}).items()}
        flops = {name: peak * 1e12 for name, peak in {**sheet["tflops"], **sparse}.items()}
        flops.setdefault("fp16", flops["bf16"])  # most data sheets print one figure for both
        source = _CARDS_TOML["sources"][sheet["source"]]["title"]
        roofs = Roofs.of(sheet["devices"], sheet["bandwidth"] * 1e9, flops, source)
        yield key, replace(roofs, memory=sheet["memory"] * 1e9 if "memory" in sheet else None)


_CARDS_TOML = tomllib.loads(
    (resources.files("dpbench.results") / "cards.toml").read_text(encoding="utf-8")
)

CARDS = dict(_read_cards())
"""A card's peaks by short name; no program exceeds them, and few reach them."""


def known_roofs(name: str) -> Roofs | None:
    """The card with a short name (``h200``) or one of the driver's (``NVIDIA H200``), if known."""
    named = (c for key, c in CARDS.items() if _plain(name) in map(_plain, (key, *c.devices)))
    return next(named, None)


def find_card(name: str) -> Roofs:
    """The card with this name; an error if dpbench has no data sheet for it."""
    if card := known_roofs(name):
        return card
    raise unknown("card", name, CARDS, "or a FILE of measured roofs")


def _plain(name: str) -> str:
    """Letters and digits in lower case, without the maker's name."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def _ceilings(found: Mapping[str, Any]) -> Roofs:
    source = f"measured, torch {found['torch']}"
    return Roofs.of([found["device"]], found["bandwidth"], found["flops"], source)


def find_ceilings(device: str) -> Roofs:
    """The measured roofs of a device; an error if dpbench holds no such figures."""
    for found in map(_ceilings, _CARDS_TOML["ceilings"]):
        if device in found.devices:
            return found
    raise ConfigurationError(
        f"there are no measured ceilings of {device or 'this device'}: "
        f"name a FILE that has them, --time FILE"
    )


def reachable(card: Roofs) -> Roofs:
    """What large copies and products reach on a card: as much of its data sheet as on an H200.

    Measured on an H200: 0.89 of the bandwidth, and 0.76, 0.72 and 0.68 of fp32, tf32 and bf16.
    """
    own, reached = CARDS["h200"], _ceilings(_CARDS_TOML["ceilings"][0])
    shares = {
        name: reached.flops.get(name, reached.flops["bf16"]) / own.flops[name] for name in own.flops
    }
    return replace(
        card,
        bandwidth=card.bandwidth * reached.bandwidth / own.bandwidth,
        flops={name: peak * shares[name] for name, peak in card.flops.items()},
    )


def read_ceilings(path: Path) -> Roofs:
    """The roofs that were measured on one device, as ``bench/ceilings.py`` prints them."""
    try:
        return _ceilings(json.loads(read_file(path))["ceilings"])
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no file of measured ceilings ({error})") from error


# --- phases under the roofs ------------------------------------------------------------------

MEASURED_BYTES = "measured DRAM bytes"
COUNTED_BYTES = "logical bytes"
"""Where the bytes of a row come from: the column ``bytes_are``."""

BUSY = "gpu_busy_share"

LAUNCH_BOUND = 0.7
"""A phase whose GPU is busy for less than this part of its time is launch-bound."""


def intensities(summary: pd.DataFrame) -> pd.DataFrame:
    """What `phases` returns, for cases whose operations were all counted; else an error."""
    known = summary[summary.precision != ""]
    if known.empty and not summary.empty:
        raise ConfigurationError("the precision of a script is unknown: no roofline")
    table = phases(known)
    missing = table[table.flops.isna()].sort_values(
        "phase", key=lambda phase: phase != STEP, kind="stable"
    )
    for row in missing.head(1).to_dict("records"):
        raise ConfigurationError(  # never zero
            f"no operations were counted for {row['case'].id}, phase {row['phase']}: "
            f"count the same case with the logical instrument"
        )
    return table


def phases(summary: pd.DataFrame) -> pd.DataFrame:
    """Operations, bytes and time of each phase and of the step, as far as they are known.

    Operations are counted without hardware, DRAM bytes are those of `of_one_instrument`. Times come
    from the instrument with busy shares, which refer to these times, if it timed the case.

    Returns:
        One row per case, device and phase: the case and its fields, ``device``, ``phase``,
        ``flops``, ``bytes``, ``bytes_are``, ``intensity`` (FLOP/B), ``seconds`` and ``busy``, the
        share of time in which the GPU did anything (NaN where not measured).
    """
    import pandas as pd

    from dpbench.results.summary import of_one_instrument, own_values, with_axes

    case = [column for column in OF_CASE if column != "device"]
    every = own_values(summary)
    preferred = of_one_instrument(every)
    timed = every[every.metric.isin(["step_time_seconds", BUSY])]
    timed = of_one_instrument(timed, METRICS[BUSY].by)

    def of(metric: str, column: str, rows: pd.DataFrame = preferred) -> pd.DataFrame:
        return rows.loc[rows.metric == metric, [*PLACE, "value"]].rename(columns={"value": column})

    flops = of("flops", "flops").drop(columns="device")
    dram = of("dram_bytes", "bytes").assign(bytes_are=MEASURED_BYTES)
    seconds, busy = of("step_time_seconds", "seconds", timed), of(BUSY, "busy", timed)
    on_hardware = pd.concat([dram, seconds])[OF_CASE].drop_duplicates()
    logical = of("logical_bytes", "bytes")
    not_counted = on_hardware[~on_hardware.case.isin(logical.case)].assign(phase=STEP)
    logical = logical.merge(on_hardware, "left", case, suffixes=("_counted", ""))
    logical["device"] = logical.device.fillna(logical.pop("device_counted"))
    logical = pd.concat([logical, not_counted]).assign(bytes_are=COUNTED_BYTES)
    both = pd.concat([dram, logical], ignore_index=True)
    first = both.groupby(OF_CASE, sort=False).bytes_are.transform("first")
    table = both[both.bytes_are == first].merge(flops, "left", [*case, "phase"])
    table = table.merge(seconds, "left", PLACE).merge(busy, "left", PLACE)
    return with_axes(table.assign(intensity=table.flops / table.bytes.where(table.bytes > 0)))


def under(table: pd.DataFrame, roofs: Roofs) -> pd.DataFrame:
    """What `intensities` returned, under the roofs of one card.

    Returns:
        The table with ``arithmetic_seconds`` and ``bytes_seconds``, the least times by either
        roof; ``bound`` (a roof, or launch-bound and how busy the GPU was); ``least_seconds``, the
        longer of the two; ``share`` (``least_seconds / seconds``); and what was achieved,
        ``flops_per_second``. NaN where operations, bytes or a roof at this precision are unknown.
        The least time of a step is the sum over its phases, because they run one after the other.
    """
    measured = table[(table.bytes_are == MEASURED_BYTES) | table.seconds.notna()]
    if others := sorted({*measured.device} - {*roofs.devices}):
        raise ConfigurationError(
            f"these rows were measured on {', '.join(others)}, not on {roofs.name}: bytes and "
            f"times of one card say nothing under the roofs of another"
        )
    arithmetic = table.flops / table.precision.map(roofs.flops).astype(float)
    arithmetic = arithmetic.mask(table.flops == 0, 0.0)
    bandwidth = table.bytes / roofs.bandwidth
    longer = arithmetic.mask(arithmetic < bandwidth, bandwidth).where(bandwidth.notna())
    roof = (arithmetic > bandwidth).map({True: "arithmetic", False: "bandwidth"})
    waits = table.busy.map("launch-bound ({:.0%})".format)
    of_step = table.phase == STEP
    by_step = [table[key] for key in (*OF_CASE, "bytes_are")]
    unknown = (longer.isna() & ~of_step).groupby(by_step, sort=False).transform("any")
    total = longer.mask(of_step).groupby(by_step, sort=False).transform("sum", min_count=1)
    least = longer.mask(of_step, total.fillna(longer).mask(unknown))
    return table.assign(
        arithmetic_seconds=arithmetic,
        bytes_seconds=bandwidth,
        bound=roof.where(longer.notna()).mask(table.busy < LAUNCH_BOUND, waits),
        least_seconds=least,
        share=least / table.seconds,
        flops_per_second=table.flops / table.seconds,
    )
