"""The marker ``dpbench``, with which a test has limits of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpbench.errors import ConfigurationError
from dpbench.session import read_limits

if TYPE_CHECKING:
    from dpbench.results.compare import Threshold

MARKER = (
    "dpbench(compare_fail=[...]): limits for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty. Without --dpbench-compare it is compared "
    "with the latest complete run, as with --dpbench-compare-fail"
)


def limits_of(item: pytest.Item) -> list[Threshold] | None:
    """A test's own limits, if it has a marker; a wrong marker fails the test."""
    marker = item.get_closest_marker("dpbench")
    if marker is None:
        return None
    texts = marker.kwargs.get("compare_fail")
    reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
    if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
        try:
            return read_limits(texts)
        except ConfigurationError as error:
            reason = str(error)
    pytest.fail(f"dpbench: {reason}", pytrace=False)
