"""A script under Nsight Compute on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.core.settings import Settings
from dpbench.core.subject import Script
from dpbench.instruments import choose
from dpbench.instruments.script import ScriptRun

pytestmark = pytest.mark.gpu

SHORT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for (batch,) in DataLoader(TensorDataset(torch.randn(32, 2048)), batch_size=16):
    optimizer.zero_grad()
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
"""


def test_a_script_that_ends_within_a_step_has_the_steps_before_it(tmp_path: Path) -> None:
    """Its loader finds out that it is empty where a further step begins."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    [ncu] = choose(["ncu"], Settings(ncu_dir=tmp_path), "script")
    run = ScriptRun(ncu, (str(script),), skip=0, steps=5)
    rows = run.measure(Script("short")).rows
    phases = {(row.repeat, row.phase) for row in rows}
    parts = ("forward", "backward", "optimizer", "outside", "step")
    assert phases == {(step, part) for step in (0, 1) for part in parts}
