"""Counts are affine in the number of layers."""

from __future__ import annotations

import pytest

from dpbench.case import GRIDS, PRECISIONS, Case
from dpbench.errors import ConfigurationError
from tests.logical.layers import count, count_by_layers

TRAINERS = GRIDS["grid1"].trainer
DEEP = "200x32x3x2"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_depths_tell_every_other(trainer: str) -> None:
    case = Case(trainer, 4, 16, DEEP)
    direct, extrapolated = count(case), count_by_layers(case)
    assert set(extrapolated.operator_counts) == set(direct.operator_counts)
    for metric in ("logical_read_bytes", "logical_write_bytes"):
        assert extrapolated.value(metric) == direct.value(metric)
        by_phase = direct.phases[metric]
        assert dict(extrapolated.phases[metric]) == dict(by_phase[by_phase > 0])


def test_in_another_configuration_too() -> None:
    case = Case("dpsgd", 4, 16, DEEP, precision=PRECISIONS[-1], attention="dp_mha")
    assert set(count_by_layers(case).operator_counts) == set(count(case).operator_counts)


def test_peak_memory_is_not_among_what_it_tells() -> None:
    with pytest.raises(ConfigurationError, match="'peak_memory_bytes' was not measured"):
        count_by_layers(Case("standard", 4, 16, DEEP)).value("peak_memory_bytes")
