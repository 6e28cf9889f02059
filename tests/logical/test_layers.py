"""Counts are affine in the number of layers."""

from __future__ import annotations

import pytest

from dpbench.case import PRODUCTS, Case
from dpbench.errors import ConfigurationError
from tests.logical.layers import count, count_by_layers

DEEP = "200x32x3x2"


def test_two_depths_tell_every_other_by_phase() -> None:
    """Operator by operator ``test_1b.py`` compares them for every trainer."""
    case = Case("dpsgd_ghost", 4, 16, DEEP)
    direct, extrapolated = count(case), count_by_layers(case)
    for metric in ("logical_read_bytes", "logical_write_bytes"):
        assert extrapolated.value(metric) == direct.value(metric)
        by_phase = direct.phases[metric]
        assert dict(extrapolated.phases[metric]) == dict(by_phase[by_phase > 0])
    with pytest.raises(ConfigurationError, match="'peak_memory_bytes' was not measured"):
        extrapolated.value("peak_memory_bytes")


def test_in_another_configuration_too() -> None:
    case = Case("dpsgd", 4, 16, DEEP, precision=PRODUCTS[-1], attention="dp_mha")
    assert set(count_by_layers(case).operator_counts) == set(count(case).operator_counts)
