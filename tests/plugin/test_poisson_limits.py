"""A limit on a step of Poisson batches is checked only for the same batches."""

from __future__ import annotations

import pytest

from dpbench.commands.cli import main
from tests.plugin.conftest import RunSuite

SUITE = """
import os

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
drawn = torch.Generator().manual_seed(int(os.environ["SEED"]))
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=16, generator=drawn),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
batches = iter(loader)


def step():
    inputs, labels = next(batches)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_step(logical_io):
    logical_io(step)
"""
LIMIT = ("--dpbench-compare=r.json", "--dpbench-compare-fail=logical_bytes:90%")


@pytest.mark.parametrize(("seed", "failed"), [("1", 0), ("2", 1)])
def test_a_limit_is_not_checked_for_batches_of_other_sizes(
    project: RunSuite,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    seed: str,
    failed: int,
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    monkeypatch.setenv("SEED", "1")
    project("--dpbench-json=r.json").assert_outcomes(passed=1)
    monkeypatch.setenv("SEED", seed)
    result = project(*LIMIT)
    result.assert_outcomes(passed=1 - failed, failed=failed)
    said = "was not checked for test_suite.py::test_step:step: batches are Poisson samples"
    assert (said in result.stdout.str()) == bool(failed)


def test_a_number_that_was_not_checked_is_neither_exceeded_nor_kept(
    project: RunSuite,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    for seed in ("1", "2"):
        monkeypatch.setenv("SEED", seed)
        project(f"--dpbench-json={seed}.json").assert_outcomes(passed=1)
    for pair in (["1.json", "2.json"], ["2.json", "1.json"]):  # more bytes, and fewer
        capsys.readouterr()
        assert main(["compare", *pair, "--fail=logical_bytes:0.1%"]) == 1
        shown = capsys.readouterr()
        cells = [line.split("  ")[-1].strip() for line in shown.out.splitlines()]
        assert cells.count("not checked") == 1
        assert not [cell for cell in cells if cell.startswith("0.1%")]
        assert "steps of tests, logical on " in shown.out
        assert "regression" not in shown.err
        assert "logical_bytes:0.1% was not checked for test_suite.py::test_step" in shown.err
        assert "--steps" not in shown.out + shown.err
