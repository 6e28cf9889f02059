"""Measured roofs as a document: what a card reaches, beside what its data sheet says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpbench.case import PRECISIONS
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs
from dpbench.results.rows import SCHEMA


@dataclass(frozen=True)
class Ceilings:
    """What one device reached.

    Args:
        device: its name.
        bandwidth: bytes per second, read and written together, of a copy on the device.
        copy_bytes: size of what was copied, B.
        flops: FLOP/s of a square matrix product by precision.
        matrix: its side.
        torch: the version that ran it.
    """

    device: str
    bandwidth: float
    copy_bytes: int
    flops: Mapping[str, float]
    matrix: int
    torch: str

    def roofs(self) -> Roofs:
        """The ceilings as roofs of this device."""
        return Roofs(
            name=self.device,
            devices=(self.device,),
            bandwidth=self.bandwidth,
            flops=self.flops,
            premise=f"measured, torch {self.torch}",
        )

    def as_json(self) -> str:
        """The document; it has no rows, because no case was measured."""
        return json.dumps({"schema": SCHEMA, "rows": [], "ceilings": asdict(self)}, indent=1) + "\n"


def read_ceilings(path: Path) -> Ceilings:
    """The ceilings in a document of `Ceilings.as_json`."""
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())["ceilings"]
        found = Ceilings(**data)
        figures = [found.bandwidth, *(found.flops[precision] for precision in PRECISIONS)]
        if not all(figure > 0 for figure in figures):
            raise ValueError("a ceiling is not positive")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: not a document of dpbench ceilings --json ({error})"
        ) from error
    return found
