"""What a limit must see of scripts: which one it was, work in other threads, batches' sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.conditions import SAME_BATCHES
from dpbench.results.kernels import ELSEWHERE, STEP_LOST
from dpbench.results.schema import parsed
from tests.commands.test_exec import ProcessHere, processes_here

__all__ = ["ProcessHere", "processes_here"]

pytestmark = pytest.mark.usefixtures("processes_here")

LOOP = """
import os, sys, threading
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
SIZES, HOW = {sizes}, {how!r}

def clip():
    for _ in range({clips}):
        model.weight.grad.clone()

def in_fork():
    if not (child := os.fork()):
        try:
            clip()
        finally:
            os._exit(0)
    os.waitpid(child, 0)

def in_thread(thread):
    thread.start()
    thread.join()

ways = {{
    "here": clip,
    "thread": lambda: in_thread(threading.Thread(target=clip)),
    "fork": in_fork,
}}
batches = [torch.randn(size, 64) for size in SIZES]
for batch in batches:
    model(batch).square().mean().backward()
    ways[HOW]()
    optimizer.step()
    optimizer.zero_grad()
"""

EXEC = ["exec", "--instrument=logical", "--skip=1", "--steps=2"]
LIMIT = "--compare-fail=logical_bytes:1%"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write(path: str, how: str = "here", clips: int = 1, sizes: str = "[8] * 5") -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(LOOP.format(how=how, clips=clips, sizes=sizes))


@pytest.mark.repeats
@pytest.mark.parametrize("how", ["thread", pytest.param("fork", marks=pytest.mark.slow)])
def test_work_of_other_threads_and_forks_is_noted_and_no_limit_passes_on_it(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write("train.py", "here", clips=30)
    assert main([*EXEC, "--save=here", "train.py"]) == 0
    write("train.py", how, clips=30)
    assert main([*EXEC, "--save=elsewhere", LIMIT, "--compare=1", "train.py"]) == 1
    assert f"train: {ELSEWHERE}" in " ".join(capfd.readouterr().out.split())
    write("train.py", how, clips=900)
    assert main([*EXEC, LIMIT, "--compare=2", "train.py"]) == 1  # both lack it
    said = f"was not checked for train: {ELSEWHERE} in this session"
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_another_file_is_another_subject_unless_it_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a/train.py")
    write("b/train.py", clips=40)
    for script in ("a/train.py", "b/train.py"):
        assert main([*EXEC, "--autosave", script]) == 0
    write("a/train.py", clips=20)
    assert main([*EXEC, "--autosave", LIMIT, "a/train.py"]) == 1
    assert "logical_bytes@step of a/train: " in capfd.readouterr().err
    assert main([*EXEC, LIMIT, "--compare=2", "a/train.py"]) == 1
    assert "was not checked for a/train: " in capfd.readouterr().err
    monkeypatch.chdir("b")
    assert main([*EXEC, "--storage=../.dpbench", LIMIT, "train.py"]) == 0
    monkeypatch.chdir("..")
    same = [*EXEC, "--name=train"]
    assert main([*same, "--save=named", "b/train.py"]) == 0
    assert main([*same, LIMIT, "a/train.py"]) == 0
    assert main([*EXEC, LIMIT, "-m", "a.train"]) == 2  # by another name, too


def test_the_name_of_the_reference_s_script_is_said_if_it_is_another(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write("b/train.py")
    assert main([*EXEC, "--name=train", "--json=bytes.json", "b/train.py"]) == 0
    compared = [*EXEC, LIMIT, "--compare=bytes.json"]
    assert main([*compared, "b/train.py"]) == 1
    remedy = "if b/train is the same, name it with --name"
    assert f"bytes has train: {remedy}" in capfd.readouterr().err
    assert main([*compared, "--name=train", "b/train.py"]) == 0
    assert "name it" not in capfd.readouterr().err


@pytest.mark.slow
def test_batches_of_different_sizes_are_said_where_a_limit_or_ratio_uses_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    differ = "one step has up to 25% more arithmetic in forward than another"
    write("train.py", sizes="[8, 8, 10, 8, 8]")
    write("plain.py")
    assert main([*EXEC, "--save=poisson", "train.py"]) == 0
    assert main([*EXEC, "--save=plain", "plain.py"]) == 0
    limited = [*EXEC, "--compare=1", "--compare-fail=logical_bytes:50%", "train.py"]
    assert main(limited) == 0
    assert "differ in size" not in capfd.readouterr().err  # both runs have the same batches
    write("train.py", sizes="[8, 10, 8, 8, 8]")
    assert main(limited) == 0
    assert capfd.readouterr().err.count(differ) == 1
    write("train.py", sizes="[8, 8, 10, 8, 8]")
    for number, script, whose in (
        (1, "plain.py", "the baseline's"),
        (2, "train.py", "the script's"),
    ):
        ratio = [f"--baseline={number}", "--json=ratio.json"]
        assert main([*EXEC, *ratio, script]) == 0
        assert f"no ratio to the baseline: only {whose} batches" in capfd.readouterr().err
        assert not parsed(Path("ratio.json").read_bytes())["ratios"]


DRAWN = """
import sys
import torch
torch.manual_seed(0)
sizes = iter(map(int, sys.argv[1].split(",")))
class PoissonSizes(torch.utils.data.Sampler):
    def __iter__(self):
        for size in sizes:
            yield range(size)
data = torch.randn(64, 64)
loader = torch.utils.data.DataLoader(data, batch_sampler=PoissonSizes())
model = torch.nn.Linear(64, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, ahead = iter(loader), "ahead" in sys.argv
following = next(batches) if ahead else None
while True:
    batch, following = following, next(batches, None)
    batch = batch if ahead else following
    if batch is None:
        break
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Draws batches of the sizes in its first argument. With ``ahead``, fetches each a step early."""


@pytest.mark.parametrize("instrument", ["logical", "timing"])
def test_mean_steps_of_near_sizes_are_divided_with_a_note_and_others_are_not(
    instrument: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("drawn.py").write_text(DRAWN)
    exec_ = ["exec", f"--instrument={instrument}", "--skip=1", "--steps=2"]

    def noted(sizes: str, *more: str) -> str:
        private = ["--name=private", "--baseline=plain.json", "--json=private.json"]
        assert main([*exec_, *private, "drawn.py", sizes, *more]) == 0
        shown = capfd.readouterr()
        has_ratios = bool(parsed(Path("private.json").read_bytes())["ratios"])
        assert has_ratios == ("÷ plain" in shown.out) == ("no ratio" not in shown.err)
        return " ".join((shown.out + shown.err).split())

    assert main([*exec_, "--name=plain", "--json=plain.json", "drawn.py", "32,32,32,32"]) == 0
    assert "÷" not in capfd.readouterr().out
    near = "batches differ in size: the ratios compare mean steps, of 33.5 and 32.0 examples"
    assert near in noted("50,30,37,32")
    assert main(["show", "private.json"]) == 0
    assert near in " ".join(capfd.readouterr().out.split())
    far = noted("50,30,42,32")
    assert "mean steps have 36.0 and 32.0 examples, which is more than 10% apart: " in far
    assert f"record more --steps, or {SAME_BATCHES}" in far
    assert "how their mean steps compare is unknown" in noted("30,37,32,30,30", "ahead")


def test_a_limit_on_a_ratio_says_that_the_scripts_drew_other_batches(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("drawn.py").write_text(DRAWN)
    assert main([*EXEC, "--name=plain", "--json=plain.json", "drawn.py", "32,32,32,32"]) == 0
    private = [*EXEC, "--name=private", "--baseline=plain.json"]
    assert main([*private, "--json=private.json", "drawn.py", "32,30,33,32"]) == 0
    capfd.readouterr()
    limit = ["--compare=private.json", "--compare-fail=logical_ratio:1%"]
    assert main([*private, *limit, "drawn.py", "32,30,33,32"]) == 0
    note = "private: batches differ in size: the ratios compare mean steps, of 31.5 and 32.0"
    said = capfd.readouterr().err
    assert f"dpbench exec: this session: {note}" in said
    assert "one step has" not in said  # the same batches were drawn in both runs
    assert main(["compare", "private.json", "private.json"]) == 0
    assert note in " ".join(capfd.readouterr().out.split())


def test_a_limit_without_ratios_says_nothing_of_the_baseline_that_the_reference_had(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write("plain.py")
    write("train.py", clips=3)
    assert main([*EXEC, "--json=plain.json", "plain.py"]) == 0
    assert main([*EXEC, "--baseline=plain.json", "--json=bytes.json", "train.py"]) == 0
    capfd.readouterr()
    assert main([*EXEC, "--compare=bytes.json", LIMIT, "train.py"]) == 0
    assert capfd.readouterr().err == "dpbench exec: compared with bytes\n"


EVALUATING = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
every = int(sys.argv[1])
x, y = torch.randn(640, 64), torch.randint(8, (640,))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    of_step = slice(32 * step, 32 * step + 32)
    nn.functional.cross_entropy(model(x[of_step]), y[of_step]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if every and (step + 1) % every == 0:
        with torch.no_grad():
            evaluated = model(x.repeat(20, 1)).softmax(1)
            del evaluated
"""


@pytest.mark.parametrize("every", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_operators_and_memory_are_of_all_counted_steps_and_what_changed_is_listed(
    every: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """An evaluation lies in the third or in the last of the counted steps."""
    Path("train.py").write_text(EVALUATING)
    exec_ = ["exec", "--instrument=logical", "--skip=1", "--steps=4"]
    assert main([*exec_, "--json=before.json", "train.py", "0"]) == 0
    assert "What changed most" not in capfd.readouterr().out
    told = [*exec_, "--json=after.json", "--compare=before.json", "--name=train"]
    assert main([*told, "train.py", str(every)]) == 0
    shown = capfd.readouterr().out
    assert "What changed most:\n  train outside: aten." in shown
    moved = "memory at the peak, which moved from backward to outside"
    assert f"  train step: {moved} +" in shown
    assert ": memory of " not in shown
    assert main(["compare", "before.json", "after.json"]) == 0
    assert "What changed most:\n  train outside: aten." in capfd.readouterr().out
    after = parsed(Path("after.json").read_bytes())
    whole = [row for row in after["rows"] if row["phase"] == "step"]
    for metric, field in {
        "logical_read_bytes": "read_bytes",
        "logical_write_bytes": "write_bytes",
        "flops": "flops",
    }.items():
        of_steps = [row["value"] for row in whole if row["metric"] == metric]
        assert len({*of_steps}) > 1
        assert sum(each[field] for each in after["operators"]) == pytest.approx(sum(of_steps) / 4)
    largest = max(row["value"] for row in whole if row["metric"] == "peak_memory_bytes")
    assert sum(line["held_bytes"] for line in after["memory_lines"]) == largest > 3e6
    assert after["summary"][0]["logical_peak_memory_bytes"] == largest


def test_a_gate_fails_on_a_step_that_was_not_counted(capfd: pytest.CaptureFixture[str]) -> None:
    write("train.py")
    assert main([*EXEC, "--save=one", "train.py"]) == 0
    text = Path("train.py").read_text()
    taken = "    if number == 2: torch._C._pop_torch_dispatch_stack(None)\n"
    text = text.replace("for batch in batches:", "for number, batch in enumerate(batches):")
    Path("train.py").write_text(text.replace("    ways[HOW]()\n", f"{taken}    ways[HOW]()\n"))
    assert main([*EXEC, LIMIT, "--save=two", "--compare=1", "train.py"]) == 1
    shown = capfd.readouterr()
    assert f"{STEP_LOST}: counted step 2" in " ".join(shown.out.split())
    assert "was not checked for train: 0001_one has 2 steps, but this session has 1" in shown.err
    assert main([*EXEC, LIMIT, "--compare=2", "train.py"]) == 1  # both lack it
    assert f"was not checked for train: {STEP_LOST}" in capfd.readouterr().err
