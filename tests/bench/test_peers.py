"""Other people's private training does under dpbench what it says, where it is installed."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.verify import run_checks
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.observe import observe
from dpbench.verify.check_result import Check

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "model_size": "50x16x1x2"}
FASTDP = "bench.peers.fastdp:FastDPTrainer"
BACKPACK = "bench.peers.backpack:BackPACKTrainer"
JAX = "bench.peers.jax_transformer:JaxPrivacyTrainer"


def needs(module: str) -> pytest.MarkDecorator:
    missing = find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"no {module}: bench/peers/README.md installs it")


fastdp, backpack, jax_privacy = map(needs, ("fastDP", "backpack", "jax_privacy"))


@cache
def checks_of(trainer: str, **axes: Any) -> list[Check]:
    usual = {} if "workload" in axes else TINY
    return run_checks(resolve(Case(trainer, **({"micro_batches": 2} | usual | axes))), "cpu")


def wrong(trainer: str, **axes: Any) -> dict[str, list[str]]:
    return {check.name: list(check.wrong) for check in checks_of(trainer, **axes) if check.wrong}


@fastdp
@pytest.mark.parametrize(
    "parameters",
    ["", ":clipping_style=param-wise", ":clipping_mode=ghost", ":origin_params=embedding"],
)
def test_fastdp_clips_as_it_says(parameters: str) -> None:
    assert not wrong(FASTDP + parameters)


@fastdp
def test_fastdp_keeps_per_sample_gradients_of_long_sequences_and_clips_them_as_well() -> None:
    assert not wrong(FASTDP, seq_len=20)  # 2 T² is more than a weight has elements


@fastdp
def test_fastdp_passes_with_adamw() -> None:
    assert not wrong(FASTDP, optimizer="adamw")


@fastdp
def test_fastdps_default_takes_1_for_the_threshold() -> None:
    trainer = f"{FASTDP}:clipping_fn=automatic"
    deviation = next(check for check in checks_of(trainer) if check.name == "noise: deviation")
    times = [float(line.split(": ")[1].split()[0]) for line in deviation.wrong]
    assert sorted(times)[len(times) // 2] == pytest.approx(1 / 0.7, rel=0.05)
    assert "gradient, half clipped" in wrong(trainer)


@fastdp
def test_fastdp_leaves_an_embedding_that_is_no_origin_as_it_is() -> None:
    said = wrong(f"{FASTDP}:origin_params=token_embedding")
    assert "position_embedding.weight: does not move" in said["gradient, half clipped"]
    assert said["noise: deviation"] == ["position_embedding.weight: no noise"]


@fastdp
def test_fastdps_noise_is_counted_in_backward() -> None:
    counted = Logical().count(resolve(Case(FASTDP, **TINY)))
    assert counted.labels == {"clips": "flat", "noise": "in backward"}
    drawn = {each.phase for each in counted.operators if each.operator == "aten.normal"}
    assert drawn == {"backward"}


@backpack
def test_backpack_clips_as_it_says() -> None:
    assert not wrong(BACKPACK)


@backpack
@pytest.mark.filterwarnings("ignore:Extension saving to grad_batch")
def test_a_layer_without_rule_is_named() -> None:
    words = "no per-sample gradients of weight"
    with pytest.raises(DpbenchError, match=words):
        checks_of(BACKPACK, workload="layer:layer=groupnorm,width=32,length=4", batch_size=4)


@backpack
def test_backpack_compares_ids_with_each_row_of_an_embedding() -> None:
    counted = Logical().count(resolve(Case(BACKPACK, **TINY)))
    [compared] = (each for each in counted.operators if each.operator == "aten.eq")
    assert compared.calls == 50 + 1024  # of tokens, of positions


@jax_privacy
def test_jax_privacy_clips_as_it_says() -> None:
    assert not wrong(JAX, micro_batches=1)


@jax_privacy
def test_steps_in_jax_are_observed() -> None:
    import jax

    from bench.peers.jax_transformer import PrivateSteps, in_jax
    from dpbench import ModelSize, SimpleBigModel, get_random_dataloader

    steps = PrivateSteps(SimpleBigModel(ModelSize.parse("50x16x1x2")), batch_size=4)
    [batch, *_] = get_random_dataloader(batch_size=4, seq_len=8, vocab_size=50)
    with observe("timing", skip=1, steps=2) as seen:
        for _ in range(3):
            with seen.step():
                jax.block_until_ready(steps.step(*map(in_jax, batch)))
    assert seen.report.value("step_time_seconds") > 0


def test_the_tables_of_the_readme_are_those_that_verify_printed() -> None:
    readme = (ROOT / "bench/peers/README.md").read_text(encoding="utf-8")
    printed = (ROOT / "docs/results/verify-peers.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.M | re.S)
    tables = [text for language, text in blocks if not language]
    assert len(tables) == 3
    assert [table for table in tables if table not in printed] == []
