"""Names of real kernels, as Nsight Compute and PyTorch's profiler spell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.results.kernels import CATEGORIES, category, short_name

NAMES = (Path(__file__).parents[1] / "data" / "kernel_names.txt").read_text().splitlines()

KINDS = {
    "fmha_cutlassB_f32_aligned_64x64_k32_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_"
    "kernel0_0": "attention",
    "compute_dot_do_o": "attention",
    "fused_dropout_kernel_vec": "random",
    "multi_tensor_apply_kernel<LpNormFunctor>": "reduction",
    "multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "nvjet_sm90_tst_32x64_64x16_4x2_h_bz_NTN": "GEMM",
    "RowwiseMomentsCUDAKernel": "normalisation",
    "gatherTopK": "other",
    "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>": "copy",
    "distribution_elementwise_grid_stride_kernel<normal_kernel>": "random",
    "multi_tensor_apply_kernel<BinaryOpListAlphaFunctor>": "optimizer",
    "GammaBetaBackwardCUDAKernelTemplate": "normalisation",
    "embedding_backward_feature_kernel": "embedding",
    "vectorized_gather_kernel": "embedding",
    "cutlass_80_simt_sgemm_256x128_8x4_nn_align1": "GEMM",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n": "GEMM",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_split_k": "GEMM",
    "gemvx::kernel": "GEMM",
    "splitKreduce_kernel": "GEMM",
    "elementwise_kernel<direct_copy_kernel_cuda>": "copy",
    "CatArrayBatchedCopy_alignedK_contig": "copy",
    "vectorized_elementwise_kernel<FillFunctor>": "set",
    "elementwise_kernel_with_index<arange_cuda_out>": "set",
    "reduce_kernel<NormTwoOps>": "reduction",
    "reduce_kernel<sum_functor>": "reduction",
    "cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>": "reduction",
    "vectorized_elementwise_kernel<CUDAFunctor_add>": "elementwise",
    "vectorized_elementwise_kernel<MulFunctor>": "elementwise",
    "vectorized_elementwise_kernel<GeluCUDAKernelImpl>": "elementwise",
    "vectorized_elementwise_kernel<sqrt_kernel_cuda>": "elementwise",
    "DeviceMergeSortBlockSortKernel<unique_dim_cuda_template>": "other",
}


def test_real_kernels_have_their_short_names_and_categories() -> None:
    found = {
        kernel: {category(name) for name in NAMES if short_name(name) == kernel} for kernel in KINDS
    }
    assert found == {kernel: {kind} for kernel, kind in KINDS.items()}


def test_a_pattern_fits_every_kernel_of_the_recorded_steps() -> None:
    assert [name for name in NAMES if category(name) is None] == []


def test_every_category_but_other_is_used_by_the_recorded_steps() -> None:
    assert {category(name) for name in NAMES} == {kind for kind, _ in CATEGORIES}


def test_short_names_are_short() -> None:
    assert max(len(short_name(name)) for name in NAMES) < 105 < max(map(len, NAMES))


@pytest.mark.parametrize(
    "spellings",
    [
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>,"
            " std::array<char *, (unsigned long)1>>(int, T2, T3)",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
            "std::array<char*, 1ul> >(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)",
        ),
        (
            "void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<at::native::<unnamed>::"
            "OpaqueType<(unsigned int)4>>(char *)",
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::"
            "(anonymous namespace)::OpaqueType<4u> >(char*)",
        ),
    ],
)
def test_two_tools_spell_a_kernel_differently_and_mean_the_same(spellings: tuple[str, str]) -> None:
    assert len({short_name(name) for name in spellings}) == 1


def test_an_unknown_kernel_keeps_its_name_and_has_no_category() -> None:
    assert short_name("my_kernel(float*)") == "my_kernel"
    assert category("my_kernel(float*)") is None
