"""Explains why a script failed, or why none of its steps was observed."""

from __future__ import annotations

from dpbench.child.optimizers import MOST_TURNS
from dpbench.child.recorder import Recorder
from dpbench.child.step_finder import StepFinder


def failure_message(
    finder: StepFinder, recorder: Recorder, raised: str, code: int | str | None
) -> str:
    """Return why the script failed, or why no step was observed; an empty string otherwise."""
    kept = f"; {recorder.observed} steps were counted until then" if recorder.observed else ""
    if raised:
        return f"the script failed with {raised}{kept}"
    if finder.failure is not None:
        return f"the script's steps could not be recorded: {finder.failure}{kept}"
    if code:
        kept = kept or ", before any step was counted"
        return f"the script ended by itself with exit status {code!r}{kept}"
    if recorder.observed:
        return ""
    if finder.turns.turns_taken and not finder.steps:
        return (
            f"the script ended before each of its optimizers had stepped once (they took turns "
            f"{finder.turns.turns_taken} times): let it run for more than {MOST_TURNS} turns"
        )
    if finder.steps:
        enough = max(0, finder.steps - (recorder.wanted or 0))
        return (
            f"the script ended after {finder.steps} steps, and the first {finder.skip} do not "
            f"count: let it take more steps, or use --skip {enough}"
        )
    return (
        "the script took no step that can be found: no torch.optim optimizer stepped after a "
        "backward in the main thread of the script's process, outside torch.compile"
    )
