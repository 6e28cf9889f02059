"""Recorded kernel reports, which are compressed from 7 MB to 30 kB."""

from __future__ import annotations

import lzma
from pathlib import Path

DATA = Path(__file__).parent / "data"
RANGES = DATA / "tiny-fp32"


def unpacked(name: str, directory: Path) -> Path:
    """Unpack a report below `RANGES`, ncu's log and the file with its case into ``directory``.

    ``name`` is a path such as ``kernels/report_dpsgd_bs4_seq64.ncu-rep``.
    """
    path = directory / "tiny-fp32" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in (path, path.with_suffix(".log")):
        packed = RANGES / Path(name).parent / f"{file.name}.xz"
        file.write_bytes(lzma.decompress(packed.read_bytes()))
    described = RANGES / Path(name).with_suffix(".json")
    path.with_suffix(".json").write_bytes(described.read_bytes())
    return path
