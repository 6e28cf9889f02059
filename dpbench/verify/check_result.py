"""The result of one check of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OK, FAILED, NOT_JUDGED = "ok", "FAILED", "not judged"
NOTE = "note"
"""Verdict of what no check can judge, and readers should know."""

SYMBOLS = "σ (noise multiplier)", "C (clipping threshold)", "B (batch size)"
"""What the results of checks are expressed in, see `used`."""

IN_RANK_0 = "only rank 0 judges this check"
"""Reason that ranks other than rank 0 give for not judging a check."""


@dataclass(frozen=True)
class Check:
    """The result of one check of a trainer.

    Attributes:
        name: the check's name.
        verdict: `OK`, `FAILED`, `NOT_JUDGED` or `NOTE`.
        worst: the name of the parameter with the largest error; empty if no parameter is named.
        error_text: the result in a few words, such as the size of the largest error, or the reason
            why nothing was judged.
        wrong: one sentence for each failure.
    """

    name: str
    verdict: str
    worst: str
    error_text: str
    wrong: Sequence[str] = ()

    @classmethod
    def judged(cls, name: str, wrong: Sequence[str], worst: str, error_text: str) -> Check:
        """Make a check whose verdict is `FAILED` if ``wrong`` has entries, and `OK` otherwise."""
        return cls(name, FAILED if wrong else OK, worst, error_text, wrong)

    @property
    def passed(self) -> bool:
        """True if ``wrong`` is empty.

        A check that was not judged counts as passed only if it does not apply. Otherwise ``wrong``
        contains the reason why it could not be judged.
        """
        return not self.wrong


def used(name: str, values: Iterable[tuple[float, float, float]]) -> Check:
    """Make a note of the different values of `SYMBOLS` with which steps were taken.

    Args:
        name: the note's name.
        values: σ, C and B of each step or run.
    """
    columns = [
        dict.fromkeys(f"{value:.4g}" for value in each) for each in zip(*values, strict=True)
    ]
    each = (f"{s} = {', '.join(c)}" for s, c in zip(SYMBOLS, columns, strict=True))
    return Check(name, NOTE, "", "; ".join(each))
