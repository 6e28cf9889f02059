"""Counts of scripts that have dispatch modes, compiled functions and tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_
from torch.func import functional_call, grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from dpbench.instruments.logical.recorder import StepsLost
from dpbench.results.kernels import NOT_COUNTED, STEP_LOST
from dpbench.results.outcome import Outcome
from tests.instruments.logical.test_scripts import by_step, counted

ROWS, WIDTH = 8, 64
STEP_FLOPS = 2 * 2 * ROWS * WIDTH * WIDTH  # forward, and the gradient of the weight
STEPS = 9

Loop = Callable[[], None]


def trained(step: Callable[[nn.Module, Any], object], steps: int = STEPS) -> None:
    """Train a layer, with ``step`` for its forward, backward and update."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)


def update(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Seen(TorchDispatchMode):
    """A mode of a script that notes the operators that it receives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def plain() -> None:
    trained(update)


def in_a_counter_of_each_step() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        with FlopCounterMode(display=False) as own:
            update(model, optimizer)
        assert own.get_total_flops() == STEP_FLOPS

    trained(step)


def in_counters_from_step_to_step() -> None:
    opened = ExitStack()
    numbers: list[int] = []

    def step(model: nn.Module, optimizer: Any) -> None:
        numbers.append(len(numbers))
        loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        if numbers[-1] % 3 == 0:
            opened.close()
            opened.enter_context(Seen())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with opened:
        trained(step)


def in_a_profiler() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        with torch.profiler.profile(with_flops=True, with_stack=True):  # looks into frames
            update(model, optimizer)

    trained(step)


def in_a_function_of_func() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        def loss(values: Any) -> Tensor:
            return functional_call(model, values, (torch.ones(ROWS, WIDTH),)).square().mean()

        gradients = grad(loss)({name: p.detach() for name, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad()

    trained(step)


def compiled() -> Loop:
    def loop() -> None:
        def step(model: nn.Module, optimizer: Any) -> None:
            loss_of = compiled_losses.setdefault(
                id(model),
                torch.compile(lambda x: model(x).square().mean(), backend="aot_eager"),
            )
            loss_of(torch.ones(ROWS, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled_losses: dict[int, Any] = {}
        trained(step)

    return loop


def compiled_in_a_counter() -> None:
    with FlopCounterMode(display=False) as own:
        compiled()()
    assert own.get_total_flops() == STEPS * STEP_FLOPS


def beside_tensors_without_data() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        torch.ones(ROWS, WIDTH, device="meta") @ torch.ones(WIDTH, WIDTH, device="meta")
        update(model, optimizer)

    trained(step)


LOOPS: list[Loop] = [
    plain,
    beside_tensors_without_data,
    in_a_counter_of_each_step,
    in_counters_from_step_to_step,
    in_a_profiler,
    in_a_function_of_func,
    compiled(),
    compiled_in_a_counter,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__qualname__.partition(".")[0])
def test_each_step_is_counted_whatever_modes_a_script_has(loop: Loop) -> None:
    outcome = counted(loop, steps=4, skip=2, go_on=True)
    assert by_step(outcome) == [STEP_FLOPS] * 4
    assert len({*by_step(outcome, metric="logical_read_bytes")}) == 1
    assert not [note for note in outcome.notes if NOT_COUNTED in note]
    assert not torch._C._len_torch_dispatch_stack()
    assert torch.ones(2).sum() == 2, "nothing is left of a dispatch mode"


@pytest.mark.parametrize("way", ["popped", "pushed again", "ignored"])
def test_a_step_without_the_mode_that_counts_is_named_and_has_no_numbers(way: str) -> None:
    numbers: list[int] = []
    opened = ExitStack()

    def step(model: nn.Module, optimizer: Any) -> None:
        numbers.append(len(numbers))
        loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        if numbers[-1] == 3:
            opened.close()
        elif numbers[-1] == 2 and way == "popped":
            torch._C._pop_torch_dispatch_stack(None)
        elif numbers[-1] == 2 and way == "pushed again":
            torch._C._push_on_torch_dispatch_stack(torch._C._get_dispatch_stack_at(0))
        elif numbers[-1] == 2:
            opened.enter_context(disabled[way]())  # until the middle of the next step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    disabled: dict[str, Callable[[], Any]] = {
        "ignored": torch._C._DisableTorchDispatch,
    }
    outcome = counted(lambda: trained(step), steps=6, skip=1, go_on=True)
    lost = [note for note in outcome.notes if note.startswith(STEP_LOST)]
    assert f"{STEP_LOST}: counted step 2" in lost
    assert by_step(outcome) == [STEP_FLOPS] * (6 - len(lost))
    assert len(lost) <= 2
    assert not torch._C._len_torch_dispatch_stack()


def test_a_loop_whose_every_step_is_lost_is_no_loop_without_operators() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        with torch.inference_mode(), torch.inference_mode(mode=False), torch.enable_grad():
            update(model, optimizer)

    with pytest.raises(StepsLost, match=f"{STEP_LOST}: all 3 steps; train outside of inference"):
        counted(lambda: trained(step), go_on=True)


class Int8(Tensor):
    """An int8 weight that acts as a float32 one."""

    q: Tensor

    @staticmethod
    def __new__(cls, q: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, q: Tensor) -> None:
        self.q = q

    def written_out(self) -> Tensor:
        return self.q.float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q)
        args = tree_map_only(cls, cls.written_out, args)
        return func(*args, **(kwargs or {}))


class Flattened(Int8):
    """As in torchao: names its inner tensors, and multiplies by ``__torch_function__``."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.matmul or func is Tensor.__matmul__:
            return args[0] @ args[1].q.float()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Unseen(Int8):
    """Runs its operators where no dispatch mode receives them."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():  # type: ignore[no-untyped-call]
            return super().__torch_dispatch__(func, types, args, kwargs)


def weighted(weight: Callable[[Tensor], Tensor], *, write_out: bool = False) -> Outcome:
    """The outcome of steps with a frozen int8 weight of one of the classes."""

    def loop() -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.b = nn.Parameter(torch.zeros(256))

            def forward(self, x: Tensor) -> Tensor:
                return x @ (w.float() if write_out else w) + self.b

        w = weight(torch.ones(256, 256, dtype=torch.int8))
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(6):
            net(torch.ones(8, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    outcome: Outcome = counted(loop)
    return outcome


def numbers_of(outcome: Outcome) -> dict[str, list[float]]:
    names = ("logical_read_bytes", "logical_write_bytes", "flops", "peak_memory_bytes")
    return {name: by_step(outcome, metric=name) for name in names}


@pytest.mark.parametrize(
    "made",
    [Int8, Flattened, lambda q: Int8(Int8(q.clone())), lambda q: nn.Parameter(Int8(q), False)],
)
def test_a_tensor_subclass_counts_as_the_operators_that_it_runs(
    made: Callable[[Tensor], Tensor],
) -> None:
    plain = numbers_of(weighted(lambda q: q, write_out=True))
    found = numbers_of(weighted(made))
    assert found == plain
    assert plain["logical_read_bytes"][0] < 7 * 256 * 256


def test_what_a_subclass_runs_out_of_sight_is_not_counted_by_name() -> None:
    [note] = (
        note for note in weighted(Unseen).notes if NOT_COUNTED in note and "FLOPS" not in note
    )
    assert note.startswith(f"{NOT_COUNTED}: aten.mm: a subclass of Tensor ran operators that")


def branching(how: str) -> Loop:
    def loop() -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

            def forward(self, x: Tensor) -> Tensor:
                h, w = self.a(x), self.a.weight
                if how == "closure":
                    h = torch.cond(h.sum() > 1e9, lambda h: h.relu(), lambda h: self.a(h), (h,))
                elif how == "loop":
                    with torch.no_grad():
                        begun = torch.tensor(0), h.detach()
                        _, added = torch.while_loop(
                            lambda n, h: n < 3, lambda n, h: (n + 1, h @ w), begun
                        )
                    h = h + added
                else:
                    h = map_(lambda row, w: row @ w, h, w)
                return self.b(h).mean()

        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(6):
            net(torch.ones(ROWS, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


PRODUCT = 2 * ROWS * WIDTH * WIDTH
LAYERS = 2 * PRODUCT + 3 * 2 * ROWS * WIDTH
"""FLOPs of the two layers, forward and backward."""


@pytest.mark.parametrize(
    ("how", "flops"),
    # A branch is computed again in backward, which takes the gradients of input and weight.
    [
        ("closure", 4 * PRODUCT),
        ("map", 4 * PRODUCT),
        ("loop", 3 * PRODUCT),
    ],
)
def test_what_branches_and_loops_by_value_run_is_counted(how: str, flops: int) -> None:
    outcome = counted(branching(how), skip=0, go_on=True)
    assert by_step(outcome) == [LAYERS + flops] * 3
    assert len({*by_step(outcome, metric="logical_read_bytes")}) == 1
    assert not [note for note in outcome.notes if NOT_COUNTED in note]


@pytest.mark.parametrize(("kept", "again"), [("nothing", 1), ("products", 0)])
def test_what_a_checkpoint_computes_again_is_counted_and_what_it_kept_is_not(
    kept: str, again: int
) -> None:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = kept == "products" and operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def step(model: nn.Module, optimizer: Any) -> None:
        def layer(x: Tensor) -> Tensor:
            return torch.tanh(model(x))  # type: ignore[no-any-return]

        loss = checkpoint(
            layer,
            torch.ones(ROWS, WIDTH, requires_grad=True),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    outcome = counted(lambda: trained(step))
    assert by_step(outcome) == [(3 + again) * PRODUCT] * 3
