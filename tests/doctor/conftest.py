"""The doctor's own trainer must not stay among those that other tests go through."""

from __future__ import annotations

import pytest

from dpbench.registry import TRAINERS


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
