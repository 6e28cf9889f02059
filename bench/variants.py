"""The built-in transformer with layers that CUDA runs otherwise than the CPU does.

To compare logical bytes with measured ones, by import target from the repository's root::

    dpbench run --instrument ncu --instrument logical --model bench.variants:DropoutTransformer
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.case import ModelSize
from dpbench.workloads.transformer import SelfAttention, SimpleBigModel

DROPOUT = 0.1


class DroppingAttention(SelfAttention):
    """Attention that drops some of its weights; ``[B, T, H]`` to the same."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            dropout_p=DROPOUT if self.training else 0.0,
            is_causal=True,
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return merged


class DropoutTransformer(SimpleBigModel):
    """With dropout where GPT-2 has it: in attention, and after each of the two projections."""

    def __init__(
        self, size: ModelSize, *, attention: str = "sdpa", max_seq_len: int = 1024
    ) -> None:
        super().__init__(size, attention=attention, max_seq_len=max_seq_len)
        for block in self.blocks.children():
            mixing = DroppingAttention(size.hidden, size.heads)
            block.add_module("attention", nn.Sequential(mixing, nn.Dropout(DROPOUT)))
            down = block.get_submodule("down")
            block.add_module("down", nn.Sequential(down, nn.Dropout(DROPOUT)))


class RMSNormTransformer(SimpleBigModel):
    """With ``nn.RMSNorm`` in place of every ``nn.LayerNorm``."""

    def __init__(
        self, size: ModelSize, *, attention: str = "sdpa", max_seq_len: int = 1024
    ) -> None:
        super().__init__(size, attention=attention, max_seq_len=max_seq_len)
        for parent in list(self.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, name, nn.RMSNorm(size.hidden))
