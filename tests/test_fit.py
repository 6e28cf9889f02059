"""What cannot fit a GPU is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbench.case import Case
from dpbench.gpu import Gpu
from dpbench.instruments.base import CaseFailed
from dpbench.instruments.logical.instrument import Counting, Logical
from dpbench.results.outcome import NOT_TRIED
from dpbench.results.rows import Measurement
from dpbench.runner import DoesNotFit, check_fits

pytestmark = pytest.mark.usefixtures("counted_here")

CASE = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")


def gpu(memory_bytes: int | None) -> Gpu:
    return Gpu("GPU-0", "NVIDIA H200", memory_bytes, "580")


def test_a_case_is_refused_if_its_tensors_alone_exceed_the_memory() -> None:
    needed = max(int(r.value) for r in Logical().measure(CASE) if r.metric == "peak_memory_bytes")
    check_fits(CASE, gpu(needed))
    with pytest.raises(DoesNotFit):
        check_fits(CASE, gpu(needed - 1))


def test_the_message_has_sizes_as_people_read_them() -> None:
    case = Case("standard", batch_size=64, seq_len=2048, model_size="200x1024x1x2")
    with pytest.raises(
        DoesNotFit, match=r"does not fit: needs about 11 GB of 2 GB \(NVIDIA H200\)"
    ):
        check_fits(case, gpu(2_000_000_000))


def test_results_know_the_error_of_a_skipped_case_by_its_name() -> None:
    assert DoesNotFit.__name__ == NOT_TRIED


@pytest.mark.parametrize("unknown", [None, gpu(None)])
def test_nothing_is_refused_where_the_memory_is_unknown(unknown: Gpu | None) -> None:
    check_fits(Case("dpsgd", batch_size=4096, seq_len=1024), unknown)


def test_nothing_is_refused_on_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Counting.rows

    def guessed(self: Counting) -> list[Measurement]:
        found = rows(self)
        self.operators = [replace(count, general_rule=True) for count in self.operators]
        return found

    monkeypatch.setattr(Counting, "rows", guessed)
    check_fits(CASE, gpu(1))


def test_what_cannot_be_counted_may_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Counting) -> list[Measurement]:
        raise CaseFailed("its process was killed")

    monkeypatch.setattr(Counting, "rows", fails)
    check_fits(CASE, gpu(1))
