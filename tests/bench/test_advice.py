"""`dpbench advise` is compared with every published step of one GPU."""

from __future__ import annotations

import pytest

from bench import advice


@pytest.mark.slow
def test_predictions_and_choices_hold_in_nine_of_ten() -> None:
    """Steps that are not launch-bound are within 25 %, named methods within 5 % of the best."""
    steps = advice.compared()
    near, choices = advice.near(steps), advice.named(steps)
    assert len(near) > 90
    assert len(choices) >= 20
    assert near.mean() >= 0.9, steps.loc[near.index[~near], ["case", "share"]]
    good = choices.more <= 1 + advice.CLOSE
    assert good.mean() >= 0.9, choices[~good]
