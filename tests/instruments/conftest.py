"""What the tests of instruments share."""

from __future__ import annotations

import pytest

from dpbench.registry import MODELS, TRAINERS


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers and models that a test registers are gone after it."""
    for registry in (TRAINERS, MODELS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
