"""Profiler schedules, as a user writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from dpbench import ConfigurationError
from dpbench.child.messages import Schedule

COUNT = st.integers(0, 4)
SCHEDULES = st.builds(
    Schedule, COUNT, COUNT, st.integers(1, 4), active=st.integers(1, 4), repeat=st.integers(1, 4)
)


def test_what_is_left_out_keeps_its_default() -> None:
    assert Schedule.parse("active=3, wait=2") == Schedule(wait=2, active=3)
    assert Schedule.parse("") == Schedule()


@given(SCHEDULES)
def test_a_schedule_survives_being_written_down(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@given(SCHEDULES)
def test_all_its_steps_are_those_that_pytorch_needs(schedule: Schedule) -> None:
    """The last one completes the last cycle, so every trace is written."""
    planned = torch_schedule(**vars(schedule))
    actions = [planned(step) for step in range(schedule.steps)]
    assert actions[-1] == ProfilerAction.RECORD_AND_SAVE
    assert actions.count(ProfilerAction.RECORD_AND_SAVE) == schedule.repeat
    assert planned(schedule.steps) == ProfilerAction.NONE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "activ=3",
            "unknown parameter of a profiler schedule 'activ'; choose from skip_first, wait",
        ),
        ("3", "a parameter is NAME=VALUE in printable text without commas, not '3='"),
        ("active=x", "parameter active of a profiler schedule must be an integer, not 'x'"),
        ("active=-1", "active must be >= 1, not -1"),
        ("active=0", "active must be >= 1, not 0"),
        ("repeat=0", "repeat must be >= 1, not 0"),
    ],
)
def test_a_bad_schedule_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Schedule.parse(text)
