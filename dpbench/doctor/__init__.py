"""What works on this machine, found out before anything is spent on measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dpbench.errors import DpbenchError
from dpbench.instruments.base import InstrumentError

OK, WARNING, FAILED = "ok", "warning", "failed"
STATUSES = (OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        check: its name.
        status: one of `STATUSES`.
        detail: what is there, or what is wrong.
        remedy: what would help; empty if nothing has to.
    """

    check: str
    status: str
    detail: str
    remedy: str = ""

    @classmethod
    def of_error(cls, check: str, error: Exception) -> Finding:
        """The failure that an error describes, its remedy apart."""
        if not isinstance(error, DpbenchError):
            return cls(check, FAILED, f"{type(error).__name__}: {error}")
        if not isinstance(error, InstrumentError):
            return cls(check, FAILED, str(error))
        log = f" (log: {error.log})" if error.log else ""
        detail = str(error).removesuffix(f"; {error.remedy}")
        return cls(check, FAILED, f"{detail}{log}", error.remedy)


@dataclass(frozen=True)
class Setup:
    """How cases would be measured here.

    Args:
        directory: where reports and logs go.
        ncu_path: the ``ncu`` program, or None to look for it.
        timeout: seconds that a profiled process may take.
    """

    directory: Path = Path("ncu_reports")
    ncu_path: str | None = None
    timeout: float = 120.0


Check = Callable[[Setup], Iterable[Finding]]


def examine(setup: Setup, checks: Iterable[Check] | None = None) -> Iterator[Finding]:
    """Every finding, one as soon as it is there; what breaks one check hides no other."""
    for check in all_checks() if checks is None else checks:
        try:
            yield from check(setup)
        except Exception as error:  # whatever a broken machine can raise
            yield Finding.of_error(check.__name__.replace("_", " "), error)


def all_checks() -> tuple[Check, ...]:
    """The checks, what they rest on first."""
    from dpbench.doctor import counters, machine

    return (
        machine.packages,
        machine.logical_counting,
        machine.report_directory,
        machine.temporary_directory,
        machine.gpu,
        machine.torch,
        machine.nvtx,
        machine.ncu,
        counters.counters,
        counters.calibration,
    )
