"""``dpbench exec --verify``: right scripts pass, and faulty ones fail with one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.child.messages import reported
from dpbench.child.script import run
from dpbench.child.task import Task
from dpbench.commands.cli import main
from dpbench.commands.verify import ScriptChecks
from dpbench.core.subject import Script
from dpbench.instruments.script import ScriptRun
from dpbench.verify.check_result import FAILED, NOT_JUDGED, NOTE, OK, Check
from tests.verify import private_scripts, scripts

Checks = dict[str, Check]
NOTES = {"loss and sampling", "learning rate", "not found", "seed"}
"""What no script can be checked for, and what its readers should know."""


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Checks]]:
    """Run a script for its checks as its own process would, in this one."""
    monkeypatch.chdir(tmp_path)
    Path("private.py").write_text(scripts.PRIVATE, encoding="utf-8")
    handler = signal.getsignal(signal.SIGINT)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def verify_here(*program: str, said: str = "", steps: int = 3) -> Checks:
        checks = ScriptChecks()
        script = ScriptRun(checks, program, skip=0, steps=steps)
        Path("records").unlink(missing_ok=True)
        run(Task(Script("mine"), checks), script, "records")
        outcome = reported(Path("records"))
        assert outcome
        assert said in outcome.message if said else not outcome.message
        return {check["name"]: Check(**check) for check in outcome.details.get("checks", ())}

    yield verify_here
    signal.signal(signal.SIGINT, handler)


def verdicts(checks: Checks, verdict: str) -> set[str]:
    return {name for name, check in checks.items() if check.verdict == verdict} - NOTES


def of_each_kind(cases: Iterable[Any], quick: Iterable[str]) -> list[Any]:
    """Mark scripts as slow, but one of each kind."""
    parameters = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=[] if each[0] in quick else pytest.mark.slow)
        for each in parameters
    ]


RIGHT = [
    "hooks",
    "hooks lora adamw scheduler",
    "hooks accumulate",
    "hooks virtual poisson adamw",
    "hooks dropout",
    "functorch",
    "ew",
    "per-layer",
    "ghost lora adamw",
    "ghost virtual poisson",
]


@pytest.mark.parametrize(
    "how", of_each_kind(RIGHT, ("hooks lora adamw scheduler", "per-layer", "ghost virtual poisson"))
)
def test_right_private_script_passes_every_check(verified: Callable[..., Checks], how: str) -> None:
    checks = verified("private.py", *how.split())
    assert verdicts(checks, OK) | verdicts(checks, NOTE) == checks.keys() - NOTES
    clips = "clipped per layer" if how == "per-layer" else "clipped to 0.1"
    assert clips in checks["gradient"].error_text


@pytest.mark.parametrize("name", of_each_kind(private_scripts.RIGHT, private_scripts.QUICK))
def test_right_way_to_train_privately_passes(verified: Callable[..., Checks], name: str) -> None:
    Path("other.py").write_text(private_scripts.START + private_scripts.RIGHT[name])
    checks = verified("other.py")
    assert verdicts(checks, OK) | verdicts(checks, NOTE) == checks.keys() - NOTES


@pytest.mark.parametrize("name", of_each_kind(private_scripts.WRONG, private_scripts.QUICK))
def test_wrong_way_to_train_privately_does_not_pass(
    verified: Callable[..., Checks], name: str
) -> None:
    check, text = private_scripts.WRONG[name]
    Path("other.py").write_text(private_scripts.START + text)
    checks = verified("other.py")
    found = verdicts(checks, FAILED) | verdicts(checks, NOT_JUDGED)
    assert any(each.startswith(check) for each in found)


def test_clipping_is_judged_only_if_a_norm_exceeds_the_threshold(
    verified: Callable[..., Checks],
) -> None:
    text = private_scripts.MADE.replace("net()", "net(), max_grad_norm=30.0")
    Path("other.py").write_text(private_scripts.START + text + private_scripts.TRAIN)
    checks = verified("other.py", steps=1)
    assert checks["clipping"].error_text == "no norm exceeded the threshold"
    assert verdicts(checks, NOT_JUDGED) == {"clipping"}
    lowered = verified("other.py", steps=2)["gradient"].error_text
    assert "clipped to 30, clipped to" in lowered
    assert lowered.endswith("(lowered for this check)")


def test_rate_that_follows_a_metric_and_a_known_seed_are_said(
    verified: Callable[..., Checks],
) -> None:
    line = "plateau.step(y.float().mean().item())"
    made = "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt.original_optimizer)"
    text = private_scripts.MADE + made + private_scripts.TRAIN + f"    {line}\n"
    Path("other.py").write_text(private_scripts.START + text)
    checks = verified("other.py")
    assert checks["learning rate"].error_text.startswith("ReduceLROnPlateau")
    assert checks["seed"].error_text.startswith("who knows the seed 0")


def test_noise_that_the_steps_used_is_printed_whatever_was_asked_for(
    verified: Callable[..., Checks],
) -> None:
    changed = private_scripts.MADE + "opt.noise_multiplier = 0.5\n" + private_scripts.TRAIN
    Path("other.py").write_text(private_scripts.START + changed)
    said = verified("other.py")["used by the script"].error_text
    assert said == "σ (noise multiplier) = 0.5; C (clipping threshold) = 0.5; B (batch size) = 8"


ONE_BIAS = """
import dpbench
model = net()
private = dpbench.make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of().dataset,
    batch_size=8, max_grad_norm=0.5, noise_multiplier=1.0)
for number, (x, y) in enumerate(private.loader):
    private.step((x, y), lambda m, b: loss_of(m(b[0]), b[1], reduction="none"))
    if number == 1:
        with torch.no_grad():
            model[0].bias.add_(x.mean())
"""


def test_parameter_that_data_changed_first_is_named_although_all_share_memory(
    verified: Callable[..., Checks],
) -> None:
    Path("other.py").write_text(private_scripts.START + ONE_BIAS)
    check = verified("other.py")[private_scripts.TRAINED]
    assert check.error_text == "4 of 4 parameters and buffers"
    assert check.wrong[0].startswith("0.bias from step 2 on, then 3 more")


def test_parameter_that_never_moves_is_named(verified: Callable[..., Checks]) -> None:
    normed = "nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 1), nn.GroupNorm(4, 4), nn.Flatten()"
    Path("other.py").write_text(
        f"{private_scripts.START}\nmodel, loader = net(({normed},)), loader_of()\n"
        f"opt = torch.optim.SGD(model.parameters(), lr=0.1)\n{private_scripts.TRAIN}"
    )
    moved = verified("other.py")["parameters move"]
    said = "7 of 8 in 3 steps; 1.bias: no gradient beyond rounding"
    assert (moved.verdict, moved.error_text) == (OK, said)


ADVERSARIES = """
import torch
from torch import nn
torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
maker = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (critic, maker)]
loss = nn.BCEWithLogitsLoss()
for _ in range(6):
    made = maker(torch.randn(8, 2))
    real = loss(critic(torch.randn(8, 4)), torch.ones(8, 1))
    optimizers[0].zero_grad()
    (real + loss(critic(made.detach()), torch.zeros(8, 1))).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    loss(critic(made), torch.ones(8, 1)).backward()
    optimizers[1].step()
"""


def test_models_that_take_turns_without_privacy_are_only_said_to_have_none(
    verified: Callable[..., Checks],
) -> None:
    Path("other.py").write_text(ADVERSARIES)
    checks = verified("other.py")
    assert verdicts(checks, NOT_JUDGED) == {"clipping and noise"}
    assert not verdicts(checks, FAILED)


@pytest.mark.parametrize(
    "how", of_each_kind(["plain", "plain lora adamw accumulate scheduler"], ["plain"])
)
def test_script_without_privacy_is_said_to_have_none(
    verified: Callable[..., Checks], how: str
) -> None:
    checks = verified("private.py", *how.split())
    assert verdicts(checks, NOT_JUDGED) == {"clipping and noise"}
    assert not verdicts(checks, FAILED)
    assert "only their steps can be checked" in checks["clipping and noise"].error_text
    assert "used by the script" not in checks


FAULTS = [
    (  # as in Opacus #820: it trains, the loss falls, and the adapters stay
        "plain lora new-adapters",
        "optimizer has the parameters",
        "0.down.weight, 0.up.weight: trainable, but in no optimizer that steps; optimizers "
        "have 2 parameters of no called module; the first has the shape 2×6",
    ),
    (
        "plain lora idle-adapters",
        "parameters get gradients",
        "0.down.weight, 0.up.weight, 2.down.weight and 1 more: no gradient in 3 steps",
    ),
    (
        "hooks half-forgotten",
        "optimizer has the parameters",
        "4.bias: trainable, but in no optimizer that steps",
    ),
    (
        "hooks tiny-rate",
        "parameters move",
        "0.weight, 0.bias, 2.weight and 3 more: has a gradient, but did not change in 3 steps",
    ),
    ("hooks lora thaws", "frozen parameters stay", "0.layer.weight: is frozen, but changes"),
    (
        "hooks bypass",
        "clipping and noise",
        "SGD steps instead of the optimizer that make_private returns",
    ),
    (
        "hooks unclipped",
        "gradient",
        "0.weight, 0.bias, 2.weight and 3 more: the mean of gradients that are not clipped",
    ),
    (  # as in NeMo Safe-Synthesizer #518: ghost clipping against hooks under accumulation
        "ghost accumulate",
        "gradient",
        "0.weight, 0.bias, 2.weight and 3 more: the mean over only the last of 2 backward passes",
    ),
]


@pytest.mark.parametrize(
    ("how", "check", "line"),
    of_each_kind(FAULTS, ("plain lora new-adapters", "hooks lora thaws", "ghost accumulate")),
)
def test_fault_is_one_line(
    verified: Callable[..., Checks], how: str, check: str, line: str
) -> None:
    checks = verified("private.py", *how.split())
    assert verdicts(checks, FAILED) == {check}
    assert checks[check].wrong == [line]


def test_noise_that_is_too_small_fails_and_the_gradient_beneath_it_passes(
    verified: Callable[..., Checks],
) -> None:
    checks = verified("private.py", "hooks", "little-noise")
    assert verdicts(checks, FAILED) == {"noise: deviation"}
    assert "times the deviation σC/B" in checks["noise: deviation"].wrong[0]
    assert checks["gradient"].verdict == OK


@pytest.mark.parametrize(
    ("how", "check", "why"),
    [
        ("noiseless", "noise", "σ is 0"),
        ("hooks random", "gradient", "its layers mix examples, or are random"),
    ],
)
def test_what_cannot_be_checked_is_named(
    verified: Callable[..., Checks], how: str, check: str, why: str
) -> None:
    checks = verified("private.py", *how.split())
    assert not verdicts(checks, FAILED)
    assert checks[check].verdict == NOT_JUDGED
    assert why in checks[check].error_text


def test_script_that_fails_by_itself_has_no_checks(verified: Callable[..., Checks]) -> None:
    said = "the script failed with ValueError: Module parameters are different than optimizer"
    assert verified("private.py", "lora", "new-adapters", said=said) == {}


def test_exit_status_says_whether_gradients_were_compared_and_right(
    verified: Callable[..., Checks],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tests.commands.test_exec import ProcessHere

    here = SimpleNamespace(Popen=ProcessHere)
    monkeypatch.setattr("dpbench.instruments.script.subprocess", here)
    verify = ["exec", "--verify", "--skip=0", "--steps=2"]
    for how, status in (("hooks", 0), ("unclipped", 1), ("plain", 1), ("noiseless", 1)):
        assert main([*verify, "private.py", *how.split()]) == status
        assert "verify private" in capfd.readouterr().out
    assert main([*verify, "--json=run.json", "private.py"]) == 2
    assert "--verify measures and saves nothing, so leave out --json" in capfd.readouterr().err
