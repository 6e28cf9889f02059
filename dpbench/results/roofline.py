"""The roofline, which tells whether bandwidth or arithmetic bounds each phase of a step.

A phase with F floating-point operations and M bytes takes at least F / peak seconds for its
operations and M / bandwidth seconds for its bytes. The arithmetic intensity F / M of the phase
decides which of these two bounds is larger (Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model", CACM 52(4), 2009).

Only the operations of products are counted, see `dpbench.instruments.logical.costs`. Products are,
for example, matrix products, convolutions and attention. The bytes of a case are its DRAM bytes if
DRAM bytes were measured, and its logical bytes otherwise. No printed table mixes the two kinds of
bytes.

The roofs of a card are the highest rates of its memory (bandwidth) and of its arithmetic (peak).
``cards.toml`` has roofs from NVIDIA's documents, and for some cards also measured roofs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.core.case import AXES, BASELINE_TRAINER, PRECISIONS
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS
from dpbench.results.rows import OF_CASE, PLACE, STEP
from dpbench.results.summary import of_one_instrument, own_values, with_axes


@dataclass(frozen=True)
class Roofs:
    """The roofs of a card: the highest rates of its memory and of its arithmetic."""

    name: str  # the card's name in titles
    devices: tuple[str, ...]  # the card's names in measured rows, from NVML and CUDA
    bandwidth: float  # bytes read from and written to memory per second
    flops: Mapping[str, float]  # dense FLOP/s by precision; a multiply-add counts as two
    source: str  # the origin of the figures, e.g. NVIDIA H200 Tensor Core GPU data sheet
    memory: float | None = None  # size of the memory in bytes, if known

    @classmethod
    def of(
        cls, devices: Iterable[str], bandwidth: float, flops: Mapping[str, float], source: str
    ) -> Roofs:
        """Make the roofs that several devices share.

        The precision ``bf16-amp`` (autocast) gets the FLOP/s of bf16.
        """
        names = tuple(devices)
        known = {name: float(flops[name.removesuffix("-amp")]) for name in PRECISIONS}
        return cls(names[0], names, float(bandwidth), known, source)

    def ridge(self, precision: str) -> float:
        """Return the arithmetic intensity (FLOP/B) above which arithmetic is the larger bound."""
        return self.flops[precision] / self.bandwidth


def _read_cards() -> Iterator[tuple[str, Roofs]]:
    for key, sheet in _CARDS_TOML["cards"].items():
        sparse = {name: peak / 2 for name, peak in sheet.get("tflops_with_sparsity", {}).items()}
        flops = {name: peak * 1e12 for name, peak in {**sheet["tflops"], **sparse}.items()}
        source = _CARDS_TOML["sources"][sheet["source"]]["title"]
        roofs = Roofs.of(sheet["devices"], sheet["bandwidth"] * 1e9, flops, source)
        yield key, replace(roofs, memory=sheet["memory"] * 1e9 if "memory" in sheet else None)


_CARDS_TOML = tomllib.loads(
    (resources.files("dpbench.results") / "cards.toml").read_text(encoding="utf-8")
)

CARDS = dict(_read_cards())
"""The roofs of cards by short name, from NVIDIA's documents."""


def known_roofs(name: str) -> Roofs | None:
    """Return the roofs of a card by short name (``h200``) or device name, or None if unknown."""
    named = (c for key, c in CARDS.items() if _plain(name) in map(_plain, (key, *c.devices)))
    return next(named, None)


def find_card(name: str) -> Roofs:
    """Return the roofs of the card with this short name or device name.

    Raises:
        ConfigurationError: ``cards.toml`` has no figures of the card.
    """
    if card := known_roofs(name):
        return card
    raise unknown("card", name, CARDS, "or a FILE of measured roofs")


def _plain(name: str) -> str:
    """Return a name in lower case, without "nvidia", "geforce", spaces and punctuation."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def _measured_roofs(ceilings: Mapping[str, Any]) -> Roofs:
    source = f"measured, torch {ceilings['torch']}"
    return Roofs.of([ceilings["device"]], ceilings["bandwidth"], ceilings["flops"], source)


def find_ceilings(device: str) -> Roofs:
    """Return the measured roofs of a device.

    Raises:
        ConfigurationError: ``cards.toml`` has no measured roofs of the device.
    """
    for roofs in map(_measured_roofs, _CARDS_TOML["ceilings"]):
        if device in roofs.devices:
            return roofs
    raise ConfigurationError(
        f"there are no measured ceilings of {device or 'this device'}: measure them with "
        f"bench/ceilings.py, and name the file with --time FILE"
    )


def reachable(card: Roofs) -> Roofs:
    """Estimate the rates that large copies and matrix products reach on a card.

    Each rate in the card's data sheet is multiplied by a share. The share is the rate that was
    measured on an H200, divided by the rate in the H200's data sheet: 0.89 for the bandwidth, and
    0.76, 0.72 and 0.68 for arithmetic at fp32, tf32 and bf16.
    """
    own, reached = CARDS["h200"], _measured_roofs(_CARDS_TOML["ceilings"][0])
    shares = {name: reached.flops[name] / own.flops[name] for name in own.flops}
    return replace(
        card,
        bandwidth=card.bandwidth * reached.bandwidth / own.bandwidth,
        flops={name: peak * shares[name] for name, peak in card.flops.items()},
    )


def read_ceilings(path: Path) -> Roofs:
    """Read the measured roofs of a device from a file with the output of ``bench/ceilings.py``."""
    try:
        return _measured_roofs(json.loads(path.read_bytes())["ceilings"])
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no file of measured ceilings ({error})") from error


# --- the phases of a step --------------------------------------------------------------------

MEASURED_BYTES = "measured DRAM bytes"
COUNTED_BYTES = "logical bytes"
"""The values of the column ``bytes_are``, which says whether bytes were measured or counted."""

BUSY = "gpu_busy_share"

LAUNCH_BOUND = 0.7
"""A phase is launch-bound if the GPU is busy for less than this share of the phase's time."""

WAITS = 0.9
"""If the GPU is busy for less than this share of the baseline's step, tables say so."""


def intensities(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `phases` for cases whose precision is known.

    Raises:
        ConfigurationError: the precision of no case is known, or the operations of a phase or step
            were not counted.
    """
    known = summary[summary.precision != ""]
    if known.empty and not summary.empty:
        raise ConfigurationError(
            "there is no roofline of a script, because its precision is unknown"
        )
    table = phases(known)
    missing = table[table.flops.isna()].sort_values(
        "phase", key=lambda phase: phase != STEP, kind="stable"
    )
    for row in missing.head(1).to_dict("records"):
        raise ConfigurationError(
            f"no operations were counted for {row['case'].id}, phase {row['phase']}: "
            f"count the same case with the logical instrument"
        )
    return table


def phases(summary: pd.DataFrame) -> pd.DataFrame:
    """Return operations, bytes and time of each phase and of the step.

    Operations are counted without hardware. If an instrument that can measure ``busy`` timed the
    case, its times are used, because ``busy`` is a share of these times.

    Returns:
        One row per case, device and phase: the case and its fields, ``device``, ``phase``,
        ``flops``, ``bytes``, ``bytes_are``, ``intensity`` (FLOP/B), ``seconds`` and ``busy``, the
        share of ``seconds`` in which the GPU did anything. Unknown numbers are NaN.
    """
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


def apply_roofs(table: pd.DataFrame, roofs: Roofs) -> pd.DataFrame:
    """Add columns to a table of `phases`: the least times that the roofs of one card allow.

    Returns:
        The table with five more columns. An entry is NaN if a number or a roof that it needs is
        unknown. ``arithmetic_seconds`` and ``bytes_seconds`` are the least times for operations and
        for bytes. ``bound`` is ``arithmetic`` or ``bandwidth``, whichever has the longer least
        time. If the busy share is below `LAUNCH_BOUND`, ``bound`` instead says ``launch-bound``
        with this share. ``least_seconds`` is the longer of the two least times. For a step with
        phases, ``least_seconds`` is the sum over the phases, because phases run one after the
        other. ``share`` is ``least_seconds / seconds``.

    Raises:
        ConfigurationError: a row was measured on a card that has other roofs.
    """
    measured = table[(table.bytes_are == MEASURED_BYTES) | table.seconds.notna()]
    if others := sorted({*measured.device} - {*roofs.devices}):
        raise ConfigurationError(
            f"these rows were measured on {', '.join(others)}, so the roofs of {roofs.name} do not "
            f"apply to them"
        )
    arithmetic = table.flops / table.precision.map(roofs.flops).astype(float)
    arithmetic = arithmetic.mask(table.flops == 0, 0.0)
    bandwidth = table.bytes / roofs.bandwidth
    longer = arithmetic.mask(arithmetic < bandwidth, bandwidth).where(bandwidth.notna())
    roof = (arithmetic > bandwidth).map({True: "arithmetic", False: "bandwidth"})
    launch_bound = table.busy.map("launch-bound ({:.0%})".format)
    of_step = table.phase == STEP
    by_step = [table[key] for key in (*OF_CASE, "bytes_are")]
    unknown = (longer.isna() & ~of_step).groupby(by_step, sort=False).transform("any")
    total = longer.mask(of_step).groupby(by_step, sort=False).transform("sum", min_count=1)
    least = longer.mask(of_step, total.fillna(longer).mask(unknown))
    return table.assign(
        arithmetic_seconds=arithmetic,
        bytes_seconds=bandwidth,
        bound=roof.where(longer.notna()).mask(table.busy < LAUNCH_BOUND, launch_bound),
        least_seconds=least,
        share=least / table.seconds,
    )


# --- the time breakdown ----------------------------------------------------------------------

PARTS = ("arithmetic", "bytes", "idle", "left")
"""The parts of a time. Each part has a column of seconds, e.g. ``idle_seconds``."""


def time_breakdown(summary: pd.DataFrame, ceilings: Roofs) -> pd.DataFrame:
    """Divide the times of phases and steps, all measured on one card, into parts.

    The least times for operations and for DRAM bytes overlap, so a phase takes at least the longer
    of the two. What is left is the time that roofs and idle time do not explain.

    Logical bytes are not used. A cache can hold some of the logical bytes, so the time to move all
    logical bytes from memory is no lower bound.

    Returns:
        The table of `apply_roofs` for all phases and steps with a time, and two more columns.
        ``idle_seconds`` is ``(1 - busy) * seconds``, the time in which the GPU did nothing.
        ``left_seconds`` is the time minus ``idle_seconds`` and ``least_seconds``. ``left_seconds``
        is negative if ``least_seconds`` exceeds the time in which the GPU was busy. Then a roof is
        too low, or the bytes and the time belong to different work. A part is NaN if a number that
        it needs is unknown.
    """
    table = phases(summary)
    table = table.assign(bytes=table.bytes.where(table.bytes_are == MEASURED_BYTES))
    table = apply_roofs(table, ceilings)
    table = table[table.seconds.notna()].reset_index(drop=True)
    idle = (1.0 - table.busy) * table.seconds
    return table.assign(idle_seconds=idle, left_seconds=table.seconds - idle - table.least_seconds)


def additional(times: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """Divide the time by which each step exceeds the baseline's step into parts.

    Returns:
        One row per case and device whose step takes longer than the step of the same case with the
        ``baseline``. ``more_seconds`` is the additional time. For each of `PARTS`, a column such as
        ``idle_share`` is the additional time of the part, divided by ``more_seconds``. The shares
        of arithmetic and bytes overlap. A share can be negative or above 1.
    """
    steps = times[times.phase == STEP]
    steps = steps.assign(cell=[case.cell for case in steps.case])
    seconds = ["seconds", *(f"{part}_seconds" for part in PARTS)]
    keys = ["cell", *OF_CASE[1:]]
    base = steps.loc[steps.trainer == baseline, [*keys, *seconds]]
    both = steps.merge(base, on=keys, suffixes=("", "_of_baseline"))
    both = both[(both.trainer != baseline) & (both.seconds > both.seconds_of_baseline)]
    more = {name: both[name] - both[f"{name}_of_baseline"] for name in seconds}
    shares = {f"{part}_share": more[f"{part}_seconds"] / more["seconds"] for part in PARTS}
    return both[[*AXES, *OF_CASE]].assign(more_seconds=more["seconds"], **shares)
