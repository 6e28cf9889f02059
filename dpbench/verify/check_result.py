"""The result of one check of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, FAILED, NOT_JUDGED = "ok", "FAILED", "not judged"

IN_RANK_0 = "rank 0 judges it"
"""What other ranks report for a check that rank 0 judges."""


@dataclass(frozen=True)
class Check:
    """The result of one check of a trainer.

    Attributes:
        name: the check's name.
        verdict: `OK`, `FAILED` or `NOT_JUDGED`.
        worst: the parameter with the largest error; may be empty.
        error_text: the size of that error, or why nothing was judged.
        wrong: one sentence for each failure.
    """

    name: str
    verdict: str
    worst: str
    error_text: str
    wrong: Sequence[str] = ()

    @classmethod
    def judged(cls, name: str, wrong: Sequence[str], worst: str, error_text: str) -> Check:
        """Make a check that failed if ``wrong`` has entries, and is ok otherwise."""
        return cls(name, FAILED if wrong else OK, worst, error_text, wrong)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong. A check that does not apply passes."""
        return not self.wrong
