"""What works on this machine, found out before anything is spent on measuring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpbench.doctor import counters, machine
from dpbench.doctor.findings import Check, Finding, Setup

CHECKS: tuple[Check, ...] = (
    machine.packages,
    machine.logical_counting,
    machine.directories,
    machine.gpu,
    machine.torch,
    machine.ncu,
    counters.counters,
    counters.cupti,
)
"""The checks, what they rest on first."""


def examine(setup: Setup, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Every finding, one as soon as it is there; what breaks one check hides no other."""
    for check in checks:
        try:
            yield from check(setup)
        except Exception as error:  # whatever a broken machine can raise
            yield Finding.of_error(check.__name__.replace("_", " "), error)
