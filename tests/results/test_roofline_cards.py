"""Cards: what is known of each, and how one is found."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from dpbench import ConfigurationError
from dpbench.core.case import PRECISIONS
from dpbench.results.roofline import CARDS, find_card


def test_a_card_is_found_by_its_short_name_and_by_the_drivers() -> None:
    names = {
        "H200": "h200",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
        "NVIDIA H100 80GB HBM3": "h100",
        "RTX 4090": "rtx4090",
    }
    for name, key in names.items():
        assert find_card(name) is CARDS[key]


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H20", "", "L400"])
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


def test_peaks_are_dense_and_units_are_bytes_and_seconds() -> None:
    """A tensor core does at most 16 times the fp32 rate; twice that would be "with sparsity"."""
    for key, card in CARDS.items():
        peaks = card.flops
        assert list(peaks) == list(PRECISIONS), key
        assert peaks["bf16-amp"] == peaks["bf16"], key
        if key != "t4":  # which has neither
            assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.03), key
        assert peaks["fp32"] <= peaks["tf32"] < 16 * peaks["fp32"], key
        assert 3e11 <= card.bandwidth <= 8e12, key
        assert 5 < card.ridge("fp32") < 120, key
