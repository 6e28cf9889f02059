"""Cards by name: the two roofs of each, from NVIDIA's documents.

Peaks are dense. Some data sheets print tensor-core figures "with sparsity" only, twice what an
ordinary matrix product can reach; those are halved here, visibly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
        """Accept rows that were measured on this card alone.

        Raises:
            ConfigurationError: some were measured on another.
        """
        others = sorted(set(devices) - set(self.devices))
        if others:
            raise ConfigurationError(
                f"these rows were measured on {', '.join(others)}, not on {self.name}: bytes and "
                f"times of one card say nothing under the roofs of another"
            )


@dataclass(frozen=True)
class Card:
    """One card.

    Args:
        key: its short name.
        devices: what NVML calls it.
        memory: GB.
        bandwidth: GB/s.
        tflops: dense peaks in TFLOP/s at fp32 (without tensor cores), tf32, bf16.
        source: of the figures before.
        l2_mib: size of the L2 cache in MiB, where a source gives it.
        l2_source: that source.
    """

    key: str
    devices: tuple[str, ...]
    memory: float
    bandwidth: float
    tflops: tuple[float, float, float]
    source: Source
    l2_mib: int | None = None
    l2_source: Source | None = None

    @property
    def memory_bytes(self) -> float:
        """Size of the memory, B."""
        return self.memory * 1e9

    @property
    def l2_cache_bytes(self) -> int | None:
        """Size of the L2 cache, B."""
        return None if self.l2_mib is None else self.l2_mib * 2**20

    def roofs(self) -> Roofs:
        """The card's peaks, which no program exceeds and few reach."""
        return Roofs(
            name=self.devices[0],
            devices=self.devices,
            bandwidth=self.bandwidth * 1e9,
            flops={p: t * 1e12 for p, t in zip(PRECISIONS, self.tflops, strict=True)},
            premise=self.source.title,
        )


_A100 = Source(
    "NVIDIA A100 Tensor Core GPU data sheet",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
)
_AMPERE = Source(
    "NVIDIA Ampere Architecture In-Depth",
    "https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/",
)
_H100 = Source(
    "NVIDIA H100 Tensor Core GPU data sheet", "https://www.nvidia.com/en-us/data-center/h100/"
)
_HOPPER = Source(
    "NVIDIA H100 Tensor Core GPU Architecture",
    "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
)
_H200 = Source(
    "NVIDIA H200 Tensor Core GPU data sheet", "https://www.nvidia.com/en-us/data-center/h200/"
)
_H200_DRIVER = Source(
    "cudaDeviceProp.l2CacheSize, read on an NVIDIA H200",
    "https://docs.nvidia.com/cuda/cuda-runtime-api/structcudaDeviceProp.html",
)
_BLACKWELL = Source(
    "NVIDIA Blackwell Architecture Technical Brief",
    "https://resources.nvidia.com/en-us-blackwell-architecture",
)
_L40S = Source("NVIDIA L40S data sheet", "https://www.nvidia.com/en-us/data-center/l40s/")
_L4 = Source("NVIDIA L4 Tensor Core GPU data sheet", "https://www.nvidia.com/en-us/data-center/l4/")
_ADA_L4 = Source(
    "NVIDIA Ada GPU Architecture, version 2.1",
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/"
    "nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf",
)
_ADA = Source(
    "NVIDIA Ada GPU Architecture",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
)

_GA100 = (19.5, 156.0, 312.0)
_GH100_SXM = (67.0, 989 / 2, 1979 / 2)

CARDS = {
    card.key: card
    for card in (
        Card("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 40, 1555, _GA100, _AMPERE, 40, _AMPERE),
        Card("a100-80gb", ("NVIDIA A100-SXM4-80GB",), 80, 2039, _GA100, _A100, 40, _AMPERE),
        Card("a100-pcie-40gb", ("NVIDIA A100-PCIE-40GB",), 40, 1555, _GA100, _A100, 40, _AMPERE),
        Card("a100-pcie-80gb", ("NVIDIA A100 80GB PCIe",), 80, 1935, _GA100, _A100, 40, _AMPERE),
        Card("h100", ("NVIDIA H100 80GB HBM3",), 80, 3350, _GH100_SXM, _H100, 50, _HOPPER),
        Card(
            "h100-pcie",
            ("NVIDIA H100 PCIe",),
            *(80, 2000, (51.0, 756 / 2, 1513 / 2), _H100),
            *(50, _HOPPER),
        ),
        Card("h200", ("NVIDIA H200",), 141, 4800, _GH100_SXM, _H200, 60, _H200_DRIVER),
        Card("b200", ("NVIDIA B200",), 192, 8000, (80.0, 1100.0, 2250.0), _BLACKWELL),
        Card("l4", ("NVIDIA L4",), 24, 300, (30.3, 120 / 2, 242 / 2), _L4, 48, _ADA_L4),
        Card("l40s", ("NVIDIA L40S",), 48, 864, (91.6, 183.0, 362.05), _L40S),
        Card(
            "rtx4090",
            ("NVIDIA GeForce RTX 4090",),
            *(24, 1008, (82.6, 82.6, 165.2), _ADA),
            *(72, _ADA),
        ),
    )
}
"""Cards by short name."""


def find_card(name: str) -> Card:
    """The card with a short name (``h200``) or a name of the driver's (``NVIDIA H200``).

    Raises:
        ConfigurationError: it is not in the table; the message lists what is.
    """
    for card in CARDS.values():
        if _plain(name) in map(_plain, (card.key, *card.devices)):
            return card
    raise unknown("card", name, CARDS, "or measure this one's roofs: dpbench ceilings --json FILE")


def _plain(name: str) -> str:
    """Letters and digits in lower case, without the maker's name."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
