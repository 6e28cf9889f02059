"""How many steps a process takes, and which of them the PyTorch profiler records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from dpbench.errors import ConfigurationError, unknown


@dataclass(frozen=True)
class Steps:
    """How many steps a child runs before it is observed, and how many while it is."""

    warmup: int
    active: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.active < 1:
            raise ConfigurationError(
                f"steps: needs warm-up >= 0 and active >= 1, not {self.warmup} and {self.active}"
            )


@dataclass(frozen=True)
class Schedule:
    """The arguments of ``torch.profiler.schedule``, in steps."""

    skip_first: int = 1  # before anything else; the first step initialises libraries
    wait: int = 0  # of each cycle, those that the profiler sleeps through
    warmup: int = 1  # those that it traces and throws away
    active: int = 1  # those that it records
    repeat: int = 1  # cycles

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("active", "repeat") else 0
            if value < least:
                raise ConfigurationError(
                    f"profiler schedule: {name} must be >= {least}, not {value}"
                )

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """A schedule such as ``wait=1,active=3``; what is left out keeps its default."""
        known = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise unknown("part of a profiler schedule", name, known, "as in wait=1,active=3")
            if not value.isdecimal():
                raise ConfigurationError(
                    f"profiler schedule: {name} must be a whole number, not {value!r}"
                )
            values[name] = int(value)
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def steps(self) -> int:
        """How many training steps the whole schedule takes."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
