"""Explains why a script failed, or why none of its steps was observed."""

from __future__ import annotations

from dpbench.child.optimizers import MOST_TURNS
from dpbench.child.recorder import Recorder
from dpbench.child.step_finder import StepFinder


def what_is_wrong(
    finder: StepFinder, recorder: Recorder, raised: str, code: int | str | None
) -> str:
    """One line on why the script failed, or why no step was observed; else empty."""
    kept = f"; {recorder.observed} steps were counted until then" if recorder.observed else ""
    if raised:
        return f"the script failed with {raised}{kept}"
    if finder.failure is not None:
        return f"its steps could not be recorded: {finder.failure}{kept}"
    if code:
        kept = kept or ", before a step counted"
        return f"the script ended by itself with exit status {code!r}{kept}"
    if recorder.observed:
        return ""
    if finder.turns.taken and not finder.steps:
        return (
            f"the script ended after {finder.turns.taken} turns of its optimizers, before each of "
            f"them had stepped: let it take more than {MOST_TURNS}"
        )
    if finder.steps:
        enough = max(0, finder.steps - (recorder.wanted or 0))
        return (
            f"the script ended after {finder.steps} steps, and the first {finder.skip} do not "
            f"count: let it take more, or give --skip {enough}"
        )
    return (
        "the script took no step that can be found: no torch.optim optimizer stepped after a "
        "backward in the main thread of its own process, outside torch.compile"
    )
