"""FLOPs of single operators, computed by hand; a multiply-add is two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from dpbench.core.case import Case
from dpbench.core.subject import Script
from dpbench.instruments.logical.costs import formula_of, lacks_formula
from dpbench.instruments.logical.counter import (
    OperatorCounter,
    RealTensorCounter,
    is_composite,
    without_data,
)
from dpbench.instruments.logical.recorder import freeze_existing_objects
from dpbench.results.gate import Gate
from dpbench.results.kernels import NO_FLOPS
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.run import Run
from dpbench.training.phases import observed_step
from tests.instruments.logical.cases import count, totals, values
from tests.results.verdicts import failures

Work = Callable[[], Any]


def running(work: Work) -> OperatorCounter:
    """Counts operators on the CPU."""
    counter = RealTensorCounter()
    with freeze_existing_objects(), counter, observed_step(counter):
        work()
    return counter


def imagined(work: Work) -> OperatorCounter:
    """Counts operators without data."""
    with without_data() as counter, observed_step(counter):
        work()
    return counter


def flops(counter: OperatorCounter) -> int:
    return sum(count["flops"] for count in totals(counter).values())


def both(work: Work) -> int:
    """The FLOPs, equal with and without data, and complete."""
    with_data, without = running(work), imagined(work)
    assert flops(with_data) == flops(without)
    assert not [note for note in (*with_data.notes, *without.notes) if note.startswith(NO_FLOPS)]
    return flops(without)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


# --- convolutions ----------------------------------------------------------------------------

B, IN, OUT, N, K = 2, 6, 12, 7, 3


@pytest.mark.repeats
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("dimensions", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_convolutions_gradients_each_take_what_its_forward_takes(
    dimensions: int, groups: int, transposed: bool
) -> None:
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dimensions}d")

    def products(inputs: bool = True, weight: bool = True) -> int:
        def work() -> None:
            layer = kind(IN, OUT, K, groups=groups)
            layer.weight.requires_grad_(weight)
            layer(floats(B, IN, *[N] * dimensions).requires_grad_(inputs)).sum().backward()

        return both(work)

    # Each position of the input, or of the output, meets one kernel over its group's channels.
    places, channels = (N, IN * OUT // groups) if transposed else (N - K + 1, OUT * IN // groups)
    forward = 2 * B * places**dimensions * channels * K**dimensions
    assert products() == 3 * forward
    assert products(inputs=False) == 2 * forward
    assert products(weight=False) == 2 * forward


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_that_are_mapped_over_examples_take_as_much_as_together(groups: int) -> None:
    def work() -> None:
        layer = nn.Conv2d(IN, OUT, K, groups=groups, bias=False)

        def loss(weight: Tensor, example: Tensor) -> Any:
            return functional_call(layer, {"weight": weight}, (example[None],)).sum()

        vmap(grad(loss), (None, 0))(layer.weight.detach(), torch.randn(B, IN, N, N))

    forward = 2 * B * (N - K + 1) ** 2 * OUT * IN // groups * K**2
    assert both(work) == 2 * forward


@pytest.mark.parametrize("trainer", ["micro_batch", "standard"])
def test_trainers_convolve_as_often_one_example_at_a_time_as_together(trainer: str) -> None:
    conv = count(Case(trainer, 8, workload="layer:layer=conv,width=16,length=16"))
    by_phase = values(conv)
    found = [by_phase.get((phase, "flops"), 0) for phase in ("forward", "backward")]
    assert sum(found) == 393_216


# --- products --------------------------------------------------------------------------------

T, S, WIDTH, HIDDEN = 5, 3, 64, 32
TOKENS = T * S


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def ends() -> Tensor:
    return torch.tensor([8, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("work", "operations"),
    [
        (lambda: torch.mm(floats(2, 3), floats(3, 4)), 2 * 2 * 3 * 4),
        (lambda: torch.mm(floats(2, 3) + 0j, floats(3, 4) + 0j), 8 * 2 * 3 * 4),
        (lambda: torch.bmm(floats(5, 2, 3), floats(5, 3, 4)), 2 * 5 * 2 * 3 * 4),
        (lambda: torch.baddbmm(floats(4), floats(5, 2, 3), floats(5, 3, 4)), 2 * 5 * 2 * 3 * 4),
        (lambda: torch.addbmm(floats(4), floats(5, 2, 3), floats(5, 3, 4)), 2 * 5 * 2 * 3 * 4),
        (lambda: torch.mv(floats(4, 5), floats(5)), 2 * 4 * 5),
        (lambda: torch.addmv(floats(4), floats(4, 5), floats(5)), 2 * 4 * 5),
        (lambda: floats(4).detach().addmv_(floats(4, 5).detach(), floats(5).detach()), 2 * 4 * 5),
        (lambda: torch.dot(floats(5), floats(5)), 2 * 5),
        (lambda: torch.vdot(floats(5) + 0j, floats(5) + 0j), 8 * 5),
        (lambda: torch.addr(floats(4, 5), floats(4), floats(5)), 2 * 4 * 5),
        # Per example: two vectors elementwise, then the result times a matrix.
        (lambda: torch.einsum("bi,oij,bj->bo", floats(2, 3), floats(5, 3, 4), floats(2, 4)), 240),
        (lambda: torch.einsum("bti,btj->bij", floats(2, 7, 3), floats(2, 7, 4)), 2 * 2 * 7 * 12),
        (lambda: torch._int_mm(torch.ones(17, 8).char(), torch.ones(8, 16).char()), 2 * 17 * 128),
        (lambda: torch._grouped_mm(half(16, 24), half(2, 24, 8), offs=ends()), 2 * 16 * 24 * 8),
        (lambda: torch._grouped_mm(half(2, 16, 24), half(24, 16), offs=ends()), 2 * 16 * 24 * 16),
        (lambda: torch._grouped_mm(half(24, 16), half(16, 8), offs=ends()), 2 * 24 * 16 * 8),
        (lambda: torch._grouped_mm(half(2, 16, 24), half(2, 24, 8)), 2 * 2 * 16 * 24 * 8),
    ],
)
def test_products(work: Work, operations: int) -> None:
    assert both(work) == operations


GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@pytest.mark.repeats
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", GATES, ids=lambda kind: kind.__name__)
def test_each_token_meets_each_matrix_of_a_recurrent_layer(
    kind: type[nn.RNNBase], bidirectional: bool
) -> None:
    ways = 1 + bidirectional

    def layer() -> Any:
        return kind(WIDTH, HIDDEN, num_layers=2, bidirectional=bidirectional)

    gates = GATES[kind] * HIDDEN * ways
    weights = gates * (WIDTH + HIDDEN) + gates * (ways * HIDDEN + HIDDEN)
    forward = 2 * TOKENS * weights
    assert both(lambda: layer()(torch.randn(T, S, WIDTH))) == forward
    trained = both(lambda: layer()(floats(T, S, WIDTH))[0].sum().backward())
    # Composed operators leave out the unneeded gradient of the initial state.
    assert 3 * forward - 2 * 2 * S * gates * HIDDEN <= trained <= 3 * forward


def test_cudas_recurrent_layers_leave_out_gradients_that_are_not_asked_for() -> None:
    given: dict[str, Any] = {
        "input": torch.empty(T, S, WIDTH),
        "weight": [torch.empty(4 * HIDDEN, WIDTH), torch.empty(4 * HIDDEN, HIDDEN)]
        + [torch.empty(4 * HIDDEN)] * 2,
        "weight_stride0": 4,
    }
    forward = 2 * TOKENS * 4 * HIDDEN * (WIDTH + HIDDEN)
    for name, more, products in (
        ("_cudnn_rnn", {}, 1),
        ("_cudnn_rnn_backward", {"output": None, "output_mask": [True, True, True, True]}, 2),
        ("_cudnn_rnn_backward", {"output": None, "output_mask": [True, True, True, False]}, 1),
    ):
        formula = formula_of(getattr(torch.ops.aten, name).default)
        assert formula
        assert formula(**given, **more, out_val=None) == products * forward


def test_attention_with_a_function_of_its_scores_is_one_kernel_in_each_direction() -> None:
    shape = (2, 3, 128, 16)
    elements, rows = 2 * 3 * 128 * 16, 2 * 3 * 128

    def work() -> None:
        q, k, v = (floats(*shape) for _ in range(3))
        flex_attention(q, k, v, score_mod=lambda score, *where: score * 2).sum().backward()

    counts = totals(imagined(work))
    forward = counts["outside", "flex_attention"]
    products = 2 * 2 * elements * 128
    assert forward["flops"] == products
    assert counts["outside", "flex_attention_backward"]["flops"] == products * 5 // 2
    read, written = forward["read_bytes"], forward["write_bytes"]
    assert 0 <= read - 4 * 3 * elements < 100, "and the numbers of an empty mask of blocks"
    assert 0 <= written - 4 * (elements + rows) <= 4 * rows, "and the largest scores"


# --- what has no formula ---------------------------------------------------------------------


def words(text: str) -> set[str]:
    return set(text.split())


PRODUCTS = words(
    """
    mm bmm addmm addmv addr addbmm baddbmm mv dot vdot _addmm_activation _int_mm _scaled_mm
    _grouped_mm _scaled_grouped_mm convolution _convolution cudnn_convolution mkldnn_convolution
    convolution_backward convolution_overrideable convolution_backward_overrideable
    _cudnn_rnn _cudnn_rnn_backward miopen_rnn miopen_rnn_backward
    mkldnn_rnn_layer mkldnn_rnn_layer_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    _flash_attention_forward _flash_attention_backward
    _efficient_attention_forward _efficient_attention_backward
    """
)
"""Operators that have a formula."""

NAMED = words(
    """
    _trilinear _cdist_forward _cdist_backward _euclidean_dist _pdist_forward _pdist_backward
    conv_tbc conv_depthwise3d _conv_depthwise2d slow_conv3d_forward slow_conv_dilated2d
    slow_conv_transpose2d _slow_conv2d_backward mkldnn_linear linear_backward
    matmul_backward _weight_int4pack_mm _weight_int8pack_mm _dyn_quant_matmul_4bit
    _mixed_dtypes_linear _sparse_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl _spsolve
    _sparse_semi_structured_mm _sparse_semi_structured_linear _cslt_sparse_mm
    sparse_sampled_addmm sspaddmm hspmm _fft_c2c _fft_r2c _fft_c2r linalg_inv_ex linalg_qr
    linalg_cholesky_ex _linalg_svd _linalg_eigh _linalg_solve_ex _linalg_det linalg_eig linalg_lu
    linalg_lstsq linalg_matrix_exp linalg_solve_triangular linalg_householder_product cholesky
    cholesky_inverse triangular_solve geqrf ormqr quantized_lstm quantized_gru _lstm_mps
    _transformer_encoder_layer_fwd _native_multi_head_attention _cudnn_attention_forward
    _scaled_dot_product_fused_attention_overrideable _compute_linear_combination
    """
)
"""Operators that multiply and have no formula."""

ELEMENTWISE = words(
    """
    add mul div sum linalg_vector_norm linalg_cross addcmul addcdiv _foreach_addcmul lerp dist
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d lgamma digamma polygamma cummax
    hamming_window cumsum cumprod _thnn_fused_lstm_cell _thnn_fused_gru_cell native_layer_norm
    embedding
    _cudnn_rnn_flatten_weight _convert_indices_from_coo_to_csr mkldnn_reorder_conv2d_weight
    grid_sampler_2d clamp_max _fused_adam _weight_norm_interface
    """
)


def overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def test_operators_that_multiply_have_a_formula_or_are_named() -> None:
    assert not [name for name in PRODUCTS if not all(map(formula_of, overloads(name)))]
    assert not [name for name in NAMED if not all(map(lacks_formula, overloads(name)))]
    assert not [name for name in ELEMENTWISE if any(map(lacks_formula, overloads(name)))]
    assert not [name for name in ELEMENTWISE if any(map(formula_of, overloads(name)))]


def test_every_operator_of_torch_whose_name_is_a_products_counts_or_is_named() -> None:
    """Review each new operator here before its count of 0 is believed."""
    parts = ("mm", "mv", "matmul", "conv", "dot", "linear", "rnn", "lstm", "gru", "attention")
    parts += ("linalg", "fft", "cholesky", "solve", "cdist", "pdist", "bilinear")
    harmless = ELEMENTWISE | words(
        """
        hamming_window linalg__powsum _linalg_check_errors fft_fftfreq fft_rfftfreq special_bilinear
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward upsample_bilinear2d_backward
        upsample_linear1d_backward upsample_trilinear3d_backward mkldnn_reorder_conv3d_weight
        _convert_indices_from_csr_to_coo _convert_weight_to_int4pack
        _convert_weight_to_int4pack_for_cpu lgamma_ digamma_ polygamma_ mvlgamma mvlgamma_ igamma
        igamma_ igammac igammac_ special_gammainc _foreach_lgamma _foreach_lgamma_ cummin
        _cummax_helper _cummin_helper _standard_gamma _standard_gamma_grad
        _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward _nested_get_jagged_dummy
        """
    )
    unseen = set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name = rest.partition(".")[0]
        if space != "aten" or name in harmless or not any(part in name for part in parts):
            continue
        func = getattr(getattr(torch.ops.aten, name), rest.partition(".")[2] or "default")
        if not (is_composite(func) or formula_of(func) or lacks_formula(func)):
            unseen.add(name)
    assert not unseen, f"in torch {torch.__version__}"


@pytest.mark.parametrize(
    ("work", "operator"),
    [
        (lambda: torch.cdist(floats(30, 4), floats(30, 4)), "aten._euclidean_dist"),
        (lambda: torch.fft.rfft(torch.ones(8)), "aten._fft_r2c"),
        (lambda: torch.linalg.inv(torch.eye(3)), "aten.linalg_inv_ex"),
        (lambda: nn.Bilinear(3, 4, 5)(torch.ones(2, 3), torch.ones(2, 4)), "aten._trilinear"),
    ],
)
def test_an_operator_without_a_formula_is_named(work: Work, operator: str) -> None:
    expected = f"{NO_FLOPS}: {operator} multiplies but has no FLOP formula"
    assert expected in running(work).notes
    assert expected in imagined(work).notes


def test_operators_of_other_libraries_are_named_unless_they_have_a_formula() -> None:
    @torch.library.custom_op("dpbench_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x @ x

    [note] = running(lambda: twice(torch.eye(3))).notes
    assert note.startswith(f"{NO_FLOPS}: dpbench_tests.twice")


def test_products_of_sparse_tensors_are_left_out_in_words_of_our_own() -> None:
    notes = running(lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 3))).notes
    assert "NOT COUNTED: aten._sparse_addmm: its tensors are torch.sparse_coo" in notes
    assert f"{NO_FLOPS}: aten._sparse_addmm multiplies but was not counted" in notes
    assert not [note for note in notes if "issue" in note or "storage" in note]


def test_a_call_that_no_rule_fits_does_not_end_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise AssertionError("Internal error. Please file an issue")

    monkeypatch.setattr("dpbench.instruments.logical.counter.cost", fails)
    notes = running(lambda: F.linear(torch.ones(2, 3), torch.ones(4, 3))).notes
    assert {note.rpartition(": ")[2] for note in notes if note.startswith("NOT COUNTED")} == {
        "no rule fits it"
    }
    assert not [note for note in notes if "issue" in note]


# --- the gate --------------------------------------------------------------------------------


def counted(name: str, *notes: str) -> Run:
    script = Script("train")
    rows = [
        Measurement(script, "logical", STEP, metric, 0.0, "1", 0, NO_HARDWARE, "torch")
        for metric in ("flops", "logical_read_bytes")
    ]
    return Run.of(name, [Outcome(script, tuple(rows), instruments=("logical",), notes=notes)])


def test_a_limit_on_operations_fails_where_an_operator_has_no_formula() -> None:
    note = f"{NO_FLOPS}: aten._euclidean_dist multiplies but has no FLOP formula"
    known, unknown = counted("known"), counted("unknown", note)
    flops, others = Limit.parse("flops:1%"), Limit.parse("logical_read_bytes:1%")
    for before, after in ((unknown, unknown), (known, unknown), (unknown, known)):
        [missing] = Gate(before, after).compare([flops]).unjudged
        assert missing.why == note
        assert not failures(Gate(before, after).compare([others]))
    assert not failures(Gate(known, known).compare([flops]))
