"""Cards: what is known of each, and how one is found."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from dpbench import ConfigurationError
from dpbench.core.case import PRECISIONS
from dpbench.results.roofline import CARDS, Roofs, find_card

every_card = pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
    ],
)
def test_a_card_is_found_by_its_short_name_and_by_the_drivers(name: str, key: str) -> None:
    assert find_card(name) is CARDS[key]


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H20", "a30", "", "L400"])
def test_another_card_is_never_taken_for_one_that_is_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown card.*a100-40gb.*h200.*rtx4090"):
        find_card(name)


def test_no_two_cards_share_a_name() -> None:
    names = [name for key, card in CARDS.items() for name in (key, *card.devices)]
    assert len(names) == len(set(names))
    assert all(find_card(name) is card for card in CARDS.values() for name in card.devices)


def test_every_figure_has_a_source_of_nvidias() -> None:
    text = (resources.files("dpbench.results") / "cards.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    assert {card["source"] for card in document["cards"].values()} == set(document["sources"])
    assert all("nvidia.com/" in source["url"] for source in document["sources"].values())
    assert [card.source for card in CARDS.values()] == [
        document["sources"][card["source"]]["title"] for card in document["cards"].values()
    ]


@every_card
def test_peaks_are_dense(card: Roofs) -> None:
    """A tensor core does at most 16 times the fp32 rate; twice that would be "with sparsity"."""
    peaks = card.flops
    assert list(peaks) == list(PRECISIONS)
    assert peaks["bf16-amp"] == peaks["bf16"] <= peaks["fp16-amp"]
    if card is not CARDS["t4"]:  # which has neither
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.03)
    assert peaks["fp32"] <= peaks["tf32"]
    assert peaks["tf32"] / peaks["fp32"] < 16


@every_card
def test_units_are_bytes_and_seconds(card: Roofs) -> None:
    assert 3e11 <= card.bandwidth <= 8e12
    assert 5 < card.ridge("fp32") < 120
