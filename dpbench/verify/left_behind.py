"""Checks that noise hides the data in what steps leave behind: buffers, and states of optimizers.

The same steps are taken with several seeds of the noise, and with one example of each batch
replaced. An element may change with the example by at most `DATA_SHARE` of its standard deviation
over seeds. An element that is a linear function of n noisy updates changes by at most 2√n/σ of its
deviation. With σ = `DATA_SIGMA` and n = 60, this exceeds `DATA_SHARE` only if the deviation of
`DATA_SEEDS` values is below 1/600 of the true one. This has a probability below 2e-8, by the bound
on a mean square in `dpbench.verify.noise_bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpbench.core.case import Case
from dpbench.training.base import Batch
from dpbench.verify.check_result import Check
from dpbench.verify.reference import Gradients
from dpbench.verify.trained_model import TrainedModel
from dpbench.verify.update import RATE

DATA_SIGMA = 1e6
"""Noise multiplier σ of these steps."""
DATA_SHARE = 0.01
"""Largest allowed change by one example, as a share of the standard deviation."""
DATA_SEEDS = 4
"""Number of runs with different noise."""


def holds_no_data(model: TrainedModel, case: Case, threshold: float, number: int) -> Check:
    """Judge each element of what ``number`` steps leave behind, see `TrainedModel.left`.

    The movement of parameters by plain SGD is judged elsewhere.

    A change by an example counts if it occurs with two seeds. With one seed, noise close to zero
    may let an example change the sign of an element.
    """

    def after(batches: Sequence[Batch], seed: int) -> Gradients:
        list(model.steps(case, number, batches, DATA_SIGMA, threshold, seed, RATE))
        return model.left(parameters=parameters)

    parameters = model.judges_received or case.optimizer != "sgd"
    name = "buffers hold no data"
    if not model.left(parameters=parameters):
        return Check.judged(name, [], "", "no buffers")
    first, second = model.batches
    others = [
        pytree.tree_map(lambda new, old: torch.cat([new, old[1:]]), *pair)
        for pair in ((_part(second, 0, 1), first), (_part(second, -1, None), second))
    ]
    runs = [after(model.batches, 1 + seed) for seed in range(DATA_SEEDS)]
    changed = [after(others, 1), after(others, 2)]
    wrong = []
    for kept in dict.fromkeys(each for run in (*runs, *changed) for each in run):
        shapes = {run[kept].shape if kept in run else None for run in (*runs, *changed)}
        if len(shapes) > 1:
            wrong.append(f"{kept}: its shape changes with the noise or with an example")
            continue
        values = torch.stack([run[kept].double() for run in runs])
        eps = torch.finfo(kind).eps if (kind := runs[0][kept].dtype).is_floating_point else 0.0
        hidden = DATA_SHARE * values.std(0) + 2 * eps * values.abs().amax(0)
        differ = [_differ(v, run[kept], hidden) for v, run in zip(values, changed, strict=False)]
        if (differ[0] & differ[1]).any():
            again = after(model.batches, 1)[kept]
            error = "noise does not hide how one example changes it"
            if _differ(values[0], again, hidden).any():
                error = "cannot be judged, because it differs between two equal runs"
            wrong.append(f"{kept}: {error}")
    return Check.judged(name, wrong, "", f"{len(runs[0])} tensors")


def _part(batch: Batch, start: int, end: int | None) -> Batch:
    return pytree.tree_map(lambda tensor: tensor[start:end], batch)


def _differ(a: Tensor, b: Tensor, hidden: Tensor) -> Tensor:
    """Return where two values differ by more than ``hidden``. Both may be the same NaN or inf."""
    return ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= hidden))
