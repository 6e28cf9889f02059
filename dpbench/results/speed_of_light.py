"""How near each kernel comes to what the hardware can do: Nsight Compute's Speed of Light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpbench.results.kernel_names import short_name


@dataclass(frozen=True)
class KernelSpeed:
    """One launch of a kernel against the card's limits; percentages from 0 to 100.

    Args:
        phase: the phase in which it was launched.
        name: the whole demangled name.
        grid: thread blocks in x, y and z.
        seconds: from its start on the GPU to its end.
        sm: of the peak throughput of the streaming multiprocessors, the busiest unit's.
        memory: of the peak throughput of the memory system, the busiest part's.
        dram: of the peak throughput of DRAM.
        l2_hit: of the sectors asked of the L2 cache, those that were there.
        occupancy: warps that were active, of those that a multiprocessor can hold.
        occupancy_limit: warps that the launch allows to be active, of the same.
        stall: what warps waited for most often, in Nsight Compute's words; None if they were
            not sampled.
    """

    phase: str
    name: str
    grid: tuple[int, int, int]
    seconds: float
    sm: float
    memory: float
    dram: float
    l2_hit: float
    occupancy: float
    occupancy_limit: float
    stall: str | None

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types, the short name included."""
        return {**asdict(self), "grid": list(self.grid), "kernel": short_name(self.name)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> KernelSpeed:
        """The inverse of `as_row`; what else is in the row is left alone."""
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "grid": tuple(values["grid"])})
