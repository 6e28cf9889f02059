"""What one check of a trainer found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, FAILED, NOT_JUDGED = "ok", "FAILED", "not judged"


@dataclass(frozen=True)
class Check:
    """A check's name and verdict, the parameter that did worst and how far, and what is wrong."""

    name: str
    verdict: str
    worst: str
    far: str
    wrong: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, wrong: Sequence[str], worst: str, far: str) -> Check:
        """One that failed if anything is wrong."""
        return cls(name, FAILED if wrong else OK, worst, far, wrong)

    @property
    def passed(self) -> bool:
        """Whether it found nothing wrong; a check that does not apply says so, and passes."""
        return not self.wrong
