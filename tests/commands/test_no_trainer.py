"""Each command says in one line that a class is no trainer, and leaves no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench.commands.cli import main

SIZE = ["--batch-size=4", "--seq-len=8", "--model-size=99x16x1x2"]
MODULE = """
import torch

class Duck:
    \"\"\"Trains, and has all that a trainer is called for.\"\"\"

    def __init__(self, model, *, batch_size, **options):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(self, batch):
        loss = self.model(batch[0]).float().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
"""


@pytest.fixture(autouse=True)
def duck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("of_a_duck.py").write_text(MODULE)
    yield
    sys.modules.pop("of_a_duck", None)


@pytest.mark.usefixtures("counted_here")
@pytest.mark.parametrize(
    "words",
    [
        ["smoke"],
        ["verify", "--device=cpu", "--micro-batches=1"],
        ["run", "--instrument=logical"],
        pytest.param(["run", "--instrument=timing", "--device=cpu"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_is_no_trainer_is_told_so(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *SIZE, "--trainer=of_a_duck:Duck"]) != 0
    said = capsys.readouterr()
    everything = " ".join((said.out + said.err).split())
    assert "is the class Duck, which is no TrainerBase" in everything
    assert "AttributeError" not in everything
    assert "Traceback" not in everything
