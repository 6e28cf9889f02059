"""The two roofs of a card: from NVIDIA's documents (``cards.toml``), or measured."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dpbench.case import PRECISIONS
from dpbench.errors import ConfigurationError, unknown


@dataclass(frozen=True)
class Roofs:
    """What bounds a card from above."""

    name: str  # for people
    devices: tuple[str, ...]  # its names in measured rows, as NVML and CUDA give them
    bandwidth: float  # of its memory, read and written together, B/s
    flops: Mapping[str, float]  # dense FLOP/s by precision; a multiply-add counts as two
    premise: str  # what the figures are, e.g. NVIDIA H200 Tensor Core GPU data sheet

    def ridge(self, precision: str) -> float:
        """FLOP per byte above which arithmetic, not bandwidth, bounds the card."""
        return self.flops[precision] / self.bandwidth

    def require(self, devices: Iterable[str]) -> None:
        """Refuse rows that were measured on another card."""
        others = sorted(set(devices) - set(self.devices))
        if others:
            raise ConfigurationError(
                f"these rows were measured on {', '.join(others)}, not on {self.name}: bytes and "
                f"times of one card say nothing under the roofs of another"
            )


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
            flops={precision: tflops[precision] * 1e12 for precision in PRECISIONS},
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
        found = json.loads(path.read_bytes())["ceilings"]
        device, bandwidth, flops = (found[key] for key in ("device", "bandwidth", "flops"))
        if not all(figure > 0 for figure in (bandwidth, *map(flops.__getitem__, PRECISIONS))):
            raise ValueError("a ceiling is not positive")
        return Roofs(device, (device,), bandwidth, flops, f"measured, torch {found['torch']}")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"not what bench/ceilings.py prints ({error})"
        raise ConfigurationError(f"{path}: {what}") from error
