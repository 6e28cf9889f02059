"""``--dpbench-profile``: what the PyTorch profiler is told."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench.gpu import Gpu
from dpbench.instruments import ncu, timing, torch_profiler
from dpbench.instruments.torch_profiler import TorchProfiler
from dpbench.plugin import manager
from dpbench.plugin.manager import NAME
from dpbench.schedule import Schedule


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with one GPU; nothing here runs on it."""
    handler = signal.getsignal(signal.SIGTERM)  # a session that measures sets its own
    for module in (ncu, timing, torch_profiler, manager):
        monkeypatch.setattr(module, "visible_gpus", lambda: [Gpu("GPU-0", "H200", None, "580")])
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("one_gpu")
def test_the_options_reach_the_instrument(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfigure(
        *("--ncu", f"--ncu-path={sys.executable}", "--dpbench-profile"),
        "--dpbench-profile-dir=profiles",
        "--dpbench-profile-schedule=wait=2,active=3",
        "--dpbench-profile-threshold=5",
        "--dpbench-timeout=60",
    )
    chosen = config.pluginmanager.getplugin(NAME).instruments
    assert [instrument.name for instrument in chosen] == ["timing", "ncu", "torch_profiler"]
    folder = Path(pytester.path / "profiles")
    schedule = Schedule(wait=2, active=3)
    assert chosen[-1] == TorchProfiler(folder, "cuda", schedule, threshold=5.0, timeout=60.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dpbench-profile"], "--dpbench-profile profiles the cases that --ncu measures"),
        (["--ncu", "--dpbench-profile", "--dpbench-profile-schedule=active=0"], "active must be"),
        (["--ncu", "--dpbench-profile", "--dpbench-profile-threshold=-1"], "threshold must be"),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_what_cannot_work_is_one_line(
    pytester: pytest.Pytester, arguments: list[str], words: str
) -> None:
    with pytest.raises(pytest.UsageError, match=f"^dpbench: .*{words}"):
        pytester.parseconfigure(f"--ncu-path={sys.executable}", *arguments)
