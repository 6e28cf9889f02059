"""Wrong trainers whose fault shows only in some steps, buffers or states, and right ones.

Each differs from `faulty.Looped` in a line or two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch
from tests.verify.faulty import Gradients, Looped
from tests.verify.wrong import norm_of, right, scaled

normal = torch.randn_like


class Own(Looped):
    """The right trainer with a number of the step, and functions around the step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.number, self.kept = 0, dict[str, Any]()
        self.raw: Gradients = {}
        self.prepare()

    def prepare(self) -> None:
        """Runs once."""

    def before(self) -> None:
        """Runs before each step."""

    def after(self, loss: Tensor) -> None:
        """Runs after each step."""

    def train_step(self, batch: Batch) -> Tensor:
        self.number, self.raw = self.number + 1, {}
        with torch.no_grad():
            self.before()
        loss = super().train_step(batch)
        with torch.no_grad():
            self.after(loss)
        return loss

    def clip(self, gradients: Gradients) -> Gradients:
        self.raw = {n: g + self.raw.get(n, 0) for n, g in gradients.items()}
        return self.clipped(gradients)

    def clipped(self, gradients: Gradients) -> Gradients:
        return right(self, gradients)

    @property
    def group(self) -> dict[str, Any]:
        return self.plain_optimizer.param_groups[0]

    def buffer(self, name: str, size: int = 1) -> Tensor:
        """A buffer of the model, registered when it is first used."""
        if not hasattr(self.model, name):
            self.model.register_buffer(name, torch.zeros(size))
        found: Tensor = getattr(self.model, name)
        return found


class BySelf(Own):
    """Moves parameters without its optimizer."""

    def train_step(self, batch: Batch) -> Tensor:
        step, self.plain_optimizer.step = self.plain_optimizer.step, lambda: self.move()
        try:
            return super().train_step(batch)
        finally:
            self.plain_optimizer.step = step

    def move(self) -> None:
        """Runs in place of the optimizer's step."""


def share_of_each(t: Any, g: Gradients) -> Gradients:
    """Clips each parameter to C by itself."""
    return {n: x * (t.max_grad_norm / x.norm()).clamp(max=1.0) for n, x in g.items()}


def weaker(share: float, when: Callable[[Any], bool]) -> Callable[..., Tensor]:
    return lambda t, p: normal(p) * (share if when(t) else 1.0)


def rounded(digits: int) -> Callable[..., Tensor]:
    return lambda t, p: (
        normal(p)
        * (
            round(t.noise_multiplier, digits) / t.noise_multiplier
            if t.noise_multiplier > 1e-9
            else 1
        )
    )


def clipped_if(when: Callable[[Any], bool], other: Callable[..., Gradients]) -> Any:
    return lambda t, g: other(t, g) if when(t) else right(t, g)


def unclipped(_: Any, g: Gradients) -> Gradients:
    return g


def by_last_norm(t: Any, g: Gradients) -> Gradients:
    """The norm is cached from the example before."""
    norm, t.kept["norm"] = t.kept.get("norm", norm_of(g)), norm_of(g)
    return scaled(g, (t.max_grad_norm / norm).clamp(max=1.0))


def by_first_norm(t: Any, g: Gradients) -> Gradients:
    """Factors of the first batch are used for ever, as from a captured graph."""
    factors = t.kept.setdefault("factors", [])
    if t.number <= 3:
        factors.append((t.max_grad_norm / norm_of(g)).clamp(max=1.0))
        return scaled(g, factors[-1])
    t.kept["i"] = t.kept.get("i", -1) + 1
    return scaled(g, factors[t.kept["i"] % len(factors)])


def move_by_raw(t: Any, _: Any) -> None:
    for n, p in t.trained.items():
        p.sub_(t.group["lr"] * t.raw[n] / t.batch_size)


def second_moment(t: Any, _: Any) -> None:
    """The second moment is made of raw gradients."""
    for n, p in t.trained.items():
        t.plain_optimizer.state[p]["exp_avg_sq"].copy_(t.raw[n].square())


def clean_master(t: Any, _: Any) -> None:
    """Parameters are overwritten by weights of its own, which get no noise."""
    for n, p in t.trained.items():
        p.copy_(t.kept[n] - t.group["lr"] * t.raw[n] / norm_of(t.raw))


def keep_start(t: Any) -> None:
    t.kept.update({n: p.clone() for n, p in t.trained.items()})


def stats(t: Any, loss: Tensor) -> None:
    buffer = t.buffer("stats", 2)
    buffer[0], buffer[1] = norm_of(t.trained), loss


def raw_average(t: Any, _: Any) -> None:
    first = next(iter(t.raw.values())).flatten()
    t.buffer("average", len(first)).lerp_(first, 0.1)


def each(k: int, do: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    return lambda t, loss: do(t, loss) if t.number % k == 0 else None


def save(name: str) -> Callable[[Any, Tensor], None]:
    return lambda t, loss: t.buffer(name).copy_(loss) and None


def add(t: Any, loss: Tensor) -> None:
    t.buffer("total").add_(loss)


def replace_buffer(t: Any, loss: Tensor) -> None:
    t.buffer("loss")
    t.model.loss = loss.reshape(1)


def largest_norm(t: Any, _: Any) -> None:
    t.buffer("largest").copy_(norm_of(t.raw))


def decay(t: Any, *_: Any) -> None:
    for p in t.trained.values():
        p.mul_(1 - 1e-4 * t.group["lr"])


def clamp(t: Any, _: Any) -> None:
    for p in t.trained.values():
        p.clamp_(-0.5, 0.5)


def average(t: Any, _: Any) -> None:
    first = next(iter(t.trained.values())).flatten()
    t.buffer("average", len(first)).lerp_(first, 0.1)


def look_ahead(t: Any, _: Any) -> None:
    for n, p in t.trained.items():
        p.lerp_(t.kept[n], 0.5)


def warm_up(t: Any) -> None:
    rate = t.kept.setdefault("rate", t.group["lr"])
    t.group["lr"] = rate * min(1, t.number / 10)


def from_zero(t: Any) -> None:
    rate = t.kept.setdefault("rate", t.group["lr"])
    t.group["lr"] = rate * (t.number - 1) / 10


def cosine(t: Any, _: Any) -> None:
    if "schedule" not in t.kept:
        t.kept["schedule"] = torch.optim.lr_scheduler.ExponentialLR(t.plain_optimizer, 0.99)
    t.kept["schedule"].step()


def move_master(t: Any) -> None:
    with torch.no_grad():
        for n, p in t.trained.items():
            t.kept[n] -= t.group["lr"] * p.grad
            p.copy_(t.kept[n])


def move_plainly(t: Any) -> None:
    with torch.no_grad():
        for p in t.trained.values():
            p.sub_(t.group["lr"] * p.grad)


def move_by_sums(t: Any) -> None:
    """Never resets its sums."""
    with torch.no_grad():
        for n, p in t.trained.items():
            t.kept[n] = t.kept.get(n, 0) + p.grad
            p.sub_(t.group["lr"] * t.kept[n])


def own_adam(t: Any) -> None:
    t.plain_optimizer = torch.optim.Adam(t.trained.values(), lr=t.group["lr"])


def mask(t: Any) -> None:
    t.model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))


def count(t: Any, _: Any) -> None:
    t.buffer("count").add_(1)


WRONG: Mapping[str, dict[str, Any]] = {
    "HundredthWeak": {"noise": weaker(0.2, lambda t: t.number % 100 == 50)},
    "HundredthWithout": {"noise": weaker(0.0, lambda t: t.number % 100 == 50)},
    "HundredthTwice": {"noise": weaker(2.0, lambda t: t.number % 100 == 50)},
    "TenthWeak": {"noise": weaker(0.5, lambda t: t.number % 10 == 9)},
    "FifthWeak": {"noise": weaker(0.7, lambda t: t.number == 5)},
    "SmallWeakInOne": {
        "noise": lambda t, p: normal(p) * (0.2 if t.number == 77 and p.dim() == 1 else 1)
    },
    "Fades": {"noise": lambda t, p: normal(p) * 0.99**t.number},
    "SigmaOfTwoDecimals": {"noise": rounded(2)},
    "SigmaOfOneDecimal": {"noise": rounded(1)},
    "ByParameterFromThird": {"clipped": clipped_if(lambda t: t.number > 2, share_of_each)},
    "ByParameterFromFiftieth": {"clipped": clipped_if(lambda t: t.number > 49, share_of_each)},
    "ByParameterEachTwentieth": {"clipped": clipped_if(lambda t: not t.number % 20, share_of_each)},
    "UnclippedInTenth": {"clipped": clipped_if(lambda t: t.number == 10, unclipped)},
    "UnclippedWarmUp": {"clipped": clipped_if(lambda t: t.number == 1, unclipped)},
    "NormOfLast": {"clipped": by_last_norm},
    "FactorsCaptured": {"clipped": by_first_norm},
    "ThresholdGrows": {
        "clipped": lambda t, g: scaled(
            g, (t.max_grad_norm * 1.01**t.number / norm_of(g)).clamp(max=1.0)
        )
    },
    "MovesByRaw": {"after": move_by_raw},
    "MovesByRawEachFifth": {"after": each(5, move_by_raw)},
    "MovesByRawAndDecays": {"after": move_by_raw, "before": decay},
    "CleanMaster": {"prepare": keep_start, "after": clean_master},
    "Stats": {"after": stats},
    "SavesLoss": {"after": save("loss")},
    "SavesLossEachTenth": {"after": each(10, save("loss"))},
    "AddsLosses": {"after": add},
    "ReplacesBuffer": {"after": replace_buffer},
    "LargestNorm": {"after": largest_norm},
    "RawAverage": {"after": raw_average},
    "SumsNeverReset": {"move": move_by_sums},
    "SecondMomentRaw": {"after": second_moment, "axes": {"optimizer": "adamw"}},
    "OwnAdamSecondMomentRaw": {"prepare": own_adam, "after": second_moment},
}
RIGHT: Mapping[str, dict[str, Any]] = {
    "Master": {"prepare": keep_start, "move": move_master},
    "MovesItself": {"move": move_plainly},
    "WarmUp": {"before": warm_up},
    "WarmUpFromZero": {"before": from_zero},
    "Schedule": {"after": cosine},
    "ScheduleAdamW": {"after": cosine, "axes": {"optimizer": "adamw"}},
    "DecayBefore": {"before": decay},
    "DecayAfter": {"after": decay},
    "DecayAdamW": {"after": decay, "axes": {"optimizer": "adamw"}},
    "Clamps": {"after": clamp},
    "LooksAhead": {"prepare": keep_start, "after": each(5, look_ahead)},
    "OwnAdam": {"prepare": own_adam},
    "MovingAverage": {"after": average},
    "Mask": {"prepare": mask},
    "Counts": {"after": count},
    "WarmUpMomentum": {"before": warm_up, "axes": {"optimizer": "momentum"}},
}
ALL: dict[str, dict[str, Any]] = {**WRONG, **RIGHT}
for _name, _made in ALL.items():  # a case names them
    _base = BySelf if "move" in _made else Own
    globals()[_name] = type(_name, (_base,), {k: v for k, v in _made.items() if k != "axes"})
