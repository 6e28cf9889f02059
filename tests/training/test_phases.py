"""Where a step is, and who hears of it."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import OUTSIDE, PHASES
from dpbench.core.errors import ConfigurationError
from dpbench.training.phases import in_phase, observed_step, phase


class Recorder:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.observed: list[str] = []

    def start_step(self) -> None:
        self.observed.append("<")

    def switch(self, phase: str) -> None:
        self.observed.append(phase)

    def end_step(self) -> None:
        self.observed.append(">")


def fail() -> None:
    raise RuntimeError("broke")


def test_nobody_listens_by_default() -> None:
    recorder = Recorder()
    with observed_step(None), phase("forward"), phase("clip"):
        pass
    assert recorder.observed == []


NESTED = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(PHASES), inner), max_size=3),
    max_leaves=12,
)
"""Phases in the order of a step, each with those inside it."""


def enter(phases: list[Any]) -> None:
    for name, inner in phases:
        with phase(name):
            enter(inner)


def switches(phases: list[Any], around: str) -> list[str]:
    return [heard for name, inner in phases for heard in (name, *switches(inner, name), around)]


@settings(deadline=None, max_examples=50)
@given(NESTED)
def test_listener_always_knows_the_innermost_phase(phases: list[Any]) -> None:
    recorder = Recorder()
    with observed_step(recorder):
        enter(phases)
    assert recorder.observed == ["<", *switches(phases, OUTSIDE), ">"]


@pytest.mark.parametrize("name", ["", "foward", "step", OUTSIDE])
@pytest.mark.parametrize("listener", [None, Recorder()], ids=["unheard", "heard"])
def test_unknown_phase_is_refused_with_what_exists(name: str, listener: Recorder | None) -> None:
    with pytest.raises(ConfigurationError) as caught, observed_step(listener), phase(name):
        pass
    nearest = "; did you mean forward?" if name == "foward" else ""
    assert str(caught.value) == f"unknown phase {name!r}; choose from {', '.join(PHASES)}{nearest}"


def test_error_inside_a_phase_ends_the_phase_and_the_step() -> None:
    recorder = Recorder()
    with (
        pytest.raises(RuntimeError, match="broke"),
        observed_step(recorder),
        phase("backward"),
        phase("clip"),
    ):
        fail()
    assert recorder.observed == ["<", "backward", "clip", "backward", OUTSIDE, ">"]


def test_error_caught_within_a_phase_leaves_it_open() -> None:
    recorder = Recorder()
    with observed_step(recorder), phase("backward"):
        with pytest.raises(RuntimeError, match="broke"), phase("clip"):
            fail()
        with phase("noise"):
            pass
    assert recorder.observed == [
        *("<", "backward", "clip", "backward"),
        *("noise", "backward", OUTSIDE, ">"),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_listener_hears_nothing_after_its_step(fails: bool) -> None:
    recorder = Recorder()
    try:
        with observed_step(recorder):
            if fails:
                fail()
    except RuntimeError:
        assert fails
    with phase("forward"):
        pass
    assert recorder.observed == ["<", ">"]


@pytest.mark.parametrize("when", ["start_step", "end_step"])
def test_listener_that_fails_hears_nothing_more(when: str) -> None:
    recorder = Recorder()
    setattr(recorder, when, fail)

    def heard_afterwards() -> list[str]:
        with pytest.raises(RuntimeError, match="broke"), observed_step(recorder):
            pass
        recorder.observed.clear()
        with phase("forward"):
            pass
        return recorder.observed

    # In a context of its own: a listener left behind would hear other tests.
    assert copy_context().run(heard_afterwards) == []


def test_each_step_starts_outside_with_its_own_listener() -> None:
    first, second = Recorder(), Recorder()
    for recorder, name in ((first, "forward"), (second, "backward")):
        with observed_step(recorder), phase(name):
            pass
    assert first.observed == ["<", "forward", OUTSIDE, ">"]
    assert second.observed == ["<", "backward", OUTSIDE, ">"]


def test_function_in_a_phase_does_the_same_inside_it() -> None:
    def clip(gradient: float, *, threshold: float) -> float:
        """Clip."""
        return min(gradient, threshold)

    wrapped = in_phase("clip", clip)
    recorder = Recorder()
    with observed_step(recorder):
        assert wrapped(3.0, threshold=1.0) == 1.0
    assert recorder.observed == ["<", "clip", OUTSIDE, ">"]
    assert (wrapped.__name__, wrapped.__doc__) == ("clip", "Clip.")
