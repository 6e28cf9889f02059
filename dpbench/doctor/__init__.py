"""What works on this machine, found out before anything is spent on measuring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpbench.errors import DpbenchError
from dpbench.instruments.base import InstrumentError

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """What one check found: its name, a status, what is there or wrong, and what would help."""

    check: str
    status: str
    detail: str
    remedy: str = ""

    @classmethod
    def of_error(cls, check: str, error: Exception) -> Finding:
        """The failure that an error describes, its remedy apart."""
        if isinstance(error, InstrumentError):
            log = f" (log: {error.log})" if error.log else ""
            detail = str(error).removesuffix(f"; {error.remedy}")
            return cls(check, FAILED, f"{detail}{log}", error.remedy)
        kind = "" if isinstance(error, DpbenchError) else f"{type(error).__name__}: "
        return cls(check, FAILED, f"{kind}{error}")


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
