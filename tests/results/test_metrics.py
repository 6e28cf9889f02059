"""Metrics have names and units that every part of dpbench agrees on."""

from __future__ import annotations

from dpbench.instruments.ncu.metrics import BYTE_METRICS
from dpbench.instruments.torch_profiler.files import COPIES, OTHER_COPIES
from dpbench.results.kernels import KERNEL_METRICS
from dpbench.results.metrics import UNITS
from dpbench.show.view import COLUMNS


def test_whatever_instruments_measure_has_its_unit() -> None:
    assert {name: UNITS[name] for name in BYTE_METRICS} == {
        name: metric.unit for name, metric in BYTE_METRICS.items()
    }
    assert {name: UNITS[name] for name in KERNEL_METRICS} == {
        name: unit for name, (_, unit) in KERNEL_METRICS.items()
    }
    assert {*COPIES.values(), OTHER_COPIES} <= UNITS.keys()
    assert (UNITS["flops"], UNITS["samples_per_second"]) == ("1", "1/s")


def test_columns_that_show_a_number_of_a_row_show_a_known_metric() -> None:
    shown = {m for c in COLUMNS.values() if c.kind != "value" for m in c.metrics}
    assert shown <= UNITS.keys()
