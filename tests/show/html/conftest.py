"""The page's libraries are an extra; without them there is no page to test."""

from __future__ import annotations

from importlib.util import find_spec

LIBRARIES = ("plotly", "jinja2")

collect_ignore_glob = [] if all(map(find_spec, LIBRARIES)) else ["test_html_*.py"]
