"""The built-in transformer with parts of other people's models, named by import target.

They show how near the logical count comes to what CUDA does with such parts:

    dpbench run --model bench.variants:DropoutModel --batch-size 8 --seq-len 1024
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.model_size import ModelSize
from dpbench.workloads.transformer import SelfAttention, SimpleBigModel

DROPOUT = 0.1


class DropoutSelfAttention(SelfAttention):
    """Fused attention with dropout on its weights."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            is_causal=True,
            dropout_p=DROPOUT if self.training else 0.0,
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return merged


class DropoutModel(SimpleBigModel):
    """Dropout where GPT-2 has it: embeddings, attention weights, and each residual branch."""

    def __init__(
        self, size: ModelSize, *, attention: str = "sdpa", max_seq_len: int = 1024
    ) -> None:
        super().__init__(size, attention=attention, max_seq_len=max_seq_len)
        for block in self.blocks:
            attend = DropoutSelfAttention(size.hidden, size.heads)
            block.attention = nn.Sequential(attend, nn.Dropout(DROPOUT))
            block.down = nn.Sequential(block.get_submodule("down"), nn.Dropout(DROPOUT))
        self.blocks.insert(0, nn.Dropout(DROPOUT))


class RMSNormModel(SimpleBigModel):
    """``nn.RMSNorm`` in the place of every ``nn.LayerNorm``."""

    def __init__(
        self, size: ModelSize, *, attention: str = "sdpa", max_seq_len: int = 1024
    ) -> None:
        super().__init__(size, attention=attention, max_seq_len=max_seq_len)
        for block in self.blocks:
            block.attention_norm = nn.RMSNorm(size.hidden)
            block.feed_forward_norm = nn.RMSNorm(size.hidden)
        self.add_module("final_norm", nn.RMSNorm(size.hidden))
