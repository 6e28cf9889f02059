"""Cases of several ranks, for real: gloo, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.instruments.interface import InstrumentError
from dpbench.instruments.timing import Timing
from dpbench.process.messages import Steps
from dpbench.results.rows import STEP


def ranks(trainer: str, parallel: str = "ddp", gpus: int = 2) -> Case:
    return Case(
        trainer, batch_size=4, seq_len=8, model_size="16x8x1x2", parallel=parallel, gpus=gpus
    )


def timing(directory: Path) -> Timing:
    return Timing(directory, device="cpu", steps=Steps(0, 1), timeout=120)


def test_each_rank_has_rows_of_its_own(tmp_path: Path) -> None:
    running = timing(tmp_path).start(ranks("dpsgd_ghost", "fsdp2"))
    rows = running.rows()
    assert {row.rank for row in rows} == {0, 1}
    assert [row.rank for row in rows if (row.phase, row.unit) == (STEP, "s")] == [0, 1]


def test_a_refusal_is_one_line_that_names_the_rank(tmp_path: Path) -> None:
    running = timing(tmp_path).start(ranks("dpsgd", "fsdp2"))
    with pytest.raises(InstrumentError, match=r"rank 0: DPSGDTrainer does not train under .*fsdp2"):
        running.rows()


@pytest.mark.parametrize(("parallel", "gpus"), [("none", 2), ("ddp", 1)])
def test_several_gpus_need_a_way_to_share(parallel: str, gpus: int) -> None:
    with pytest.raises(ConfigurationError, match="train in parallel, ddp or fsdp2"):
        ranks("standard", parallel, gpus)


def test_the_batch_is_that_of_all_ranks() -> None:
    with pytest.raises(ConfigurationError, match="batch size 4 is that of all 3 GPUs"):
        ranks("standard", gpus=3)
