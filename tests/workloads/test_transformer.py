"""The model: its size, its causality, and the reasons for its layers."""

from __future__ import annotations

import pytest
import torch

from dpbench import MODEL_SIZES, ConfigurationError, SimpleBigModel
from dpbench.core.case import ATTENTIONS

TINY = MODEL_SIZES["tiny"]


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("tiny", (1_000, 64, 2, 4)),
        ("small", (8_000, 256, 4, 8)),
        ("medium", (16_000, 512, 8, 8)),
        ("1b", (32_000, 2_048, 24, 32)),
    ],
)
def test_named_sizes(name: str, dimensions: tuple[int, ...]) -> None:
    size = MODEL_SIZES[name]
    assert (size.vocabulary, size.hidden, size.layers, size.heads) == dimensions


def test_the_1b_model_has_1_34_billion_parameters() -> None:
    with torch.device("meta"):
        model = SimpleBigModel(MODEL_SIZES["1b"])
    assert sum(p.numel() for p in model.parameters()) == 1_341_771_776


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_do_not_depend_on_later_tokens(attention: str) -> None:
    torch.manual_seed(0)
    model = SimpleBigModel(TINY, attention=attention)
    tokens = torch.randint(TINY.vocabulary, (3, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % TINY.vocabulary
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 10, TINY.vocabulary)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_examples_do_not_see_each_other(attention: str) -> None:
    torch.manual_seed(0)
    model = SimpleBigModel(TINY, attention=attention)
    tokens = torch.randint(TINY.vocabulary, (4, 7))
    alone = torch.cat([model(example[None]) for example in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-4, atol=1e-5)


def test_both_attentions_compute_the_same_function() -> None:
    ours = SimpleBigModel(TINY)
    theirs = SimpleBigModel(TINY, attention="dp_mha")
    names = {"query": "qlinear", "key": "klinear", "value": "vlinear", "output": "out_proj"}
    state = {
        ".".join(
            f"attention.{names[part]}.layer" if part in names else part for part in key.split(".")
        ): value
        for key, value in ours.state_dict().items()
    }
    missing = torch.nn.Module.load_state_dict(theirs, state, strict=False)
    assert not missing.unexpected_keys
    tokens = torch.randint(TINY.vocabulary, (2, 9))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-5)


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose from sdpa, dp_mha"):
        SimpleBigModel(TINY, attention="flash")
