"""Every built-in private trainer passes verify as people train: LoRA, AdamW, Poisson and others."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.commands.verify import run_checks
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.registry import TRAINERS, resolve

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"trainable": "lora:2"},
    "adamw": {"optimizer": "adamw"},
    "momentum": {"optimizer": "momentum"},
    "checkpointing": {"activation_checkpointing": "on"},
    "micro-batches": {"micro_batches": 2},
    "poisson": {"sampling": "poisson"},
}
PRIVATE = [name for name in TRAINERS if name != BASELINE_TRAINER]
QUICK = [("fused", "lora"), ("fused", "poisson")]
CANCELLING = ("dpsgd_ghost", "dpsgd_fgc")
"""Opacus's ghost norms cancel where tokens are alike, which is known."""


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("trainer", "setting"),
    [
        pytest.param(name, setting, marks=[] if (name, setting) in QUICK else pytest.mark.slow)
        for setting in SETTINGS
        for name in PRIVATE
    ],
)
def test_private_trainers_pass_at_each_setting(trainer: str, setting: str) -> None:
    tiny: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "model_size": "50x64x1x2"}
    checks = run_checks(resolve(Case(trainer, **tiny | SETTINGS[setting])), "cpu")
    known = {"tokens alike"} if trainer in CANCELLING else set()
    assert len(checks) > len(known)
    assert not [(c.name, c.wrong) for c in checks if not c.passed and c.name not in known]
