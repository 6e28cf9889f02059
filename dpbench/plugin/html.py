"""The page of ``--dpbench-html``, written once, when the session is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome


def write_page(
    path: Path,
    outcomes: Sequence[Outcome],
    environment: Mapping[str, Any],
    session: Mapping[str, Any],
) -> None:
    """Write a session's outcomes as one HTML file, as ``dpbench report`` of its document would.

    Raises:
        OSError: the file cannot be written.
    """
    from dpbench.results.html.page import write_html
    from dpbench.results.html.source import labelled
    from dpbench.results.outcome import document

    write_html(path, labelled([(path.stem, document(outcomes, environment, session))]))
