"""Logical bytes of each trainer in the cells of the named grids: the suite behind `bounds.json`.

pytest does not collect it. `test_bounds.py` compares a part with the committed run; this compares
all:

    python -m pytest -n 0 tests/logical/bounds.py --dpbench-compare=tests/logical/bounds.json \\
        --dpbench-compare-fail=logical_bytes:±0.3% --dpbench-compare-fail=logical_ratio:±0.3%

Each layer of the transformer runs the same operators, so the ``1b`` model is counted with one and
with two layers, and extrapolated (`layers.py`). After an intended change, renew the run; ``git
diff`` then shows its cost:

    python -m pytest -n 0 tests/logical/bounds.py --dpbench-json tests/logical/bounds.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.grid import GRIDS
from dpbench.core.registry import TRAINERS
from dpbench.results.report import CaseReport
from tests.logical.layers import TWO_DEPTHS

FILE = Path(__file__).with_name("bounds.json")
LIMITS = ("logical_bytes:±0.3%", "logical_ratio:±0.3%")
"""Limits for the model with two layers, which move half of its bytes. They move nine tenths of the
bytes of ``1b``, where 0.3 % here is less than 1 %."""


def cell_of(case: Case) -> str:
    """A cell of a grid, e.g. ``8x256``."""
    return f"{case.batch_size}x{case.seq_len}"


def shallow(case: Case, layers: int) -> Case:
    """The same case with fewer layers."""
    size = case.size
    return replace(case, model_size=f"{size.vocabulary}x{size.hidden}x{layers}x{size.heads}")


PLAIN = "fused:graphs=false,kernels=false"
METHODS = (*(name for name in TRAINERS if name not in GRIDS["grid1"].values("trainer")), PLAIN)
"""Trainers outside the transformer's grids, counted in two cells: all have the same operators."""

CASES = list(dict.fromkeys(case for name in ("grid1", "grid2") for case in GRIDS[name].cases()))
CASES += [
    Case(trainer, batch_size, seq_len, CASES[0].model_size)
    for batch_size, seq_len in ((8, 256), (16, 1024))
    for trainer in METHODS
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{cell_of(case)}-{case.trainer}")
@pytest.mark.parametrize("layers", TWO_DEPTHS, ids=lambda layers: f"layers{layers}")
def test_logical_bytes(case: Case, layers: int, logical_io: Callable[[Case], CaseReport]) -> None:
    report = logical_io(shallow(case, layers))
    if case.trainer != BASELINE_TRAINER:
        assert report.logical_bytes > logical_io(report.case.baseline).logical_bytes
