"""Optimizers that are another's with other settings."""

from __future__ import annotations

from functools import partial

import torch

Momentum = partial(torch.optim.SGD, momentum=0.9)
