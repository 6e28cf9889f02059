"""Runs as one HTML page that opens offline: the same numbers, drawn; needs the extra ``report``."""

from __future__ import annotations

from importlib.util import find_spec

from dpbench.errors import ConfigurationError

LIBRARIES = ("plotly", "jinja2")


def check_libraries() -> None:
    """Refuse to draw where a library is missing, without importing those that are there."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the HTML report needs {' and '.join(missing)}: pip install 'dpbench[report]'"
        )
