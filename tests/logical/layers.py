"""The logical bytes of a deep model, from the counts of two shallow ones of the same width.

Every layer of the transformer runs the same operators on the same shapes, so calls, bytes and
flops are exactly affine in the number of layers: ``n(L) = n(1) + (L - 1) (n(2) - n(1))``, for each
operator in each phase. ``test_layers.py`` and ``test_1b.py`` compare that with counts of all
layers. Peak memory is not affine (which moment is the largest depends on depth) and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dpbench.core.case import Case
from dpbench.instruments.logical.logical import Logical
from dpbench.results.kernels import OperatorCount
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP, Measurement

TWO_DEPTHS = (1, 2)


def count(case: Case) -> CaseReport:
    """Count a case in this process, without a session: what ``logical_io`` does within one."""
    result = Logical().count(case)
    return replace(CaseReport.of(case, result.rows), operator_counts=result.operators)


def count_by_layers(case: Case, count: Callable[[Case], CaseReport] = count) -> CaseReport:
    """The report of a case, extrapolated from one layer and two.

    Args:
        case: the case; how deep its model is does not change what this costs.
        count: counts a case; the ``logical_io`` fixture will do.
    """
    size = case.size
    shallow, deeper = (
        count(replace(case, model_size=f"{size.vocabulary}x{size.hidden}x{layers}x{size.heads}"))
        for layers in TWO_DEPTHS
    )
    operators = _extrapolated(shallow.operator_counts, deeper.operator_counts, size.layers)
    rows = _rows(case, operators, tool=f"{shallow.frame.tool[0]}, from {TWO_DEPTHS} layers")
    return replace(CaseReport.of(case, rows), operator_counts=operators)


def _extrapolated(
    shallow: tuple[OperatorCount, ...], deeper: tuple[OperatorCount, ...], layers: int
) -> tuple[OperatorCount, ...]:
    first = {(one.phase, one.operator): one for one in shallow}
    second = {(two.phase, two.operator): two for two in deeper}
    steps = layers - TWO_DEPTHS[0]

    def at_depth(where: tuple[str, str], what: str) -> int:
        start, end = (getattr(found.get(where), what, 0) for found in (first, second))
        return int(start + steps * (end - start))

    return tuple(
        OperatorCount(
            *where,
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
