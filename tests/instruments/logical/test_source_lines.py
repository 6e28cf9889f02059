"""Operators have the module and the source line that ran them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.core.case import Case
from dpbench.instruments.logical.counter import without_data
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.logical.recorder import LogicalRecorder
from dpbench.instruments.logical.source_lines import short_path
from dpbench.results.kernels import OperatorCount


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).relu()
        return x + self.down(wide)


class Blocks(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self._checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        return x


def step(model: nn.Module) -> tuple[OperatorCount, ...]:
    with without_data() as counter:
        model.to_empty(device="cpu")
        counter.start_step()
        model(torch.randn(4, 8)).sum().backward()
        counter.end_step()
        return counter.operators


def places(counts: tuple[OperatorCount, ...], operator: str) -> set[tuple[str, str]]:
    return {(c.module, c.line.partition(" ")[2]) for c in counts if c.operator == operator}


LINEARS = {f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("up", "down")}


def test_each_layer_has_its_own_name() -> None:
    modules = {(name, "forward") for name in LINEARS}
    assert places(step(Blocks()), "aten.addmm") == modules


def test_backward_has_the_places_of_forward() -> None:
    counts = step(Blocks())
    assert places(counts, "aten.mm") == {(name, "forward") for name in LINEARS}
    blocks = {("blocks.0", "forward"), ("blocks.1", "forward")}
    assert places(counts, "aten.threshold_backward") == blocks
    up, down = (
        {c.line for c in counts if c.operator == "aten.mm" and c.module.endswith(name)}
        for name in ("up", "down")
    )
    assert len(up) == len(down) == 1
    assert up != down


def test_so_has_what_a_checkpoint_computes_again() -> None:
    counts = step(Blocks(checkpoints=True))
    assert {module for module, _ in places(counts, "aten.addmm")} == LINEARS


def test_a_hook_has_its_own_line_and_the_module_that_it_is_of() -> None:
    model = Blocks()

    def double(module: nn.Module, ins: object, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (outs[0].exp(),)

    model.blocks[1].register_full_backward_hook(double)
    assert places(step(model), "aten.exp") == {("blocks.1", "double")}


def test_a_module_that_is_false_counts() -> None:
    class Empty(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x.requires_grad_().exp()

    assert places(step(Empty()), "aten.exp") == {("Empty", "forward")}


def test_a_model_that_cannot_name_its_modules_is_counted_all_the_same() -> None:
    class Nameless(Blocks):
        def named_modules(
            self, *args: object, **options: object
        ) -> Iterator[tuple[str, nn.Module]]:
            raise RuntimeError("not today")

    counter = LogicalRecorder()
    model = Nameless()
    for _ in range(2):
        counter.start_step()
        model(torch.randn(4, 8)).sum().backward()
        counter.end_step()
    counter.close()
    assert places(tuple(counter.operators), "aten.addmm") == {("Linear", "forward")}
    assert not [note for note in counter.notes if "NOT COUNTED" in note]


def test_a_file_of_a_package_is_named_from_the_folder_of_the_package(tmp_path: Path) -> None:
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert short_path(str(inner / "code.py")) == "package/inner/code.py"
    alone = str(tmp_path / "code.py")
    assert short_path(alone) == alone


def test_trainers_of_dpbench_and_opacus_have_their_own_lines() -> None:
    counts = Logical().count(Case("dpsgd", 2, 16, "8x16x2x2")).operators
    [noise] = (c for c in counts if c.operator == "aten.normal")
    assert noise.line.startswith("opacus/optimizers/optimizer.py:")
    [samples] = {
        c.module for c in counts if c.line.startswith("opacus/grad_sample/embedding.py")
    } - {"token_embedding"}
    assert samples == "position_embedding"
    standard = Logical().count(Case("standard", 2, 16, "8x16x2x2")).operators
    assert all(c.line.startswith("dpbench/") for c in standard)
