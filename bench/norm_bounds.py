"""By how much the upper bounds of norms lower clipping factors on ordinary data.

Activations and gradients are those of a transformer as wide as ``1b``, of one example and two
blocks, which count for its 24; the bounds are those of a GPU's arithmetic, the exact norms are in
float64. No GPU is needed: what a bound adds depends on exact sums and on how products are made.

    python bench/norm_bounds.py [--tokens 256 --tokens 1024]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dpbench import SimpleBigModel, get_random_dataloader
from dpbench.core.model_size import MODEL_SIZES, ModelSize
from dpbench.training.book_keeping import BookKeepingTrainer
from dpbench.training.kernels import gram_sums, products
from dpbench.training.norm_bounds import ProductError, gram_bound
from dpbench.training.norm_ways import PRODUCTS
from dpbench.training.per_layer import EmbeddingRule, LinearRule, Seen

BLOCKS = 2

WAYS: dict[tuple[str, str], Callable[[int], tuple[float, float]]] = {
    ("fp32", "products"): lambda k: (k, 1),
    ("fp32", "kernel"): lambda k: (k / 32 + 1, 48 + 72),
    ("bf16", "both"): lambda k: (11 * (k / 16 + 1), 11),
}
"""By precision and way of the products K long, `product_error` on a GPU, in units of 2⁻²⁴."""


class Kept(BookKeepingTrainer):
    """Keeps, of each layer, the sums of its products, instead of clipping."""

    known_ways = (PRODUCTS,)

    def __init__(self, model: nn.Module, *, batch_size: int) -> None:
        super().__init__(model, batch_size=batch_size, noise_multiplier=0.0)
        self.names = {layer: name for name, layer in model.named_modules()}
        self.kept: list[tuple[bool, Tensor, int, int, int]] = []

    def squared_norms(self, seen: dict[nn.Module, Seen]) -> list[Tensor]:
        for layer, calls in seen.items():
            rule = self.rules[layer]
            if isinstance(rule, LinearRule | EmbeddingRule):
                x, g = rule.joined(calls)
                width = x.shape[2] if x.dim() == 3 else 0
                x = x.double() if width else x
                made = gram_sums(*products(x, g.double()))
                name = self.names[layer]
                self.kept.append(("blocks." in name, made, x.shape[1], width, g.shape[2]))
        return super().squared_norms(seen)


def rows(size: ModelSize, lengths: list[int]) -> Iterator[list[object]]:
    """For each length, precision and way, by how many percent a clipped example counts less."""
    shallow = ModelSize(size.vocabulary, size.hidden, min(BLOCKS, size.layers), size.heads)
    for tokens in lengths:
        torch.manual_seed(0)
        trainer = Kept(SimpleBigModel(shallow, max_seq_len=tokens), batch_size=1)
        loader = get_random_dataloader(batch_size=1, seq_len=tokens, vocab_size=size.vocabulary)
        trainer.train_step(next(iter(loader)))
        for (precision, way), error in WAYS.items():
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            exact = bound = 0.0
            for in_block, sums, length, width, height in trainer.kept:
                times = size.layers / shallow.layers if in_block else 1
                errors = [ProductError(*(n * 2.0**-24 for n in error(k))) for k in (width, height)]
                norms = gram_bound([sums.float()], length, (errors[0], errors[1]), dtype)
                exact += times * float(sums[0])
                bound += times * float(norms)
            yield [tokens, precision, way, f"{100 * (1 - (exact / bound) ** 0.5):.2f} %"]


def main() -> int:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--model-size", default="1b", choices=MODEL_SIZES)
    options = parser.parse_args()
    print("tokens, precision, products by, factors lower by")
    for row in rows(MODEL_SIZES[options.model_size], options.tokens or [256, 1024]):
        print(*row, sep="  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
