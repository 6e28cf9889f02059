"""Counts are affine in the number of layers; for the 1b model see `test_1b.py`."""

from __future__ import annotations

import pytest

from dpbench.core.case import Case
from tests.logical.layers import count, count_by_layers, totals


@pytest.mark.slow
def test_two_depths_tell_every_other_in_another_configuration_too() -> None:
    case = Case("dpsgd", 4, 16, "200x32x3x2", precision="bf16", attention="dp_mha")
    assert totals(count_by_layers(case).operator_counts) == totals(count(case).operator_counts)
