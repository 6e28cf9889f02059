"""Workloads with models of Hugging Face's Transformers, built without any download.

The models are changed in three ways, for all trainers. Opacus needs the first two changes:

- Weights that several layers share (tied weights) become separate weights, because Opacus would
  clip each use of a shared weight separately.
- Each example has its own row of position ids and token type ids. In Transformers, all examples
  share one row, but Opacus assumes that the first dimension of a layer's input is the batch. In
  models with ``ViTEmbeddings``, class token and positions become embedding layers.
- Dropout is 0 unless a parameter of the workload sets it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.core.case import positive
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.workloads.base import Batch, Workload
from dpbench.workloads.resnet import random_images
from dpbench.workloads.transformer import (
    get_random_dataloader,
    mean_cross_entropy,
    token_losses,
)


class HuggingFace(Workload):
    """Base class of workloads with a model of Transformers.

    Args:
        model_type: the model type in Transformers, such as ``gpt2``; ignored with ``config``.
        config: the path of a JSON file with a configuration, such as a model's ``config.json``. The
            file must contain the model type.
        overrides: values for fields of the configuration.
    """

    usual_type: ClassVar[str]
    auto: ClassVar[str]

    def __init__(self, *, model_type: str = "", config: str = "", **overrides: Any) -> None:
        fields: dict[str, Any] = {"tie_word_embeddings": False}
        if config:
            fields = _fields_of(Path(config)) | fields
        model_type = fields.pop("model_type", "") or model_type or self.usual_type
        try:
            known = transformers.AutoConfig.for_model(model_type)
        except ValueError as error:
            raise ConfigurationError(f"Transformers has no model type {model_type!r}") from error
        for name in overrides:
            if not hasattr(known, name):
                raise unknown(f"field of {model_type}", name, vars(known))
        for name, value in vars(known).items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                fields[name] = 0.0
        fields |= overrides
        self.config: Any = transformers.AutoConfig.for_model(model_type, **fields)

    def model(self) -> nn.Module:
        auto = getattr(transformers, self.auto)
        try:
            model: nn.Module = auto.from_config(self.config)
        except ValueError as error:  # the message lists all types
            words = str(error).partition(". ")[0].splitlines()[0]
            raise ConfigurationError(f"{self.config.model_type}: {words}") from error
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "ViTEmbeddings":
                    setattr(parent, name, ImageEmbeddings(child))
        self.takes = inspect.signature(model.forward).parameters
        return model

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        marked = [part for part in model.modules() if hasattr(type(part), "gradient_checkpointing")]
        return marked or super().blocks(model)

    def logits(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Return the logits for tokens ``[batch, length]``.

        Each example has its own row of position ids and token type ids.
        """
        given: dict[str, Any] = {"input_ids": tokens}
        if "position_ids" in self.takes:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            given["position_ids"] = positions.repeat(len(tokens), 1)
        if "token_type_ids" in self.takes and getattr(self.config, "type_vocab_size", None):
            given["token_type_ids"] = torch.zeros_like(tokens)
        if "use_cache" in self.takes:
            given["use_cache"] = False
        logits: Tensor = model(**given).logits
        return logits


class CausalLM(HuggingFace):
    """Next-token prediction. Each example has ``seq_len`` random tokens."""

    usual_type = "gpt2"
    auto = "AutoModelForCausalLM"

    def __init__(self, *, seq_len: int = 256, **options: Any) -> None:
        super().__init__(**options)
        self.seq_len = positive("seq_len", seq_len)

    def batches(self, batch_size: int) -> Iterable[Batch]:
        return get_random_dataloader(
            batch_size=batch_size, seq_len=self.seq_len, vocab_size=self.config.vocab_size
        )

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return token_losses(self.logits(model, batch[0]), batch[1])

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return mean_cross_entropy(self.logits(model, batch[0]), batch[1])


class SequenceClassification(CausalLM):
    """Classification of texts. Each example has ``seq_len`` random tokens and a random class."""

    usual_type = "bert"
    auto = "AutoModelForSequenceClassification"

    def batches(self, batch_size: int) -> Iterable[Batch]:
        for tokens, _ in super().batches(batch_size):
            yield tokens, torch.randint(self.config.num_labels, (batch_size,))

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch[0]), batch[1], reduction="none")

    loss = Workload.loss


class ImageClassification(HuggingFace):
    """Classification of images. Each example is an image of noise with a random class."""

    usual_type = "vit"
    auto = "AutoModelForImageClassification"

    def batches(self, batch_size: int) -> Iterable[Batch]:
        size = getattr(self.config, "image_size", 224)
        shape = (getattr(self.config, "num_channels", 3), size, size)
        return random_images(batch_size, shape, self.config.num_labels)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = model(pixel_values=batch[0]).logits
        return F.cross_entropy(logits, batch[1], reduction="none")


class ImageEmbeddings(nn.Module):
    """Replaces ``ViTEmbeddings``. Class token and positions are embedding layers here."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.patch_embeddings = original.patch_embeddings
        self.class_token = nn.Embedding.from_pretrained(original.cls_token.data[0], freeze=False)
        positions = original.position_embeddings.data[0]
        self.positions = nn.Embedding.from_pretrained(positions, freeze=False)
        self.dropout = original.dropout

    def forward(self, pixel_values: Tensor, **options: Any) -> Tensor:
        patches = self.patch_embeddings(pixel_values)
        ids = torch.arange(self.positions.num_embeddings, device=patches.device)
        ids = ids.repeat(len(patches), 1)
        embedded = torch.cat((self.class_token(torch.zeros_like(ids[:, :1])), patches), dim=1)
        dropped: Tensor = self.dropout(embedded + self.positions(ids))
        return dropped


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"configuration {path}: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigurationError(f"configuration {path} has no model_type")
    return fields
