"""What commands say would work, works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from tests.commands.test_exec import processes_here
from tests.named import target
from tests.training.test_refusals import Sequences

__all__ = ["processes_here"]

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=parser.parse_args().lr)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""

TRAINER = "run --trainer=standard --batch-size=4 --seq-len=8 --model-size=50x16x1x2"


@pytest.mark.usefixtures("processes_here", "counted_here")
@pytest.mark.parametrize(
    ("before", "bad", "code", "said", "remedies"),
    [
        (
            "",
            "exec train.py --json run.json",
            1,
            "the script was given --json: options of dpbench exec go before the script",
            ["exec --json run.json train.py --lr 0.2"],
        ),
        (
            f"{TRAINER} --instrument=logical --save=trained",
            "exec --baseline 1 train.py",
            2,
            "0001_trained.json has no script; name a run of one script, which dpbench exec --save",
            ["exec --save plain train.py", "exec --baseline 2 --name other train.py"],
        ),
        ("", "show /absent.ncu-rep", 2, "dpbench show: /absent.ncu-rep: no such file", []),
    ],
    ids=["options after the script", "a trainer as baseline", "no report"],
)
def test_a_remedy_works(
    before: str,
    bad: str,
    code: int,
    said: str,
    remedies: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert not before or main(shlex.split(before)) == 0
    assert main(shlex.split(bad)) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert [main(shlex.split(remedy)) for remedy in remedies] == [0] * len(remedies)


class Crops(Sequences):
    """Each example has three crops, and its loss is their mean."""

    def losses(self, model, batch):  # type: ignore[no-untyped-def]
        crops = batch[:, None].expand(-1, 3, -1, -1).flatten(0, 1)
        return model(crops).flatten(1).square().mean(1).view(-1, 3).mean(1)


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
def test_advice_names_no_method_that_clips_crops_and_says_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainers = ["--trainer=dpsgd", "--trainer=micro_batch"]
    case = [f"--workload={target(Crops)}", "--batch-size=32", "--gpu=h100"]
    assert main(["advise", *case, *trainers]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    change, _, use = shown.partition(" As it is: ")
    assert change.startswith(
        "Change the model first: `dpsgd` refuses: Opacus cannot train parameter"
    )
    assert "it has 96 per-sample gradients for 32 examples" in change
    assert use.startswith("Use `micro_batch`: ")
    amounts = shown.partition("A standard step has ")[2].partition(" launches")[0]
    assert re.fullmatch(r"[1-9][\d.]+ kB, [1-9][\d.]* MFLOP, \d+", amounts)
