"""The roofline: which roof of a card, bandwidth or arithmetic, bounds each phase of a step.

A phase that does F operations and moves M bytes takes at least ``max(F / peak, M / bandwidth)``
seconds; F / M, its arithmetic intensity, says which of the two it is (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009).

Operations are counted, not measured: those of matrix products and attention, by PyTorch's own
counter. Bytes are DRAM bytes where they were measured, logical bytes elsewhere; the two never
share a table.

The roofs of a card come from NVIDIA's documents (``cards.toml``), or were measured.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import AXES, MIXED, PRODUCTS, Case
from dpbench.errors import ConfigurationError, unknown
from dpbench.files import read_file
from dpbench.results.rows import STEP

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Roofs:
    """What bounds a card from above."""

    name: str  # for people
    devices: tuple[str, ...]  # its names in measured rows, as NVML and CUDA give them
    bandwidth: float  # of its memory, read and written together, B/s
    flops: Mapping[str, float]  # dense FLOP/s by precision; a multiply-add counts as two
    premise: str  # what the figures are, e.g. NVIDIA H200 Tensor Core GPU data sheet

    def __post_init__(self) -> None:
        """Under autocast products are in 16 bits; tensor cores do both kinds at the same rate."""
        mixed = dict.fromkeys(MIXED, self.flops["bf16"])
        object.__setattr__(self, "flops", {**self.flops, **mixed})

    def ridge(self, precision: str) -> float:
        """FLOP per byte above which arithmetic, not bandwidth, bounds the card."""
        return self.flops[precision] / self.bandwidth


def _read_cards() -> dict[str, Roofs]:
    text = (resources.files("dpbench.results") / "cards.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    cards = {}
    for key, sheet in document["cards"].items():
        sparse = {name: peak / 2 for name, peak in sheet.get("tflops_with_sparsity", {}).items()}
        tflops = {**sheet["tflops"], **sparse}
        cards[key] = Roofs(
            name=sheet["devices"][0],
            devices=tuple(sheet["devices"]),
            bandwidth=sheet["bandwidth"] * 1e9,
            flops={precision: tflops[precision] * 1e12 for precision in PRODUCTS},
            premise=document["sources"][sheet["source"]]["title"],
        )
    return cards


CARDS = _read_cards()
"""By short name, a card's peaks, which no program exceeds and few reach."""


def known_roofs(name: str) -> Roofs | None:
    """The card with a short name (``h200``) or one of the driver's (``NVIDIA H200``), if known."""
    named = (c for key, c in CARDS.items() if _plain(name) in map(_plain, (key, *c.devices)))
    return next(named, None)


def find_card(name: str) -> Roofs:
    """The card with such a name; an error if dpbench has no data sheet of it."""
    if card := known_roofs(name):
        return card
    raise unknown("card", name, CARDS, "or measure this one's roofs: bench/ceilings.py")


def _plain(name: str) -> str:
    """Letters and digits in lower case, without the maker's name."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def read_ceilings(path: Path) -> Roofs:
    """The roofs that ``bench/ceilings.py`` measured on one device."""
    try:
        ceilings = json.loads(read_file(path))["ceilings"]
        flops = {name: float(ceilings["flops"][name]) for name in PRODUCTS}
        device = ceilings["device"]
        bandwidth, premise = float(ceilings["bandwidth"]), f"measured, torch {ceilings['torch']}"
        return Roofs(device, (device,), bandwidth, flops, premise)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"not what bench/ceilings.py prints ({error})"
        raise ConfigurationError(f"{path}: {what}") from error


# --- phases under the roofs ------------------------------------------------------------------

MEASURED_BYTES = "measured DRAM bytes"
COUNTED_BYTES = "logical bytes"
"""Where the bytes of a row come from: the column ``bytes_are``."""

BUSY = "gpu_busy_share"

LAUNCH_BOUND = 0.7
"""A phase whose GPU is busy for less than this part of its time waits for its launches."""


def intensities(frame: pd.DataFrame, *, complete: bool = True) -> pd.DataFrame:
    """Operations, bytes and, if it was measured, time of each phase and of the step.

    Each case of the long table needs rows of the ``logical`` instrument, for the operations; a
    case without is an error, or left out if the table need not be ``complete``. DRAM bytes and
    times are those of the instrument that comes first in `PREFERRED`.

    Returns:
        One row per case, device and phase: the case's fields, ``device``, ``phase``,
        ``flops``, ``bytes``, ``bytes_are``, ``intensity`` (FLOP/B), ``seconds`` and ``busy``, the
        part of them in which the GPU did anything (NaN where they were not measured).
    """
    import pandas as pd

    from dpbench.results.frame import of_one_instrument, summarise

    case, place = list(AXES), [*AXES, "device", "phase"]
    known = frame[frame.precision != ""]
    if complete and known.empty and not frame.empty:
        raise ConfigurationError("nobody says at which precision a script computes: no roofline")
    summary = of_one_instrument(summarise(known))

    def of(metric: str, column: str) -> pd.DataFrame:
        rows = summary.loc[summary.metric == metric, [*place, "value"]]
        return rows.rename(columns={"value": column})

    flops = of("flops", "flops").drop(columns="device")
    dram = of("dram_bytes", "bytes").assign(bytes_are=MEASURED_BYTES)
    seconds, busy = of("step_time_seconds", "seconds"), of(BUSY, "busy")
    on_hardware = pd.concat([dram, seconds])[[*case, "device"]].drop_duplicates()
    logical = of("logical_bytes", "bytes")
    logical = logical.merge(on_hardware, "outer", case, suffixes=("_counted", ""))
    logical["bytes_are"] = COUNTED_BYTES
    logical["device"] = logical.device.fillna(logical.pop("device_counted"))
    logical["phase"] = logical.phase.fillna(STEP)  # of a case that nobody counted
    both = pd.concat([dram, logical], ignore_index=True)
    first = both.groupby([*case, "device"]).bytes_are.transform("first")
    table = both[both.bytes_are == first].merge(flops, "left", [*case, "phase"])
    table = table.merge(seconds, "left", place).merge(busy, "left", place)
    if not complete:
        table = table.dropna(subset="flops")
    missing = table[table.flops.isna()].sort_values(
        "phase", key=lambda phase: phase != STEP, kind="stable"
    )
    for row in missing.head(1).to_dict("records"):
        raise ConfigurationError(  # never zero
            f"no operations were counted for {Case.from_row(row).id}, phase {row['phase']}: "
            f"count the same case with the logical instrument"
        )
    return table.assign(intensity=table.flops / table.bytes.where(table.bytes > 0))


def under(table: pd.DataFrame, roofs: Roofs) -> pd.DataFrame:
    """What `intensities` returned, under the roofs of one card.

    Returns:
        The table with ``bound_by`` (a roof; where the GPU waits for its launches, these, and how
        busy it was), ``least_seconds``, ``share`` (``least_seconds / seconds``), and what was
        achieved, ``flops_per_second``. The least time of a step is the sum over its phases,
        because they run one after the other.
    """
    measured = table[(table.bytes_are == MEASURED_BYTES) | table.seconds.notna()]
    if others := sorted({*measured.device} - {*roofs.devices}):
        raise ConfigurationError(
            f"these rows were measured on {', '.join(others)}, not on {roofs.name}: bytes and "
            f"times of one card say nothing under the roofs of another"
        )
    arithmetic = table.flops / table.precision.map(roofs.flops)
    bandwidth = table.bytes / roofs.bandwidth
    roof = (arithmetic > bandwidth).map({True: "arithmetic", False: "bandwidth"})
    waits = table.busy.map("launches, busy {:.0%}".format)
    table = table.assign(
        bound_by=roof.mask(table.busy < LAUNCH_BOUND, waits),
        least_seconds=arithmetic.mask(arithmetic < bandwidth, bandwidth),
    )
    phases = table.least_seconds.where(table.phase != STEP)
    of_phases = phases.groupby([table[k] for k in (*AXES, "device", "bytes_are")])
    whole = of_phases.transform("sum", min_count=1).where(table.phase == STEP)
    least = whole.fillna(table.least_seconds)
    return table.assign(
        least_seconds=least,
        share=least / table.seconds,
        flops_per_second=table.flops / table.seconds,
    )
