"""Measured roofs as a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench import ConfigurationError
from dpbench.results.roofline import Ceilings, read_ceilings
from dpbench.show.kernels import ceilings_table

H200 = Ceilings("NVIDIA H200", 4.2e12, 2**32, {"fp32": 5e13, "tf32": 4e14, "bf16": 7e14}, 8192, "2")


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(H200.as_json())
    assert read_ceilings(path) == H200


def test_measured_roofs_speak_of_their_device_alone() -> None:
    roofs = H200.roofs()
    assert roofs.devices == ("NVIDIA H200",)
    assert roofs.ridge("fp32") == pytest.approx(5e13 / 4.2e12)
    assert roofs.premise == "measured, torch 2"


def test_the_table_holds_them_against_the_data_sheet() -> None:
    cells = {line[0]: line[1:] for line in ceilings_table(H200).cells}
    assert cells["copy, GB/s"] == ["4200.0", "4800", "88%"]
    assert cells["fp32 matrix product, TFLOP/s"] == ["50.0", "67", "75%"]


def test_a_card_without_a_data_sheet_shows_what_was_measured() -> None:
    table = ceilings_table(Ceilings("NVIDIA H20", 3e12, 2**32, H200.flops, 8192, "2"))
    assert table.headers == ["what", "measured"]
    assert "not in dpbench's table" in table.as_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": []}',
        json.dumps({"ceilings": {"device": "x"}}),
        H200.as_json().replace('"bf16"', '"fp8"'),
        H200.as_json().replace("4200000000000.0", "0"),
        H200.as_json().replace("4200000000000.0", "null"),
    ],
)
def test_another_document_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"run\.json: not a document of dpbench ceilings"):
        read_ceilings(path)


def test_a_missing_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.json: No such file"):
        read_ceilings(tmp_path / "none.json")
