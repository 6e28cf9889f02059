"""The payload of NVLink, by an NVML that says what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from dpbench.instruments.cupti.target import ALL_LINKS, FIELDS, RECEIVED, SENT, payload_of

UUID = "GPU-1"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What NVML answers by field: a number of KiB, or the code of an error."""
    answers: dict[int, Any] = {}

    def fields(handle: object, asked: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert handle == f"handle of {UUID}"
        assert {scope for _, scope in asked} == {ALL_LINKS}
        return [
            SimpleNamespace(
                nvmlReturn=answers.get("code", 0), value=SimpleNamespace(ullVal=answers[field])
            )
            for field, _ in asked
        ]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: f"handle of {uuid}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", fields)
    return answers


def test_sent_and_received_are_fields_of_nvml_in_kib(said: dict[int, Any]) -> None:
    said |= {138: 10_485_764, 139: 4}
    read, note = payload_of(UUID)
    assert read() == {SENT: 10_485_764 * 1024, RECEIVED: 4096}
    said[138] += 1
    assert read()[SENT] == 10_485_765 * 1024
    assert note == ""
    assert [*FIELDS.values()] == [138, 139]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "'Not Supported'"), (4, "'Insufficient Permissions'")]
)
def test_a_refusal_of_a_field_is_one_line(said: dict[Any, Any], code: int, words: str) -> None:
    said |= {138: 0, 139: 0, "code": code}
    read, note = payload_of(UUID)
    assert read() == {}
    assert note == f"NVLink payload is not counted: NVML reports {words} for {UUID}"


def test_a_gpu_that_nvml_does_not_know_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert payload_of(UUID) == (
        dict,
        f"NVLink payload is not counted: NVML reports 'Driver Not Loaded' for {UUID}",
    )
