"""Options of the PyTorch profiler that it cannot work with."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.plugin.conftest import replay_gpus


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with one GPU; nothing here runs on it."""
    handler = signal.getsignal(signal.SIGTERM)  # a session that measures sets its own
    replay_gpus(monkeypatch)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--dpbench-profile-schedule=active=0", "active must be"),
        ("--dpbench-profile-threshold=-1", "threshold must be"),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_what_cannot_work_is_one_line(pytester: pytest.Pytester, option: str, words: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^dpbench: .*{words}"):
        pytester.parseconfigure("--dpbench-instrument=torch_profiler", option)
