"""How each trainer did in a run: success rate, peak memory, and why cases failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpbench.registry import TRAINERS

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome


def trainer_summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each trainer: cases that succeeded, failed or were skipped, peak memory, and why.

    Cases that were measured and cases that were counted have lines of their own. Skipped cases,
    which cannot fit the GPU, don't count for ``success_rate``; they have their reason, too.
    ``peak_memory_bytes`` is the largest that was measured, ``logical_peak_memory_bytes`` the
    largest that was predicted without hardware; None where there is none.
    """
    lines: dict[tuple[str, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        lines.setdefault((outcome.case.trainer, outcome.instruments), []).append(outcome)
    order = sorted(lines, key=lambda line: TRAINERS.rank(line[0]))
    return [summarise_trainer(*line, lines[line]) for line in order]


def summarise_trainer(
    trainer: str, instruments: Sequence[str], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What became of a trainer's cases; see `trainer_summary`."""
    skipped = sum(outcome.skipped for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes) - skipped
    tried = len(outcomes) - skipped
    return {
        "trainer": trainer,
        "instruments": list(instruments),
        "ok": tried - failed,
        "failed": failed,
        "skipped": skipped,
        "success_rate": (tried - failed) / tried if tried else None,
        "peak_memory_bytes": _peak(outcomes, "timing"),
        "logical_peak_memory_bytes": _peak(outcomes, "logical"),
        "failures": [
            {"case": o.case.id, "error": o.error, "message": o.message, "log": o.log}
            for o in outcomes
            if o.error
        ],
    }


def _peak(outcomes: Sequence[Outcome], instrument: str) -> float | None:
    return max(
        (
            row.value
            for outcome in outcomes
            for row in outcome.rows
            if row.metric == "peak_memory_bytes" and row.instrument == instrument
        ),
        default=None,
    )
