"""Extrapolates the logical bytes of a deep model from two shallow ones of the same width.

Each layer of the transformer runs the same operators on the same shapes. So calls, bytes and FLOPs
of each operator in each phase are affine in the number of layers:
``n(L) = n(1) + (L - 1) (n(2) - n(1))``. ``test_layers.py`` and ``test_1b.py`` compare this with
counts of all layers. Peak memory is not affine, because the phase of the peak depends on depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from dpbench.core.case import Case
from dpbench.instruments.logical.logical import Logical
from dpbench.results.kernels import OperatorCount
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP, Measurement

TWO_DEPTHS = (1, 2)


def count(case: Case) -> CaseReport:
    """Count a case in this process, like ``logical_io`` but without a session."""
    result = Logical().count(case)
    return replace(CaseReport.of(case, result.rows), operator_counts=result.operators)


def count_by_layers(case: Case, count: Callable[[Case], CaseReport] = count) -> CaseReport:
    """The report of a case, extrapolated from one layer and two.

    Args:
        case: the case, with a model of any depth.
        count: counts a case, e.g. the ``logical_io`` fixture.
    """
    size = case.size
    shallow, deeper = (
        count(replace(case, model_size=f"{size.vocabulary}x{size.hidden}x{layers}x{size.heads}"))
        for layers in TWO_DEPTHS
    )
    operators = _extrapolated(shallow.operator_counts, deeper.operator_counts, size.layers)
    rows = _rows(case, operators, tool=f"{shallow.frame.tool[0]}, from {TWO_DEPTHS} layers")
    return replace(CaseReport.of(case, rows), operator_counts=operators)


def totals(counts: Iterable[OperatorCount]) -> Counter[tuple[str, ...]]:
    """Return the sums over the layers, whose modules have different numbers."""
    found: Counter[tuple[str, ...]] = Counter()
    for each in counts:
        for what in ("calls", "read_bytes", "write_bytes", "flops"):
            found[each.phase, each.operator, each.line, what] += getattr(each, what)
    return found


def _extrapolated(
    shallow: tuple[OperatorCount, ...], deeper: tuple[OperatorCount, ...], layers: int
) -> tuple[OperatorCount, ...]:
    first = {(one.phase, one.operator, one.module, one.line): one for one in shallow}
    second = {(two.phase, two.operator, two.module, two.line): two for two in deeper}
    steps = layers - TWO_DEPTHS[0]

    def at_depth(where: tuple[str, ...], what: str) -> int:
        start, end = (getattr(found.get(where), what, 0) for found in (first, second))
        return int(start + steps * (end - start))

    return tuple(
        OperatorCount(
            *where[:2],
            module=where[2],
            line=where[3],
            calls=at_depth(where, "calls"),
            read_bytes=at_depth(where, "read_bytes"),
            write_bytes=at_depth(where, "write_bytes"),
            flops=at_depth(where, "flops"),
        )
        for where in dict.fromkeys([*first, *second])
    )


def _rows(case: Case, operators: tuple[OperatorCount, ...], tool: str) -> list[Measurement]:
    """The bytes of each phase and of the step."""
    phases = dict.fromkeys(count.phase for count in operators)
    return [
        Measurement(
            case,
            Logical.name,
            phase,
            f"logical_{what}",
            sum(getattr(c, what) for c in operators if phase in (c.phase, STEP)),
            "B",
            0,
            "logical, extrapolated from two depths",
            tool,
        )
        for phase in (*phases, STEP)
        for what in ("read_bytes", "write_bytes")
    ]
