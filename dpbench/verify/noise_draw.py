"""The noise that one step added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpbench.verify.reference import Gradients


@dataclass(frozen=True)
class Draw:
    """The noise of one step, divided by σC/B.

    σ is the noise multiplier, C the clipping threshold and B the batch size.

    Attributes:
        run: the run's name for messages, such as ``σ = 1e+04, C = 0.7 in 2 parts``. It may be
            empty.
        step: the step's number in its run, from 1.
        noise: the flat noise of each parameter. Steps may have different parameters.
        along: the component of the noise along the clipped gradient, by parameter. The key ``""``,
            if present, means all parameters together.
        slack: a bound on the norm of the error that the gradient's rounding causes in ``noise``.
    """

    run: str
    step: int
    noise: Gradients
    along: Mapping[str, float] = field(default_factory=dict)
    slack: float = 0.0

    @classmethod
    def beside(
        cls, clipped: Gradients, run: str, step: int, noise: Gradients, slack: float
    ) -> Draw:
        """Make a draw whose `along` is computed from the clipped gradient of the step."""
        norms = {name: float(clipped[name].norm()) or 1.0 for name in noise}
        along = {n: float(z @ clipped[n].flatten().double()) / norms[n] for n, z in noise.items()}
        if len(noise) == len(clipped):
            whole = sum(norm**2 for norm in norms.values()) ** 0.5
            along[""] = sum(norms[name] * far for name, far in along.items()) / whole
        return cls(run, step, noise, along, slack)

    @property
    def step_name(self) -> str:
        """The step and its run, for messages."""
        return f"step {self.step}" + f" ({self.run})" * bool(self.run)


def joined_noise(draws: Sequence[Draw], name: str) -> Tensor:
    """Join the noise of a parameter in several steps. ``""`` joins the noise of all parameters."""
    parts = [noise for draw in draws for each, noise in draw.noise.items() if name in ("", each)]
    return torch.cat(parts).double()


def sorted_values(values: Tensor) -> Tensor:
    """Sort a vector. NumPy sorts ten times as fast as PyTorch's CPU code."""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))
