"""What cannot fit a GPU is refused before it costs GPU time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpbench.case import Case
from dpbench.gpu import Gpu
from dpbench.instruments.fit import DoesNotFit, check_fits, predicted_peak_bytes
from dpbench.results.outcome import NOT_TRIED

CASE = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")


def gpu(memory_bytes: int | None) -> Gpu:
    return Gpu("GPU-0", "NVIDIA H200", memory_bytes, "580")


def test_a_case_is_refused_if_its_tensors_alone_exceed_the_memory() -> None:
    needed = predicted_peak_bytes(CASE)
    check_fits(CASE, gpu(needed))
    with pytest.raises(DoesNotFit, match=r"does not fit: needs about .* GB of .* GB"):
        check_fits(CASE, gpu(needed - 1))


def test_the_message_has_sizes_as_people_read_them() -> None:
    case = Case("standard", batch_size=128, seq_len=256, model_size="medium")
    with pytest.raises(DoesNotFit, match=r"needs about [1-9]\d GB of 2 GB"):
        check_fits(case, gpu(2_000_000_000))


def test_results_know_the_error_of_a_skipped_case_by_its_name() -> None:
    assert DoesNotFit.__name__ == NOT_TRIED


@pytest.mark.parametrize("unknown", [None, gpu(None)])
def test_nothing_is_refused_where_the_memory_is_unknown(unknown: Gpu | None) -> None:
    check_fits(Case("dpsgd", batch_size=4096, seq_len=1024), unknown)


def test_an_outside_trainer_that_ends_its_process_takes_nothing_with_it() -> None:
    check_fits(Case("ends=tests.instruments.test_fit:EndsItsProcess", 4, 64, "tiny"), gpu(1))


def test_an_outside_trainer_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    same = Case("same=dpbench.training.standard:StandardTrainer", 4, 64, "tiny")
    with pytest.raises(DoesNotFit):
        check_fits(same, gpu(1))
    assert not (tmp_path / "summary.md").exists(), "what it counts is no result of the session"


class EndsItsProcess:
    """A trainer that nobody survives."""

    def __init__(self, model: object, **options: object) -> None:
        os._exit(3)
