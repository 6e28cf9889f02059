"""Finds the fixtures, the case and the marker of a test, and defines the fixture ``verify``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import parameters_text
from dpbench.core.registry import resolve
from dpbench.core.settings import Settings
from dpbench.results.limits import Limit
from dpbench.verify.check_result import Check

DEFINED_IN = "dpbench.plugin.each_test"
"""The module that defines all of dpbench's fixtures except ``verify``."""

NEEDS = {"ncu": "--ncu", "counters": "--cupti or --ncu"}
"""For each fixture that measures on hardware, the options that it needs. Without these options,
tests that use the fixture are skipped, except with ``--dpbench-instrument`` or
``--dpbench-disable``."""

FIXTURES = (*NEEDS, "logical_io")

MARKER = (
    "dpbench(compare_fail=[...]): limits for this test, which replace the limits of "
    "--dpbench-compare-fail; an empty list means no limits. They are checked only if "
    "--dpbench-compare or --dpbench-compare-fail is given"
)


@pytest.fixture
def verify() -> Callable[..., list[Check]]:
    """Check a private trainer like ``dpbench verify``; fail the test if a check fails.

    Call the fixture with a case, or with a trainer and other fields of a case. With a trainer,
    fields that are not given have values for a small, fast case. With ``processes=True``, the
    noise is also compared with the noise that the trainer adds in another process::

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


def measuring_fixtures(settings: Settings) -> list[str]:
    """Return the names of the fixtures in `NEEDS` whose tests run with these settings."""
    if settings.ncu or settings.instrument or settings.disable:
        return [*NEEDS]
    return ["counters"] if settings.cupti else []


def uses_fixture(item: pytest.Item, fixtures: Collection[str] = FIXTURES) -> bool:
    """Return True if a test uses one of these fixtures of dpbench, or a fixture that extends it.

    A project's own fixture with the same name is ignored.
    """
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(_is_ours(info.name2fixturedefs, name) for name in fixtures)


def _is_ours(definitions: dict[str, Any], fixture: str) -> bool:
    for definition in reversed(definitions.get(fixture, ())):
        if definition.func.__module__ == DEFINED_IN:
            return True
        if (
            fixture not in definition.argnames
        ):  # a fixture with itself as an argument extends dpbench's fixture
            return False
    return False


def shared_name(item: Any, fixture: Any) -> str | None:
    """Return a name for what a fixture measures, which is equal for all tests that share it.

    The name has the fixture, the last file, folder or scope of it or of a fixture before it, and
    the parameters that they use. Returns None if one of them may do something else for each test:
    it asks for ``request`` in the scope of one test, or for a parameter that is no text or number.
    """
    info = item._fixtureinfo
    names = [fixture.argname, *(n for n in info.initialnames if n not in info.argnames)]  # autouse
    used: dict[str, Any] = {}
    places: list[str] = []
    while names:
        name = names.pop()
        if name not in used:
            used[name] = info.name2fixturedefs.get(name, ())
            own = [each for each in used[name] if not each.func.__module__.startswith("_pytest")]
            names += [argument for each in own for argument in each.argnames]
            places += [each.baseid for each in used[name]]
            for scope in (each.scope for each in own if "request" in each.argnames):
                if scope == "function":
                    return None
                node = item.getparent(_SCOPES[scope])
                places.append(node.nodeid if node else "")
    given = getattr(getattr(item, "callspec", None), "params", {})
    params = {name: given[name] for name in sorted(used) if name in given}
    if not all(isinstance(value, str | int | float | None) for value in params.values()):
        return None
    text = ",".join(f"{name}={value}" for name, value in params.items())
    place = max(places, key=len) or "conftest.py"
    return f"{place}::{fixture.argname}{f'[{text}]' * bool(text)}"


_SCOPES = {
    "session": pytest.Session,
    "package": pytest.Package,
    "module": pytest.Module,
    "class": pytest.Class,
}


def grid_case(item: pytest.Item) -> Case | None:
    """Return the case in a test's parameter ``dpbench_case``, or None if there is none."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("dpbench_case") if callspec else None
    return case if isinstance(case, Case) else None


def limit_texts(item: pytest.Item) -> tuple[str, ...] | None:
    """Return the limits of a test's marker as texts, or None if the test has no marker."""
    try:
        limits = marker_limits(item)
    except pytest.fail.Exception:  # the marker is wrong, and the test will fail
        return ()
    return None if limits is None else tuple(map(str, limits))


def marker_limits(item: pytest.Item) -> list[Limit] | None:
    """Return the limits of a test's marker, or None if the test has no marker.

    Fails the test if the marker is invalid.
    """
    marker = item.get_closest_marker("dpbench")
    if marker is None:
        return None
    texts = marker.kwargs.get("compare_fail")
    reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
    if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
        try:
            return [*map(Limit.parse, texts)]
        except ConfigurationError as error:
            reason = str(error)
    pytest.fail(f"dpbench: {reason}", pytrace=False)


def asked_case(asked: Any, fields: dict[str, Any]) -> Case:
    """Return the case that a test requests with the arguments of a fixture.

    ``asked`` is a case or a trainer. ``fields`` are fields of the case, which replace the fields of
    ``asked`` if it is a case.
    """
    if wrong := [name for name in fields if name not in AXES]:
        raise unknown("field of a case", wrong[0], AXES)
    if isinstance(asked, Case):
        return resolve(replace(asked, **fields))
    if "batch_size" not in fields:
        raise ConfigurationError(
            f"{asked!r} is neither a case nor a function that takes a step; for a trainer, add "
            f"batch_size"
        )
    return resolve(Case(**{"trainer": asked, **fields}))
