"""Sizes of the transformer, and checks of positive numbers and ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral

from dpbench.core.errors import ConfigurationError, unknown


def positive(what: str, value: object) -> int:
    """Return a positive integer as an int, or raise `ConfigurationError`.

    The integer may be a NumPy integer, and must be below 2³¹. ``what`` describes the integer in the
    error message.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) <= 0:
        raise ConfigurationError(f"{what} must be a positive integer, not {value!r}")
    if int(value) >= 2**31:
        raise ConfigurationError(f"{what} must be below 2^31, not {value}")
    return int(value)


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a decoder-only transformer; ``hidden`` is a multiple of ``heads``."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            positive(f"model size: {name}", value)
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"model size: hidden {self.hidden} is not divisible by heads {self.heads}"
            )

    @classmethod
    def parse(cls, name: str) -> ModelSize:
        """Read a name in `MODEL_SIZES`, or dimensions such as ``32000x1024x12x16``.

        Dimensions are written as ``VOCABULARYxHIDDENxLAYERSxHEADS``.
        """
        if name in MODEL_SIZES:
            return MODEL_SIZES[name]
        parts = name.split("x")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            return cls(*map(int, parts))
        raise unknown("model size", name, MODEL_SIZES, "or VOCABULARYxHIDDENxLAYERSxHEADS")


MODEL_SIZES = {
    "tiny": ModelSize(1_000, 64, 2, 4),
    "small": ModelSize(8_000, 256, 4, 8),
    "medium": ModelSize(16_000, 512, 8, 8),
    "1b": ModelSize(32_000, 2_048, 24, 32),
}
"""Sizes of the transformer by name."""


def lora_rank(trainable: str) -> int | None:
    """Return the rank in ``lora:RANK``, or None for a text without ``lora:``.

    Raises `ConfigurationError` if the rank is not a positive integer.
    """
    kind, colon, rank = trainable.partition(":")
    if kind != "lora" or not colon:
        return None
    if not rank.isdecimal():
        raise ConfigurationError(f"write lora:RANK, such as lora:8, instead of {trainable!r}")
    return positive("rank", int(rank))
