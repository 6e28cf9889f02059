"""What a test asks for by fixtures, case and marker; and a fixture that measures nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parameters_text
from dpbench.core.registry import resolve
from dpbench.core.settings import Settings
from dpbench.session import read_limits

if TYPE_CHECKING:
    from dpbench.results.compare import Threshold
    from dpbench.verify.check_result import Check

DEFINED_IN = "dpbench.plugin.each_test"
"""The module of dpbench's fixtures."""

NEEDS = {"ncu": "--ncu", "counters": "--cupti or --ncu"}
"""The fixtures that measure, and the options without which their tests are skipped."""

EVERY = (*NEEDS, "logical_io")

MARKER = (
    "dpbench(compare_fail=[...]): limits for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty. Without --dpbench-compare it is compared "
    "with the latest complete run, as with --dpbench-compare-fail"
)


@pytest.fixture
def verify() -> Callable[..., list[Check]]:
    """Check a private trainer's privacy claims, as ``dpbench verify`` does; else fail the test.

    Called with a case, or with a trainer and other fields of a case, which are small by default.
    Noise is compared with that of another process if ``processes`` is true::

        def test_it_clips_and_adds_noise(verify):
            verify("mypackage.trainers:MyTrainer", optimizer="adamw", micro_batches=4)
    """
    return _verify


def _verify(
    asked: Any, *, device: str = "auto", processes: bool = False, **axes: Any
) -> list[Check]:
    from dpbench.commands.case_arguments import chosen_case
    from dpbench.commands.verify import SMALL, as_text, run_checks

    if wrong := [name for name in axes if name not in AXES]:
        raise unknown("field of a case", wrong[0], AXES)
    if isinstance(asked, Case):
        case = resolve(replace(asked, **axes))
    else:
        given = {"trainer": asked, **axes, "set": [parameters_text(axes.get("set", ""))]}
        case = chosen_case(Namespace(**given), **SMALL)
    checks = run_checks(case, device, processes=processes)
    if not all(check.passed for check in checks):
        pytest.fail(as_text(case, checks), pytrace=False)
    return checks


def measuring(settings: Settings) -> list[str]:
    """The fixtures of `NEEDS` that measure in this session."""
    if settings.ncu or settings.instrument or settings.disable:
        return [*NEEDS]
    return ["counters"] if settings.cupti else []


def takes(item: pytest.Item, fixtures: Collection[str] = EVERY) -> bool:
    """Whether a test uses one of these fixtures as dpbench defines them, not a project's own."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(_is_ours(info.name2fixturedefs, name) for name in fixtures)


def _is_ours(definitions: dict[str, Any], fixture: str) -> bool:
    for definition in reversed(definitions.get(fixture, ())):
        if definition.func.__module__ == DEFINED_IN:
            return True
        if fixture not in definition.argnames:  # else it extends the one that it overrides
            return False
    return False


def case_of(item: pytest.Item) -> Case | None:
    """The case of the grid that a test is parametrised with, if any."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("dpbench_case") if callspec else None
    return case if isinstance(case, Case) else None


def texts_of(item: pytest.Item) -> tuple[str, ...] | None:
    """A test's own limits as they are written; None if it has no marker."""
    try:
        limits = limits_of(item)
    except pytest.fail.Exception:  # the test fails before it measures
        return ()
    return None if limits is None else tuple(map(str, limits))


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


def asked_case(asked: Any, fields: dict[str, Any]) -> Case:
    """The case that a fixture was called with: a case, its fields, or a case with other fields."""
    if wrong := [name for name in fields if name not in AXES]:
        raise unknown("field of a case", wrong[0], AXES)
    if isinstance(asked, Case):
        return resolve(replace(asked, **fields))
    if "batch_size" not in fields:
        raise ConfigurationError(
            f"{asked!r} is neither a case nor a function that takes a step; with a trainer, give "
            f"batch_size"
        )
    return resolve(Case(**{"trainer": asked, **fields}))
