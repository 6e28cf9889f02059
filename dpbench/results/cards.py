"""Cards by name: the two roofs of each, from NVIDIA's documents (``cards.toml``)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dpbench.case import PRECISIONS
from dpbench.errors import ConfigurationError, unknown


@dataclass(frozen=True)
class Source:
    """Where figures come from."""

    title: str
    url: str


@dataclass(frozen=True)
class Roofs:
    """What bounds a card from above.

    Args:
        name: the card, for people.
        devices: the names of the card in measured rows, as NVML and CUDA give them.
        bandwidth: bytes per second between the chip and its memory, read and written together.
        flops: floating-point operations per second by precision of a case (`PRECISIONS`), a
            multiply-add counting as two.
        premise: what the figures are, e.g. ``NVIDIA H200 Tensor Core GPU data sheet``.
    """

    name: str
    devices: tuple[str, ...]
    bandwidth: float
    flops: Mapping[str, float]
    premise: str

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


@dataclass(frozen=True)
class Card:
    """One card: names of the driver's, bytes, B/s, dense FLOP/s, and where they are from."""

    key: str
    devices: tuple[str, ...]
    memory_bytes: float
    bandwidth: float
    flops: Mapping[str, float]
    source: Source
    l2_cache_bytes: int | None
    l2_source: Source | None

    def roofs(self) -> Roofs:
        """The card's peaks, which no program exceeds and few reach."""
        return Roofs(
            self.devices[0], self.devices, self.bandwidth, self.flops, premise=self.source.title
        )


def _card(key: str, sheet: Mapping[str, Any], sources: Mapping[str, Source]) -> Card:
    tflops = dict(sheet["tflops"])
    tflops |= {name: peak / 2 for name, peak in sheet.get("tflops_with_sparsity", {}).items()}
    return Card(
        key=key,
        devices=tuple(sheet["devices"]),
        memory_bytes=sheet["memory"] * 1e9,
        bandwidth=sheet["bandwidth"] * 1e9,
        flops={precision: tflops[precision] * 1e12 for precision in PRECISIONS},
        source=sources[sheet["source"]],
        l2_cache_bytes=sheet["l2"] * 2**20 if "l2" in sheet else None,
        l2_source=sources[sheet["l2_source"]] if "l2_source" in sheet else None,
    )


def _read_cards() -> dict[str, Card]:
    text = (resources.files("dpbench.results") / "cards.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    return {key: _card(key, sheet, sources) for key, sheet in document["cards"].items()}


CARDS = _read_cards()
"""Cards by short name."""


def find_card(name: str) -> Card:
    """The card with a short name (``h200``) or a name of the driver's (``NVIDIA H200``)."""
    for card in CARDS.values():
        if _plain(name) in map(_plain, (card.key, *card.devices)):
            return card
    raise unknown("card", name, CARDS, "or measure this one's roofs: dpbench ceilings --json FILE")


def known_roofs(device: str) -> Roofs | None:
    """The roofs of a card by its name in measured rows, or None if dpbench has no data sheet."""
    try:
        return find_card(device).roofs()
    except ConfigurationError:
        return None


def _plain(name: str) -> str:
    """Letters and digits in lower case, without the maker's name."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
