"""Which model types of Transformers train, each as people have it: see the table in the reference.

The models are tiny. Weights are tied and inputs are shared as the types do it by default. Each
update is compared with that of a loop over the examples.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench import TRAINERS
from dpbench.core.errors import ConfigurationError
from dpbench.workloads.base import Batch, Workload

transformers: Any = pytest.importorskip("transformers")

EXAMPLES, TOKENS, WORDS, CLASSES = 3, 7, 61, 5
THRESHOLD = 0.5
REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"

WHY = {
    "per-sample gradients for": "examples share an input",
    "it has buffers": "a layer has buffers",
    "missing 2 required positional arguments": "a layer has several arguments",
    "must not be changed in place": "an output is changed in place",
    "'int' object has no attribute 'detach'": "a layer has an argument that is no tensor",
    "on the expected device meta": "a bias is tied",
    "is not contiguous": "an input is not contiguous",
}
"""Words of the table by what the error of Opacus's trainer contains."""

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = SMALL | {"vocab_size": WORDS, "max_position_embeddings": 32}
LLAMA = TEXT | {"num_key_value_heads": 1, "pad_token_id": 0}
IMAGE = SMALL | {"image_size": 16, "patch_size": 8, "num_channels": 3, "num_labels": CLASSES}
GPT = {"vocab_size": WORDS, "n_layer": 2, "n_head": 2}
CODER = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip

TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", GPT | {"n_embd": 16, "n_positions": 32}),
    "llama": ("CausalLM", LLAMA),
    "llama, tied": ("CausalLM", LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("CausalLM", LLAMA),
    "qwen3": ("CausalLM", LLAMA | {"head_dim": 8}),
    "gemma2": ("CausalLM", LLAMA | {"head_dim": 8}),
    "gemma3_text": ("CausalLM", LLAMA | {"head_dim": 8}),
    "phi": ("CausalLM", TEXT),
    "opt": (
        "CausalLM",
        TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "gpt_neox": ("CausalLM", TEXT),
    "bloom": ("CausalLM", GPT | {"hidden_size": 16}),
    "falcon": ("CausalLM", TEXT),
    "mixtral": ("CausalLM", LLAMA | {"num_local_experts": 3}),
    "qwen3_moe": (
        "CausalLM",
        LLAMA
        | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
    "mamba": (
        "CausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
        | {"time_step_rank": 4},
    ),
    "bert": ("MaskedLM", TEXT),
    "roberta": ("MaskedLM", TEXT),
    "distilbert": (
        "MaskedLM",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    ),
    "t5": (
        "Seq2SeqLM",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
        | {"num_heads": 2, "decoder_start_token_id": 0},
    ),
    "bart": ("Seq2SeqLM", CODER | {"max_position_embeddings": 32}),
    "whisper": (
        "SpeechSeq2Seq",
        CODER | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
    ),
    "vit": ("ImageClassification", IMAGE),
    "convnext": (
        "ImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 16}
        | {"patch_size": 4, "num_labels": CLASSES},
    ),
    "clip_vision_model": ("ImageClassification", IMAGE),
}
"""The class in Transformers and the configuration of each type."""


class OfType(Workload):
    """A tiny model of a type, and one batch of random data for it."""

    def __init__(self, name: str) -> None:
        self.task, fields = TYPES[name]
        model_type = name.partition(",")[0]
        known = transformers.AutoConfig.for_model(model_type)
        for field, value in vars(known).items():
            if "drop" in field and isinstance(value, float):
                fields = {field: 0.0} | fields
        self.config = transformers.AutoConfig.for_model(model_type, **fields)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.config.model_type == "clip_vision_model":
            return Classifier(transformers.AutoModel.from_config(self.config))
        model: nn.Module = getattr(transformers, f"AutoModelFor{self.task}").from_config(
            self.config
        )
        for parameter in model.parameters():  # some begin at zero, and would hide an error
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.float()

    def batches(self, batch_size: int) -> Iterable[Batch]:
        torch.manual_seed(1)
        words, labels = torch.randint(3, WORDS, (2, EXAMPLES, TOKENS))
        if self.task == "ImageClassification":
            yield torch.randn(EXAMPLES, 3, 16, 16), torch.randint(CLASSES, (EXAMPLES,))
        elif self.task == "SpeechSeq2Seq":
            yield torch.randn(EXAMPLES, 8, 20), words, labels
        else:
            yield words, labels

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        *inputs, labels = batch
        if self.task == "ImageClassification":
            return F.cross_entropy(model(pixel_values=inputs[0]).logits, labels, reduction="none")
        given: dict[str, Any] = {"input_ids": inputs[0]}
        if self.task == "Seq2SeqLM":
            given["decoder_input_ids"] = labels
        if self.task == "SpeechSeq2Seq":
            given = {"input_features": inputs[0], "decoder_input_ids": inputs[1]}
        if self.task != "MaskedLM":
            given["use_cache"] = False
        logits = model(**given).logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(labels.shape).mean(1)


class Classifier(nn.Module):
    """A model without a head, with a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(SMALL["hidden_size"], CLASSES)

    def forward(self, pixel_values: Tensor) -> Any:
        made = self.inner(pixel_values=pixel_values)
        made.logits = self.head(made.pooler_output)
        return made


def update_of_a_loop(workload: OfType) -> Tensor:
    """Return the change of the parameters by the mean of clipped gradients."""
    model = workload.model().train()
    [batch] = workload.batches(EXAMPLES)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    clipped = torch.zeros(sum(p.numel() for p in parameters))
    for n in range(EXAMPLES):
        loss = workload.losses(model, tuple(part[n : n + 1] for part in batch)).sum()
        made = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradient = torch.cat(
            [torch.zeros(p.numel()) if g is None else g.flatten()
             for g, p in zip(made, parameters, strict=True)]
        )  # fmt: skip
        clipped += gradient * min(1, THRESHOLD / float(gradient.norm()))
    return -clipped / EXAMPLES


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def outcome(name: str, trainer: str) -> str:
    """Return what the table says about a type and a trainer."""
    workload = OfType(name)
    try:
        made = TRAINERS[trainer](
            workload.model(), batch_size=EXAMPLES, workload=workload,
            noise_multiplier=0.0, learning_rate=1.0, max_grad_norm=THRESHOLD,
        )  # fmt: skip
        before = values(made.model)
        [batch] = workload.batches(EXAMPLES)
        made.train_step(batch)
    except ConfigurationError as error:
        return next((why for words, why in WHY.items() if words in str(error)), str(error))
    change, expected = values(made.model) - before, update_of_a_loop(workload)
    assert (change - expected).norm() < 1e-4 * expected.norm()
    return "trains"


def table() -> dict[str, list[str]]:
    """Return what the table in the reference says about each model type."""
    _, _, after = REFERENCE.read_text(encoding="utf-8").partition("<!-- model types -->\n")
    lines = after.partition("\n<!-- end -->")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): said for *said, names in rows for name in names.split("; ")}


def test_the_table_has_each_type() -> None:
    assert table().keys() == TYPES.keys()


USUAL = ("gpt2", "mixtral", "t5", "vit")


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in TYPES]
)
def test_a_type_trains_as_the_table_says(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [outcome(name, trainer) for trainer in ("dpsgd", "fused")] == table()[name]


ALONE = """
from dpbench.core.case import Case
from dpbench.instruments.logical.logical import Logical

sizes = "hidden_size=8,intermediate_size=8,num_attention_heads=2,num_hidden_layers=1"
options = f"model_type=llama,seq_len=4,vocab_size=9,num_key_value_heads=1,{sizes}"
assert Logical().count(Case("fused", 2, workload="hf-causal-lm", set=options)).operators
"""


def test_layers_that_functorch_clips_are_counted_before_any_other_trainer() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True)
