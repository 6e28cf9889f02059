"""What cannot fit a GPU is refused before it costs GPU time."""

from __future__ import annotations

import pytest

from dpbench.case import Case
from dpbench.gpu import Gpu
from dpbench.instruments.fit import DoesNotFit, check_fits, predicted_peak_bytes

CASE = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")


def gpu(memory_bytes: int | None) -> Gpu:
    return Gpu("GPU-0", "NVIDIA H200", memory_bytes, "580")


def test_a_case_is_refused_if_its_tensors_alone_exceed_the_memory() -> None:
    needed = predicted_peak_bytes(CASE)
    check_fits(CASE, gpu(needed))
    with pytest.raises(DoesNotFit, match=r"does not fit: needs about .* GB of .* GB"):
        check_fits(CASE, gpu(needed - 1))


def test_the_message_has_sizes_as_people_read_them() -> None:
    case = Case("dpsgd", batch_size=64, seq_len=256)
    with pytest.raises(DoesNotFit, match=r"needs about [34]\d\d GB of 151 GB"):
        check_fits(case, gpu(150_754_820_096))


@pytest.mark.parametrize("unknown", [None, gpu(None)])
def test_nothing_is_refused_where_the_memory_is_unknown(unknown: Gpu | None) -> None:
    check_fits(Case("dpsgd", batch_size=4096, seq_len=1024), unknown)


def test_what_cannot_be_counted_is_not_refused() -> None:
    asks_for_cuda = Case("moves=tests.instruments.test_fit:NotCountable", 4, 64, "tiny")
    check_fits(asks_for_cuda, gpu(1))


class NotCountable:
    """A trainer that cannot be made."""
