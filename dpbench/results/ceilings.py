"""Measured roofs as a document: what a card reaches, beside what its data sheet says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpbench.case import PRECISIONS
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs, find_card
from dpbench.results.rows import SCHEMA
from dpbench.show.layout import Table, gigabytes


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

    def table(self) -> Table:
        """Measured and, if the card is known, data-sheet figures side by side."""
        try:
            sheet = find_card(self.device).roofs()
        except ConfigurationError:
            sheet = None
        lines = [("copy, GB/s", self.bandwidth / 1e9, sheet and sheet.bandwidth / 1e9)]
        for precision, reached in self.flops.items():
            peak = sheet and sheet.flops[precision] / 1e12
            lines.append((f"{precision} matrix product, TFLOP/s", reached / 1e12, peak))
        cells = [
            [name, f"{reached:.1f}", *([f"{peak:.4g}", f"{reached / peak:.0%}"] if peak else [])]
            for name, reached, peak in lines
        ]
        headers = ["what", "measured", *(["data sheet", "share"] if sheet else [])]
        notes = (
            f"Copy of {gigabytes(self.copy_bytes)} GB on the device, bytes read and written; "
            f"matrices of {self.matrix} x {self.matrix}; torch {self.torch}.",
            f"Data sheet: {sheet.premise}." if sheet else "This card is not in dpbench's table.",
        )
        return Table(f"{self.device}: measured ceilings", headers, cells, notes)

    def as_json(self) -> str:
        """The document; it has no rows, because no case was measured."""
        return json.dumps({"schema": SCHEMA, "rows": [], "ceilings": asdict(self)}, indent=1) + "\n"


def read_ceilings(path: Path) -> Ceilings:
    """The ceilings in a document of `Ceilings.as_json`.

    Raises:
        ConfigurationError: it cannot be read, or is no such document.
    """
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
