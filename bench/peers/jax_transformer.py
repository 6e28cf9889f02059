"""Train dpbench's transformer in JAX by jax-privacy (https://github.com/google-deepmind/jax_privacy).

`PrivateSteps` is a training loop that `dpbench.observe` measures:

    python -m bench.peers.jax_transformer --instrument cupti --batch-size 8 --seq-len 256

`JaxPrivacyTrainer` trains the built-in model by `PrivateSteps`, so that ``dpbench verify`` can
check these steps. Do not measure this trainer: it copies the parameters in every step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import numpy
import optax
import torch
from jax import numpy as jnp
from jax_privacy import clipped_grad
from jax_privacy.noise_addition import gaussian_privatizer
from torch import Tensor, nn

from dpbench import SimpleBigModel, get_random_dataloader, observe
from dpbench.core.case import ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase

Parameters: TypeAlias = Mapping[str, jax.Array]
"""Parameters of `SimpleBigModel`, by name."""


def mean_loss(
    parameters: Parameters, layers: int, heads: int, ids: jax.Array, labels: jax.Array
) -> Any:
    """Return the mean cross-entropy of `SimpleBigModel` for token ids and labels ``[B, T]``."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        return x @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)

    def norm(name: str, x: jax.Array) -> jax.Array:
        normal = jax.nn.standardize(x, epsilon=1e-5)
        return normal * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def attention(name: str, x: jax.Array) -> jax.Array:
        q, k, v = (
            linear(f"{name}.{each}", x).reshape(*x.shape[:2], heads, -1)
            for each in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return linear(f"{name}.output", mixed.reshape(x.shape))

    x = parameters["token_embedding.weight"][ids]
    x = x + parameters["position_embedding.weight"][: ids.shape[1]]
    for block in (f"blocks.{number}" for number in range(layers)):
        x = x + attention(f"{block}.attention", norm(f"{block}.attention_norm", x))
        up = linear(f"{block}.up", norm(f"{block}.feed_forward_norm", x))
        x = x + linear(f"{block}.down", jax.nn.gelu(up, approximate=False))
    logits = linear("head", norm("final_norm", x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class PrivateSteps:
    """DP-SGD by jax-privacy, in which each step is one compiled program.

    Args:
        model: the built-in model. Its parameters are copied to JAX.
        batch_size: examples in every batch.
        learning_rate: learning rate of SGD.
        noise_multiplier: standard deviation of the noise ÷ ``max_grad_norm``.
        max_grad_norm: clipping threshold.

    Raises:
        ConfigurationError: the model is not the built-in model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        learning_rate: float = 1e-3,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        if type(model) is not SimpleBigModel:
            raise ConfigurationError("jax_privacy trains the built-in model only")
        layers, heads = len(model.blocks), model.blocks[0].attention.heads
        gradient = clipped_grad(
            lambda parameters, *batch: mean_loss(parameters, layers, heads, *batch),
            l2_clip_norm=max_grad_norm,
            batch_argnums=(1, 2),
            return_values=True,
        )
        noise = gaussian_privatizer(
            stddev=noise_multiplier * gradient.sensitivity(),
            prng_key=int(torch.randint(2**31 - 1, ())),
        )
        update = optax.chain(noise, optax.scale(1 / batch_size), optax.sgd(learning_rate))

        def step(parameters: Parameters, state: Any, ids: jax.Array, labels: jax.Array) -> Any:
            total, seen = gradient(parameters, ids, labels)
            updates, state = update.update(total, state)
            return optax.apply_updates(parameters, updates), state, seen.values.mean()

        self.parameters = {name: in_jax(p) for name, p in model.named_parameters()}
        self.state = update.init(self.parameters)
        self.compiled = jax.jit(step, donate_argnums=(0, 1))

    def step(self, ids: jax.Array, labels: jax.Array) -> jax.Array:
        """Train on token ids and labels ``[B, T]``. Return the mean loss before the update."""
        self.parameters, self.state, loss = self.compiled(self.parameters, self.state, ids, labels)
        return loss


class JaxPrivacyTrainer(TrainerBase):
    """A trainer that takes steps of `PrivateSteps`. It has the arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the model is not the built-in model, or the case requests autocast or an
            optimizer other than SGD.
    """

    labels: ClassVar[Mapping[str, str]] = {"clips": "flat", "noise": "in the compiled step"}

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        if self.autocast or type(self.plain_optimizer) is not torch.optim.SGD:
            raise ConfigurationError("jax_privacy trains by SGD, without autocast")
        self.steps = PrivateSteps(
            model,
            batch_size=batch_size,
            learning_rate=self.plain_optimizer.param_groups[0]["lr"],
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
        )

    @torch.no_grad()
    def train_step(self, batch: Batch) -> Tensor:
        trained = dict(self.model.named_parameters())
        self.steps.parameters = {name: in_jax(p) for name, p in trained.items()}
        loss = self.steps.step(*map(in_jax, batch))
        for name, parameter in trained.items():
            parameter.copy_(torch.tensor(numpy.asarray(self.steps.parameters[name])))
        return torch.tensor(float(loss))


def in_jax(tensor: Tensor) -> jax.Array:
    """Return a copy of a tensor on JAX's default device."""
    return jnp.array(tensor.detach().cpu().numpy())


def main() -> None:
    """Measure `PrivateSteps` with an instrument, and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instrument", default="timing")
    parser.add_argument("--model-size", default="1b", type=ModelSize.parse)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--seq-len", default=256, type=int)
    given = parser.parse_args()
    steps = PrivateSteps(SimpleBigModel(given.model_size), batch_size=given.batch_size)
    [first, *_] = get_random_dataloader(
        batch_size=given.batch_size, seq_len=given.seq_len, vocab_size=given.model_size.vocabulary
    )
    batch = [in_jax(tensor) for tensor in first]
    with observe(given.instrument, name="jax-privacy", skip=2, steps=5) as seen:
        while not seen.recorder.finished:
            with seen.step():
                jax.block_until_ready(steps.step(*batch))
    print(seen.report.frame.to_string())


if __name__ == "__main__":
    main()
