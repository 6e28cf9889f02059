"""The workload ``transformer``: a decoder-only transformer of layers that Opacus supports.

Opacus 1.6 is the reason for three choices. Query, key, value and output projections are separate
``nn.Linear`` layers, because Opacus computes norms without per-sample gradients for ``Linear`` and
``Embedding`` layers only. Embedding and output layers do not share weights, because Opacus's ghost
clipping refuses shared weights. Position ids are repeated for each example, because
Opacus's hooks need the batch as the first dimension of each layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from dpbench.core.case import ATTENTIONS, ModelSize
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.registry import MODELS, called
from dpbench.workloads.base import Batch, Workload


class SelfAttention(nn.Module):
    """Causal multi-head attention with PyTorch's ``scaled_dot_product_attention``.

    Inputs and outputs have the shape ``[batch, length, hidden]``.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), is_causal=True
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return merged


class OpacusSelfAttention(nn.Module):
    """Causal attention with Opacus's ``DPMultiheadAttention``.

    Inputs and outputs have the shape ``[batch, length, hidden]``. Opacus's layer stores all
    ``batch * heads * length**2`` scores. The layer is used without ``batch_first=True``, so it runs
    on ``[length, batch, hidden]``. With this option, the layer in Opacus 1.6.0 masks the wrong
    scores, so that a position sees later positions. The projections run on
    ``[batch, length, hidden]``, because Opacus's hooks assume that the first dimension of an input
    is the batch.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        from opacus.layers import DPMultiheadAttention

        self.attention = DPMultiheadAttention(hidden, heads)
        for name in ("qlinear", "klinear", "vlinear", "out_proj"):
            setattr(self.attention, name, BatchFirst(getattr(self.attention, name)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length = len(x)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed: Tensor = self.attention(x, x, x, attn_mask=future, need_weights=False)[0]
        return mixed.transpose(0, 1)


class BatchFirst(nn.Module):
    """Wraps a layer. Swaps the first two dimensions of the layer's input and of its output.

    So the layer receives ``[batch, length, hidden]`` if the wrapper receives
    ``[length, batch, hidden]``.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        applied: Tensor = self.layer(x.transpose(0, 1))
        return applied.transpose(0, 1)


class Block(nn.Module):
    """A transformer block: attention and a feed-forward part, each after a layer norm.

    The feed-forward part has a hidden layer of four times the block's width, with GELU.
    """

    def __init__(self, size: ModelSize, attention: str) -> None:
        super().__init__()
        attention_class = SelfAttention if attention == "sdpa" else OpacusSelfAttention
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = attention_class(size.hidden, size.heads)
        self.feed_forward_norm = nn.LayerNorm(size.hidden)
        self.up = nn.Linear(size.hidden, 4 * size.hidden)
        self.down = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        fed_forward: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(x))))
        return x + fed_forward


class SimpleBigModel(nn.Module):
    """A language model like GPT.

    Its input is int64 token ids ``[batch, length]``. Its output is logits
    ``[batch, length, vocabulary]``.

    Args:
        size: the model's dimensions.
        attention: a name in `ATTENTIONS`.
        max_seq_len: the number of rows of the position embedding.
    """

    def __init__(
        self, size: ModelSize, *, attention: str = "sdpa", max_seq_len: int = 1024
    ) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            raise unknown("attention", attention, ATTENTIONS)
        self.token_embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.position_embedding = nn.Embedding(max_seq_len, size.hidden)
        self.blocks = nn.Sequential(*(Block(size, attention) for _ in range(size.layers)))
        self.final_norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, length = input_ids.shape
        positions = torch.arange(length, device=input_ids.device).repeat(batch, 1)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        logits: Tensor = self.head(self.final_norm(self.blocks(x)))
        return logits


class Transformer(Workload):
    """Next-token prediction on random tokens, with `SimpleBigModel` or another model.

    Args:
        seq_len: the number of tokens in an example.
        model_size: a name in `MODEL_SIZES`, or ``VOCABULARYxHIDDENxLAYERSxHEADS``.
        attention: a name in `ATTENTIONS`.
        model: the name of a class in `MODELS`, or its spelling ``package.module:Class``.
    """

    def __init__(
        self,
        *,
        seq_len: int = 256,
        model_size: str = "1b",
        attention: str = "sdpa",
        model: str = "simple",
    ) -> None:
        self.seq_len, self.attention, self.name = seq_len, attention, model
        self.model_size, self.size = model_size, ModelSize.parse(model_size)

    def model(self) -> nn.Module:
        needs = "a model is an nn.Module, called as Model(size, attention=…, max_seq_len=…)"
        longest = max(1024, self.seq_len)
        model: nn.Module = called(
            f"model {self.name}",
            MODELS[self.name],
            nn.Module,
            needs,
            self.size,
            attention=self.attention,
            max_seq_len=longest,
        )
        if not any(self.size.hidden in parameter.shape for parameter in model.parameters()):
            raise ConfigurationError(
                f"model {self.name} has no layer of width {self.size.hidden}, so it ignores the "
                f"model size {self.model_size}. Name its real size with "
                f"--model-size VOCABULARYxHIDDENxLAYERSxHEADS, or define a workload"
            )
        return model

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        blocks = getattr(model, "blocks", None)
        return (
            blocks if isinstance(blocks, nn.Sequential | nn.ModuleList) else super().blocks(model)
        )

    def batches(self, batch_size: int) -> Iterable[Batch]:
        return get_random_dataloader(
            batch_size=batch_size, seq_len=self.seq_len, vocab_size=self.size.vocabulary
        )

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return token_losses(model(batch[0]), batch[1])

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return mean_cross_entropy(model(batch[0]), batch[1])


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, a scalar.

    The arguments are logits ``[batch, length, vocabulary]`` and labels ``[batch, length]``.
    """
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each example the mean cross-entropy over its tokens, a tensor ``[batch]``.

    The arguments are logits ``[batch, length, vocabulary]`` and labels ``[batch, length]``.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    by_token = F.cross_entropy(flat, labels.reshape(-1), reduction="none")
    return by_token.view(labels.shape).mean(dim=1)


def get_random_dataloader(
    *,
    batch_size: int,
    seq_len: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    num_batches: int = 8,
    seed: int = 0,
) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of batches of uniformly random tokens on ``device``.

    Every batch has ``batch_size`` examples. Equal seeds give equal tokens on all devices.

    Returns:
        A loader of ``num_batches`` pairs ``(input_ids, labels)``. Both are int64 tensors
        ``[batch_size, seq_len]``. A label is the token that follows the input token.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(
        vocab_size, (num_batches * batch_size, seq_len + 1), generator=generator, device="cpu"
    ).to(device)
    dataset = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    batches = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)
    # With batch_size=None, the loader reads all indices of a batch at once from the sampler.
    return DataLoader(dataset, sampler=batches, batch_size=None)
