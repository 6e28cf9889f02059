"""What one check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.errors import DpbenchError
from dpbench.instruments.interface import InstrumentError

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """A result of a check: its name, a status, a detail, and what would help.

    ``counted`` are the lines of the calibration's table that it has, see `calibration.judge`.
    """

    check: str
    status: str
    detail: str
    remedy: str = ""
    counted: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of_error(cls, check: str, error: Exception) -> Finding:
        """The failure that an error describes, with its remedy."""
        if isinstance(error, InstrumentError):
            log = f" (log: {error.log})" if error.log else ""
            return cls(check, FAILED, f"{error.args[0]}{log}", error.remedy)
        kind = "" if isinstance(error, DpbenchError) else f"{type(error).__name__}: "
        return cls(check, FAILED, f"{kind}{error}")
