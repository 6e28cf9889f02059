"""The ways of the norms compared, for real, on the CPU, where there is one."""

from __future__ import annotations

import torch

from bench.gram_norms import rows
from dpbench.core.model_size import MODEL_SIZES


def test_each_type_has_its_time_and_its_distance_from_float64() -> None:
    table = [*rows(MODEL_SIZES["tiny"], 2, [8], torch.device("cpu"), seconds=0.01)]
    assert [(row[1], row[2]) for row in table] == [
        (torch.float32, "products"),
        (torch.bfloat16, "products"),
    ]
    for *_, milliseconds, distance, bound, _chosen in table:
        assert milliseconds > 0
        assert distance < 1e-5
        assert 0 < bound < 0.02
