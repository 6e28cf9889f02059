"""The rows of timed steps, and of those that were counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from dpbench.case import Case
from dpbench.instruments.timing import timing_rows
from dpbench.metrics import unit
from dpbench.results.rows import STEP, Measurement

INSTRUMENT = "cupti"  # the instrument's name in rows


def cupti_rows(case: Case, record: Mapping[str, Any]) -> Iterator[Measurement]:
    """The rows of timed steps, and of those that were counted, by phase or as a whole."""
    device, tool = record["device"], f"cupti {record['cupti']}, torch {record['torch']}"
    for row in timing_rows(case, dict(record)):
        yield replace(row, instrument=INSTRUMENT, tool=tool)
    repeats = {True: count(), False: count()}  # of the steps that were counted as a whole, or not
    for step in record["counted"]:
        where = (next(repeats[STEP in step]), device, tool)
        for phase, values in step.items():
            for metric, value in values.items():
                of = "B" if "bytes" in metric.partition("__")[2] else unit(metric)
                yield Measurement(case, INSTRUMENT, phase, metric, value, of, *where)
