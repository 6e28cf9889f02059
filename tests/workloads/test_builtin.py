"""The workloads that come with dpbench: every trainer does to them what its arithmetic says."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Batch, Workload
from dpbench.child.build import workload_of
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import WORKLOADS, resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.verify.reference import Examples
from dpbench.workloads.axes import checkpoint_blocks
from dpbench.workloads.layer import LAYERS

SMALL = "num_hidden_layers=1,hidden_size=32,intermediate_size=64,num_attention_heads=4"
GPT2 = "n_layer=1,n_embd=32,n_head=2,vocab_size=60,bos_token_id=1,eos_token_id=2,seq_len=6"
HUGGING_FACE = {
    "gpt2": ("hf-causal-lm", GPT2),
    "llama": ("hf-causal-lm", f"model_type=llama,{SMALL},vocab_size=60,seq_len=6"),
    "bert": ("hf-sequence-classification", f"{SMALL},vocab_size=60,seq_len=6"),
    "vit": ("hf-image-classification", f"{SMALL},image_size=32"),
}
OTHERS = {
    "resnet18": ("resnet", "depth=18,image_size=32,classes=10"),
    **{name: ("layer", f"layer={name},width=64,length=5,vocabulary=50") for name in LAYERS},
}
ALL = OTHERS | HUGGING_FACE


def case_of(name: str, trainer: str = "standard", batch_size: int = 3) -> Case:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    workload, parameters = ALL[name]
    return resolve(Case(trainer, batch_size, workload=workload, set=parameters))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


@dataclass(frozen=True)
class Expected:
    """A model and a batch, and the mean of per-example gradients clipped at their median norm."""

    workload: Workload
    model: nn.Module
    batch: Batch
    clipped_mean: Tensor
    median_norm: float


@cache
def expected(name: str) -> Expected:
    workload = workload_of(case_of(name))
    torch.manual_seed(0)
    model = workload.model().train()
    batch = next(iter(workload.batches(3)))
    examples = Examples.computed(copy.deepcopy(model), batch, workload.losses)
    median = float(examples.norms.norm(dim=1).median())
    means = examples.mean(examples.factors("flat", median)).values()
    mean = torch.cat([mean.flatten() for mean in means])
    return Expected(workload, model, batch, mean, median)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        *((name, "dpsgd") for name in ALL if name != "resnet18"),
        pytest.param("resnet18", "dpsgd", marks=SLOW),
        *((name, "fused") for name in ALL if name not in ("lstm", "gru", "rnn")),  # tied
        *(pytest.param(name, t, marks=SLOW) for name in ALL for t in ("dpsgd_ghost", "dpsgd_fgc")),
    ],
)
def test_without_noise_the_update_is_the_mean_of_clipped_per_example_gradients(
    name: str, trainer: str
) -> None:
    given = expected(name)
    mean = given.clipped_mean
    assert mean.norm() > 0
    options = {"noise_multiplier": 0.0, "max_grad_norm": given.median_norm, "learning_rate": 1.0}

    def update_of(model: nn.Module, **more: torch.dtype) -> Tensor:
        made = TRAINERS[trainer](model, batch_size=3, workload=given.workload, **options, **more)
        made.train_step(given.batch)
        return flat(given.model) - flat(made.model)

    update = update_of(copy.deepcopy(given.model))
    assert (update - mean).norm() < 1e-3 * mean.norm()
    if name != "resnet18":  # 16 bits are too few for its twenty layers on noise
        mixed = update_of(copy.deepcopy(given.model), autocast=torch.bfloat16)
        assert (mixed - mean).norm() < 5e-2 * mean.norm()
    if name not in LAYERS:
        checkpointed = copy.deepcopy(given.model)
        checkpoint_blocks(given.workload, checkpointed)
        assert torch.equal(update_of(checkpointed), update)


@pytest.mark.parametrize(
    "name",
    [name if name in ("lstm", "llama") else pytest.param(name, marks=SLOW) for name in ALL],
)
def test_its_bytes_are_counted_by_phase(name: str) -> None:
    result = Logical().count(case_of(name, "dpsgd"))
    phases = {row.phase for row in result.rows if row.value > 0}
    assert phases >= {"forward", "backward", "clip", "noise", "optimizer"}


@pytest.mark.parametrize(
    ("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)]
)
def test_resnets_have_the_parameters_of_their_paper(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = WORKLOADS["resnet"](depth=depth).model()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("hf-causal-lm", {}, 124_439_808 + 50257 * 768),  # the head is untied
        ("hf-sequence-classification", {}, 109_483_778),
        ("hf-image-classification", {"num_labels": 1000}, 86_567_656),
    ],
)
def test_hugging_face_models_have_their_usual_parameters(
    name: str, options: dict[str, int], parameters: int
) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = WORKLOADS[name](**options).model()
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_configuration_comes_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    path.write_text(json.dumps({**fields, "tie_word_embeddings": True, "attn_pdrop": 0.3}))
    built = WORKLOADS["hf-causal-lm"](config=str(path), n_head=4)
    assert (built.config.n_layer, built.config.n_embd, built.config.n_head) == (1, 8, 4)
    assert (built.config.tie_word_embeddings, built.config.attn_pdrop) == (False, 0.0)
    assert WORKLOADS["hf-causal-lm"](config=str(path), attn_pdrop=0.1).config.attn_pdrop == 0.1


@pytest.mark.parametrize(
    ("workload", "parameters", "said"),
    [
        ("resnet", {"depth": 19}, "unknown depth '19'; choose from 18, 34, 50"),
        ("layer", {"layer": "rms"}, "unknown layer 'rms'; choose from linear, conv"),
        ("layer", {"layer": "conv", "length": 0}, "layer conv cannot have length 0"),
        ("hf-causal-lm", {"n_layr": 2}, "unknown field of gpt2 'n_layr'; choose from n_layer"),
        ("hf-causal-lm", {"model_type": "gptx"}, "Transformers has no model type 'gptx'"),
        ("hf-causal-lm", {"model_type": "vit"}, "vit: Unrecognized configuration class"),
        ("hf-causal-lm", {"config": "no.json"}, "configuration no.json: [Errno 2] No such file"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(
    workload: str, parameters: dict[str, object], said: str
) -> None:
    if workload.startswith("hf"):
        pytest.importorskip("transformers")
    with pytest.raises(ConfigurationError) as caught:
        WORKLOADS[workload](**parameters).model()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    monkeypatch.delitem(__import__("sys").modules, "dpbench.workloads.huggingface", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install transformers"):
        WORKLOADS["hf-causal-lm"]
