"""Bytes of single operators, and of the operations of DP training.

Sizes are in elements of four bytes unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.instruments.logical.counter import OperatorCounter, without_data
from dpbench.instruments.logical.memory import region_of
from dpbench.training.phases import observed_step
from tests.instruments.logical.cases import totals

E = 4
INT64 = 8

dimension = st.integers(min_value=2, max_value=40)
linear_dimensions = given(b=dimension, t=dimension, i=dimension, o=dimension)
few = settings(max_examples=5, deadline=None)


class Moved(NamedTuple):
    """Bytes read and written by all operators, or by one."""

    read: int
    write: int


def moved(counter: OperatorCounter, operator: str | None = None) -> Moved:
    counts = [
        c for (_, name), c in totals(counter).items() if operator in (None, name.split(".")[1])
    ]
    return Moved(sum(c["read_bytes"] for c in counts), sum(c["write_bytes"] for c in counts))


def cost(work: Callable[..., Any], *shapes: tuple[int, ...] | Tensor) -> Moved:
    """The bytes that ``work`` moves on float tensors of these shapes, without making them."""
    with without_data() as counter:
        tensors = [torch.empty(s) if isinstance(s, tuple) else s for s in shapes]
        with observed_step(counter), torch.no_grad():
            work(*tensors)
    return moved(counter)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


class TestLinearLayer:
    @few
    @linear_dimensions
    def test_forward_reads_input_weight_and_bias_and_writes_the_output(
        self, b: int, t: int, i: int, o: int
    ) -> None:
        expected = Moved(E * (b * t * i + o * i + o), E * b * t * o)
        assert cost(F.linear, (b, t, i), (o, i), (o,)) == expected

    @few
    @linear_dimensions
    def test_backward_is_two_products_and_a_sum(self, b: int, t: int, i: int, o: int) -> None:
        x, y, w = b * t * i, b * t * o, o * i
        with without_data() as counter:
            layer = nn.Linear(i, o)
            output = layer(torch.empty(b, t, i, requires_grad=True))
            gradient = torch.empty_like(output)
            with observed_step(counter):
                output.backward(gradient)
        input_and_weight_gradient = Moved(E * ((y + w) + (y + x)), E * (x + w))
        bias_gradient = Moved(E * y, E * o)
        assert moved(counter, "mm") == input_and_weight_gradient
        assert moved(counter, "sum") == bias_gradient
        assert moved(counter) == (
            input_and_weight_gradient.read + bias_gradient.read,
            input_and_weight_gradient.write + bias_gradient.write,
        )

    @few
    @given(b=dimension, i=dimension, o=dimension)
    def test_norms_and_clipping_each_read_all_per_sample_gradients(
        self, b: int, i: int, o: int
    ) -> None:
        def norm(g: Tensor) -> Any:
            return g.reshape(len(g), -1).norm(2, dim=-1)

        def clip(factor: Tensor, g: Tensor) -> Any:
            return torch.einsum("i,i...", factor, g)

        assert cost(norm, (b, o, i)) == (E * b * o * i, E * b)
        assert cost(clip, (b,), (b, o, i)) == (E * (b + b * o * i), E * o * i)


@pytest.mark.parametrize(
    ("work", "shapes", "read", "write"),
    [
        pytest.param(lambda x: x.add(1), [(6, 5)], 30, 30, id="out of place"),
        pytest.param(lambda x: x.add_(1), [(6, 5)], 30, 30, id="in place reads the target"),
        pytest.param(lambda x, y: x.add_(y), [(6, 5), (5,)], 35, 30, id="broadcasting"),
        pytest.param(lambda x: x * x, [(6, 5)], 30, 30, id="the same input twice is read once"),
        pytest.param(lambda x: x @ x.T, [(6, 5)], 30, 36, id="also if one is transposed"),
        pytest.param(lambda x: x[:2] + x[2:4], [(4, 5)], 20, 10, id="two parts are two inputs"),
        pytest.param(lambda x, y: torch.add(x, x, out=y), [(9,), (9,)], 9, 9, id="out= is written"),
        pytest.param(lambda x, y: x.copy_(y), [(9,), (9,)], 9, 9, id="copy_ overwrites"),
        pytest.param(lambda x, y: x.copy_(y), [(4, 9), (9,)], 9, 36, id="copy_ broadcasts"),
        pytest.param(lambda x: x.zero_(), [(9,)], 0, 9, id="zero_ overwrites"),
        pytest.param(lambda x: x.fill_(2), [(9,)], 0, 9, id="fill_ overwrites"),
        pytest.param(lambda x: x.normal_(), [(9,)], 0, 9, id="normal_ overwrites"),
        pytest.param(lambda x: x.uniform_(), [(9,)], 0, 9, id="uniform_ overwrites"),
        pytest.param(lambda: torch.randn(9), [], 0, 9, id="randn writes"),
        pytest.param(lambda: torch.ones(9), [], 0, 9, id="ones writes"),
        pytest.param(lambda: torch.empty(9), [], 0, 0, id="empty is free"),
        pytest.param(torch.zeros_like, [(9,)], 0, 9, id="zeros_like does not read"),
        pytest.param(torch.empty_like, [(9,)], 0, 0, id="empty_like is free"),
        pytest.param(lambda x: x.new_zeros(3), [(9,)], 0, 3, id="new_zeros does not read"),
        pytest.param(torch.clone, [(9,)], 9, 9, id="clone"),
        pytest.param(lambda x: x.T.contiguous(), [(6, 5)], 30, 30, id="contiguous copies"),
        pytest.param(lambda x: x.contiguous(), [(6, 5)], 0, 0, id="unless there is no need"),
        pytest.param(lambda x: x.expand(7, 5) + 0, [(1, 5)], 5, 35, id="an expanded dimension"),
        pytest.param(lambda x: x.expand(7, 5).sum(), [(1, 5)], 5, 1, id="summing an expansion"),
        pytest.param(lambda x: x.unfold(0, 3, 1) + 0, [(9,)], 9, 21, id="overlapping windows"),
        pytest.param(lambda x: x.sum(0), [(6, 5)], 30, 5, id="reduction"),
        pytest.param(lambda x, y: torch.cat([x, y]), [(4, 3), (5, 3)], 27, 27, id="cat"),
        pytest.param(lambda x, y: torch.stack([x, y]), [(4,), (4,)], 8, 8, id="stack"),
        pytest.param(lambda x, y: torch.where(x > 0, x, y), [(8,), (8,)], 26, 10, id="where"),
        pytest.param(lambda x: torch.empty(0, 3) + x, [(3,)], 3, 0, id="nothing"),
    ],
)
def test_operator(
    work: Callable[..., Any], shapes: list[tuple[int, ...]], read: int, write: int
) -> None:
    assert cost(work, *shapes) == (E * read, E * write)


def test_views_are_free() -> None:
    views: list[Callable[[Tensor], Any]] = [
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x.permute(1, 0),
        lambda x: x[1:, ::2],
        lambda x: x.expand(3, 6, 4),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x.split(2),
        lambda x: x.unbind(),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.detach(),
        lambda x: torch.ops.aten.alias(x),
        lambda x: torch.ops.aten._unsafe_view(x, [24]),
        lambda x: x.reshape(3, 8),
        lambda x: x.to(torch.float32),
    ]
    assert [cost(view, (6, 4)) for view in views] == [(0, 0)] * len(views)


@pytest.mark.parametrize("width", [1, 5])
def test_a_norm_of_rows_is_one_number_a_row(width: int) -> None:
    with without_data():
        assert torch.empty(4, width).norm(2, dim=-1).shape == (4,)
        assert torch.empty(()).norm(2, dim=-1).shape == ()


def test_parts_of_a_storage_are_regions_of_their_own() -> None:
    x = torch.empty(4, 6)
    parts = [x, x[:2], x[2:], x[:, :3], x[:, 3:], x[:, ::2]]
    assert len({region_of(tensor) for tensor in parts}) == len(parts)


class TestLists:
    def test_foreach_counts_every_tensor(self) -> None:
        def work(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
            torch._foreach_add_([a, b], [c, d], alpha=-0.1)

        assert cost(work, (3,), (5,), (3,), (5,)) == (E * 16, E * 8)

    def test_foreach_overwriters_do_not_read_the_target(self) -> None:
        assert cost(lambda a, b: torch._foreach_zero_([a, b]), (3,), (5,)) == (0, E * 8)
        assert cost(lambda a, b: torch._foreach_copy_([a], [b]), (3,), (3,)) == (E * 3, E * 3)

    def test_foreach_norm_reads_each_and_writes_scalars(self) -> None:
        assert cost(lambda a, b: torch._foreach_norm([a, b]), (3,), (5,)) == (E * 8, E * 2)


class TestGathersAndScatters:
    def test_embedding_reads_indices_and_gathered_rows(self) -> None:
        moved = cost(F.embedding, indices(2, 3), (100, 8))
        assert moved == (INT64 * 6 + E * 6 * 8, E * 6 * 8)

    def test_embedding_never_reads_more_than_the_table(self) -> None:
        moved = cost(F.embedding, indices(50), (10, 8))
        assert moved == (INT64 * 50 + E * 80, E * 50 * 8)

    def test_embedding_backward_writes_the_whole_gradient(self) -> None:
        def work(gradient: Tensor, index: Tensor) -> None:
            torch.ops.aten.embedding_dense_backward(gradient, index, 100, -1, False)

        assert cost(work, (2, 3, 8), indices(2, 3)) == (INT64 * 6 + E * 48, E * 800)

    @pytest.mark.parametrize(
        ("work", "index"),
        [
            (lambda x, i: x.index_select(0, i), indices(3)),
            (lambda x, i: x[i], indices(3)),
            (lambda x, i: x.gather(0, i), indices(3, 8)),
        ],
    )
    def test_gathering_reads_what_comes_out(
        self, work: Callable[..., Tensor], index: Tensor
    ) -> None:
        assert cost(work, (100, 8), index) == (INT64 * index.numel() + E * 24, E * 24)

    def test_scatter_add_reads_and_writes_what_it_touches(self) -> None:
        moved = cost(lambda x, i, y: x.scatter_add_(0, i, y), (100, 8), indices(3, 8), (3, 8))
        assert moved == (INT64 * 24 + E * (24 + 24), E * 24)

    def test_scatter_does_not_read_the_target(self) -> None:
        moved = cost(lambda x, i, y: x.scatter_(0, i, y), (100, 8), indices(3, 8), (3, 8))
        assert moved == (INT64 * 24 + E * 24, E * 24)

    def test_index_add_touches_rows(self) -> None:
        moved = cost(lambda x, i, y: x.index_add_(0, i, y), (100, 8), indices(3), (3, 8))
        assert moved == (INT64 * 3 + E * (24 + 24), E * 24)

    def test_index_add_out_of_place_makes_a_whole_tensor(self) -> None:
        moved = cost(lambda x, i, y: x.index_add(0, i, y), (100, 8), indices(3), (3, 8))
        assert moved == (INT64 * 3 + E * (800 + 24), E * 800)

    @pytest.mark.parametrize(("accumulate", "target_read"), [(True, 24), (False, 0)])
    def test_index_put_reads_the_target_only_to_accumulate(
        self, accumulate: bool, target_read: int
    ) -> None:
        def work(x: Tensor, i: Tensor, y: Tensor) -> None:
            x.index_put_((i,), y, accumulate=accumulate)

        moved = cost(work, (100, 8), indices(3), (3, 8))
        assert moved == (INT64 * 3 + E * (24 + target_read), E * 24)


@pytest.mark.parametrize("accumulate", [True, False])
def test_put_touches_the_elements_that_indices_name(accumulate: bool) -> None:
    moved = cost(lambda x, i, y: x.put_(i, y, accumulate), (100, 8), indices(3), (3,))
    assert moved == (INT64 * 3 + E * (3 + 3 * accumulate), E * 3)


def test_index_reduce_reads_and_writes_the_rows_that_it_reduces_into() -> None:
    moved = cost(lambda x, i, y: x.index_reduce_(0, i, y, "prod"), (100, 8), indices(3), (3, 8))
    assert moved == (INT64 * 3 + E * (24 + 24), E * 24)


@torch.library.custom_op("dpbench_tests::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    return x.clone()


copied.register_fake(torch.empty_like)


class TestGuesses:
    def guessed(self, work: Callable[[], Any]) -> set[str]:
        with without_data() as counter, observed_step(counter):
            work()
        return {count.operator for count in counter.operators if count.general_rule}

    def test_an_operator_of_another_library_is_counted_by_its_schema_and_named(self) -> None:
        assert self.guessed(lambda: copied(torch.ones(3))) == {"dpbench_tests.copied"}
        assert cost(copied, (3,)) == (E * 3, E * 3)

    def test_those_of_pytorch_are_not_named(self) -> None:
        assert self.guessed(lambda: torch.special.bessel_j0(torch.ones(3)).add_(1)) == set()

    def test_composite_operators_are_counted_by_their_parts(self) -> None:
        with torch.inference_mode():
            assert cost(F.linear, (2, 3, 4), (5, 4), (5,)) == (E * (24 + 20 + 5), E * 30)
