"""What cannot fit a GPU is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.fit import MOST, Needed, largest_batch, needed, parse_memory
from dpbench.gpu import Gpu
from dpbench.instruments.interface import CaseFailed
from dpbench.instruments.logical.logical import Counting, Logical
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


# --- the largest batch that fits -------------------------------------------------------------


@given(
    fixed=st.integers(0, 20),
    slopes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    turns=st.integers(1, 50),
    parts=st.integers(1, 4),
    memory=st.integers(1, 500),
)
def test_the_next_batch_after_the_largest_does_not_fit(
    fixed: int, slopes: list[int], turns: int, parts: int, memory: int
) -> None:
    """Whatever phases the peak is in: each has a line of its own."""

    def need(case: Case) -> Needed:
        peak = max(fixed + slope * (case.batch_size - turns * i) for i, slope in enumerate(slopes))
        return Needed(peak * 1e9, "backward", False)

    case = Case("dpsgd", parts, 8, micro_batches=parts)
    found = largest_batch(case, memory * 1e9, need)
    assert found.batch_size % parts == 0
    if found.batch_size:
        assert found.needs.fits(memory * 1e9)
    larger = replace(case, batch_size=found.batch_size + parts)
    assert not need(larger).fits(memory * 1e9)


def test_few_counts_are_enough() -> None:
    counted = []

    def need(case: Case) -> Needed:
        counted.append(case.batch_size)
        size = case.batch_size
        return Needed(max(7.6e9 + 0.7e9 * size, 5.4e9 + 1.8e9 * size), "backward", False)

    largest_batch(CASE, 141e9, need)
    assert len(counted) <= 6, counted


def test_a_peak_that_does_not_grow_has_no_largest_batch() -> None:
    found = largest_batch(CASE, 80e9, lambda case: Needed(1e9, "clip"))
    assert found.unbounded
    assert found.batch_size == MOST


def test_the_largest_batch_is_what_the_check_before_a_run_lets_pass() -> None:
    memory = 1.52e9
    found = largest_batch(CASE, memory)
    check_fits(replace(CASE, batch_size=found.batch_size), gpu(int(memory)))
    assert not needed(replace(CASE, batch_size=found.batch_size + 1)).fits(memory)


@pytest.mark.parametrize(("text", "memory"), [("80GB", 80e9), ("1.5 gib", 1.5 * 2**30)])
def test_memory_is_read_in_both_units(text: str, memory: float) -> None:
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80MB"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="80GB or 80GiB"):
        parse_memory(text)
