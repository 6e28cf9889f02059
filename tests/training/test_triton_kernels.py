"""The kernels, compiled for GPUs that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dpbench.training.kernels import TILINGS, tiling
from dpbench.training.noise_stream import BLOCK
from dpbench.training.noisy_updates import WARPS

triton = pytest.importorskip("triton", reason="PyTorch brings Triton with CUDA only")

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block can have, by compute capability (CUDA Programming Guide)."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", TILINGS, ids=str)
@pytest.mark.parametrize("capability", SHARED)
def test_norms_compile_and_fit_into_shared_memory(
    capability: int, dtype: torch.dtype, whole: bool
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpbench.training.triton_kernels import gram_norms

    tile, step, warps, stages = tiling(dtype, SHARED[capability] * 1024)
    is_half = dtype == torch.bfloat16
    constants = {
        "bias": True,
        "rows": False,
        "half": is_half,
        "aligned": True,
        "long": False,
        "joined": 3,
        "whole": whole,
        "precision": "ieee" if is_half else "tf32x3",
        "tile": tile,
        "step": step,
    }
    types = {"table": "*i64", "sums": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in gram_norms.arg_names}
    divisible = {
        (gram_norms.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in ("table", "sums", "tokens", "width", "height")
    }
    compiled = triton.compile(
        ASTSource(gram_norms, signature, constants, divisible),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    assert compiled.metadata.shared <= SHARED[capability] * 1024


@pytest.mark.parametrize("kind", ["fp32", "fp64"])
@pytest.mark.parametrize("capability", SHARED)
def test_sums_of_products_compile(capability: int, kind: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpbench.training.triton_kernels import gram_sums

    constants = {"bias": True, "rows": 8, "some": 128}
    types = dict.fromkeys(("of_x", "of_g", "sums"), f"*{kind}")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in gram_sums.arg_names}
    source = ASTSource(gram_sums, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


@pytest.mark.parametrize("bands", [1, 4])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize(("rule", "averages"), {"mean": 0, "plain": 0, "adam": 2}.items())
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_an_update_stores_each_number_once(
    capability: int, rule: str, averages: int, kind: str, bands: int
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpbench.training.triton_kernels import noisy_update

    constants = {"formula": rule, "block": BLOCK, "bands": bands}
    types = dict.fromkeys(("parameters", "first", "second", "gradient"), f"*{kind}")
    types |= {"length": "i32", "stream": "*i64", "weights": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "fp32") for name in noisy_update.arg_names}
    places = [*types][:5]  # and the length
    aligned = {(noisy_update.arg_names.index(n),): [["tt.divisibility", 16]] for n in places}
    source = ASTSource(noisy_update, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": WARPS}).asm["ptx"]
    assert ptx.count("st.global") == 16 * (1 + averages)  # 16 blocks


def test_an_update_draws_the_noise_of_pytorch() -> None:
    command = [sys.executable, "-m", "tests.training.interpreted_noise"]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
