"""One colour per phase and per trainer, everywhere on the page.

Phases have the colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), trainers those of
Paul Tol's "bright" scheme (https://personal.sron.nl/~pault/), some a shade off for contrast on
white and on black. Both stay apart under the common kinds of colour blindness; trainers have a
symbol and a dash of their own as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dpbench.case import OUTSIDE

NEUTRAL = "#8C8C8C"
"""Visible on white and on black."""


class PhaseStyle(NamedTuple):
    """How a phase is drawn: its colour, plotly's symbol, and the same as text."""

    colour: str
    symbol: str
    glyph: str


PHASE_STYLES = {
    "forward": PhaseStyle("#56B4E9", "circle", "○"),
    "backward": PhaseStyle("#0072B2", "square", "□"),
    "clip": PhaseStyle("#D55E00", "diamond", "◇"),
    "noise": PhaseStyle("#CC79A7", "triangle-up", "△"),
    "optimizer": PhaseStyle("#009E73", "triangle-down", "▽"),
    OUTSIDE: PhaseStyle(NEUTRAL, "star", "☆"),
}


class Style(NamedTuple):
    """How a trainer is drawn: plotly's colour, symbol and dash, and the symbol as text."""

    colour: str
    symbol: str
    glyph: str
    dash: str


_STYLES = (
    Style("#7F8790", "circle", "●", "dot"),
    Style("#EE6677", "square", "■", "solid"),
    Style("#4F86BB", "diamond", "◆", "dash"),
    Style("#BB4A93", "triangle-up", "▲", "dashdot"),
    Style("#228833", "x", "✖", "longdash"),
    Style("#B8A522", "star", "★", "longdashdot"),
    Style("#3AA9C9", "hexagon", "⬢", "solid"),
    Style("#A0653B", "cross", "✚", "dash"),
)

OURS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")
"""The trainers with the first styles; dpbench's own, in the order in which tables have them."""


def styles(trainers: Iterable[str]) -> dict[str, Style]:
    """A style for each trainer: dpbench's own have always the same, others those left over."""
    present = set(trainers)
    others = sorted(present - set(OURS))
    left = _STYLES[len(OURS) :]
    own = {name: style for name, style in zip(OURS, _STYLES, strict=False) if name in present}
    return own | {name: left[place % len(left)] for place, name in enumerate(others)}
