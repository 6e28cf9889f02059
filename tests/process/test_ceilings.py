"""Measuring the roofs of a device: here, those of the processor that runs the tests."""

from __future__ import annotations

import pytest
import torch

from dpbench import ConfigurationError
from dpbench.process.ceilings import measure_ceilings
from dpbench.results.roofline import Ceilings


def test_a_copy_and_a_product_at_every_precision_are_timed() -> None:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    found = Ceilings(**measure_ceilings("cpu", copy_bytes=2**24, matrix=64, seconds=0.01))
    assert (found.device, found.copy_bytes, found.matrix) == ("cpu", 2**24, 64)
    assert found.bandwidth > 0
    assert set(found.flops) == {"fp32", "tf32", "bf16"}
    assert all(flops > 0 for flops in found.flops.values())
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="no CUDA GPU"):
        measure_ceilings()
