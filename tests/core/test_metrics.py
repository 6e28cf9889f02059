"""Every metric once: its name, unit and ratio, and what a project adds to them."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import msgspec
import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import (
    METRICS,
    Counters,
    Metric,
    Metrics,
    Share,
    derived_name,
    expectations,
)
from dpbench.instruments.torch_profiler.profile_folder import COPIES
from dpbench.results.kernels import KernelCount

DRAM = {"dram_bytes": (2.0, 5.0)}
L2 = {"l2_served_bytes": (1.5, 3.0)}


def test_name_says_the_unit() -> None:
    names = ("dram_bytes", "step_time_seconds", "samples_per_second", "flops")
    assert [METRICS[name].unit for name in names] == ["B", "s", "1/s", "1"]


def test_ratio_has_the_name_without_the_unit() -> None:
    names = ("dram_read_bytes", "l2_served_bytes", "step_time_seconds", "samples_per_second")
    ratios = ["dram_read_ratio", "l2_served_ratio", "step_time_ratio", "samples_ratio"]
    assert [derived_name(name) for name in names] == ratios
    found = [METRICS.find(name) for name in ratios]
    assert [(metric.of, metric.kind) for metric in found if metric] == [(n, "ratio") for n in names]
    assert METRICS.find("nonsense_ratio") is None


def test_l2_bytes_are_what_it_served_and_ratios_are_spelled_out() -> None:
    assert METRICS.find("l2_bytes") is METRICS.every()["l2_served_bytes"]
    for gone in ("l2_ratio", "l2_read_bytes", "l2_write_bytes", "l2_total_bytes"):
        assert METRICS.find(gone) is None
    with pytest.raises(ConfigurationError, match="did you mean l2_served_ratio"):
        expectations(["l2_ratio:1-2"])


def test_what_a_metric_is_made_of_exists() -> None:
    for metric in METRICS.values():
        assert {*metric.parts, *filter(None, [metric.logical])} <= set(METRICS)
    fields = KernelCount.__dataclass_fields__
    assert all(metric.source in fields for metric in METRICS.had_by("ncu_kernels"))
    assert {*COPIES.values()} <= set(METRICS)


# --- added by a project --------------------------------------------------------------------------

OWN = Metric("l1_total_bytes", "L1\ntotal", ("ncu",), Counters(("l1tex__t_bytes.sum",)))


def test_name_means_one_metric() -> None:
    metrics = Metrics([])
    metrics.register(OWN, OWN)
    with pytest.raises(ConfigurationError, match="'l1_total_bytes' exists already; choose"):
        metrics.register(Metric("l1_total_bytes"))


@pytest.mark.parametrize("named", ["OWN", "SEVERAL"])
def test_entry_point_adds_metrics(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("mine", f"{__name__}:{named}", "dpbench.metrics")]
    monkeypatch.setattr("dpbench.core.metrics.entry_points", lambda group: found)
    assert Metrics([])["l1_total_bytes"] == OWN


SEVERAL = [OWN]


# --- what is expected ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], DRAM | L2),
        (["dram_ratio:1-4.5"], {"dram_bytes": (1.0, 4.5)} | L2),
        (["none"], {}),
        (["peak_memory_ratio: 1 - 2", "none"], {"peak_memory_bytes": (1.0, 2.0)}),
    ],
)
def test_expectation_is_set_or_dropped(
    texts: list[str], expected: dict[str, tuple[float, float]]
) -> None:
    assert expectations(texts) == expected


@pytest.mark.parametrize(
    "text", ["dram_ratio", "dram_ratio:2", "dram_ratio:5-2", "dram_ratio:1.2.3-4", ""]
)
def test_expectation_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write a range such as dram_ratio:2-5, or none"):
        expectations([text])


def test_expectation_of_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown ratio 'dram_bytes'; choose from dram_r"):
        expectations(["dram_bytes:2-5"])


# --- of saved runs -------------------------------------------------------------------------------

RATE = Metric("compression_ratio", by=("zip",), how=Share(("packed_bytes", "plain_bytes")))


def test_definition_survives_json() -> None:
    for metric in (*METRICS.values(), OWN, RATE):
        [saved] = json.loads(json.dumps(Metrics([metric]).definitions([metric.name])))
        assert msgspec.convert(saved, Metric) == metric


def test_lent_metric_is_known_as_long_as_it_is_lent_and_replaces_none() -> None:
    metrics = Metrics([OWN])
    with metrics.including([RATE, Metric(OWN.name, "another")]):
        assert [*metrics] == [OWN.name, RATE.name]
        assert metrics[OWN.name] == OWN
        assert metrics.find("compression_ratio") == RATE
        metrics.register(Metric("plain_bytes"))
    assert [*metrics] == [OWN.name, "plain_bytes"]
    assert metrics.find("compression_ratio") is None


def test_metric_without_a_header_is_headed_by_its_name() -> None:
    names = ("energy_joules", "wait_seconds", "l1_total_bytes", "compression_ratio")
    headings = ["energy\nJ", "wait\nms", "l1", "compression ratio"]
    assert [Metric(name).heading for name in names] == headings
