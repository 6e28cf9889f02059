"""How a user says what change is too much."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.core.case import PHASES
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import derived_name
from dpbench.results.limits import METRICS, Interval, Limit, mean_interval
from dpbench.results.rows import STEP


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dram_bytes:5%", Limit("dram_bytes", percent=5)),
        ("dram_bytes:0.5GB", Limit("dram_bytes", amount=0.5e9)),
        ("dram_bytes:1000", Limit("dram_bytes", amount=1000)),
        ("dram_bytes:5%+0.1GB", Limit("dram_bytes", percent=5, amount=0.1e9)),
        ("dram_bytes:1e-1kB+5 %", Limit("dram_bytes", percent=5, amount=100)),
        ("dram_bytes@clip:±5%", Limit("dram_bytes", phase="clip", percent=5, two_sided=True)),
        ("dram_bytes:+-5%", Limit("dram_bytes", percent=5, two_sided=True)),
        ("step_time_seconds:2ms", Limit("step_time_seconds", amount=2e-3)),
        ("dram_ratio:3%", Limit("dram_ratio", percent=3)),
        ("l2_served_ratio:0.1", Limit("l2_served_ratio", amount=0.1)),
        ("logical_ratio@clip:3%", Limit("logical_ratio", "clip", percent=3)),
        ("peak_memory_ratio:3%", Limit("peak_memory_ratio", percent=3)),
        ("step_time_ratio:3%", Limit("step_time_ratio", percent=3)),
        ("l2_bytes:3%", Limit("l2_served_bytes", percent=3)),
        ("samples_ratio:3%", Limit("samples_ratio", percent=3)),
        (
            "kernel_time_seconds@clip:1ms",
            Limit("kernel_time_seconds", phase="clip", amount=1e-3),
        ),
        ("kernel_l2_ratio:3%", Limit("kernel_l2_ratio", percent=3)),
        ("memcpy_host_to_device_bytes:5MB", Limit("memcpy_host_to_device_bytes", amount=5e6)),
        ("sm__cycles_active.sum:3%", Limit("sm__cycles_active.sum", percent=3)),
    ],
)
def test_threshold_is_read(text: str, expected: Limit) -> None:
    threshold = Limit.parse(text)
    assert threshold == expected
    assert str(threshold) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dram:5%", "unknown metric 'dram'; choose from dram_bytes, dram_ratio, "),
        ("drum_ratio:5%", "unknown metric 'drum_ratio'; choose from dram_ratio, "),
        ("dram_bytes@klip:5%", "unknown phase 'klip'; choose from step, forward"),
        ("dram_bytes", "write METRIC[@PHASE]:5%"),
        ("dram_bytes:", "write METRIC[@PHASE]:5%"),
        ("dram_bytes:-5%", "write METRIC[@PHASE]:5%"),
        ("dram_bytes:nan", "write METRIC[@PHASE]:5%"),
        ("dram_bytes:5%+6%", "two limits of one kind"),
        ("dram_bytes:inf", "write METRIC[@PHASE]:5%"),
        ("dram_bytes:1e400%", "threshold 'dram_bytes:1e400%': a limit must be finite"),
        ("dram_bytes:5%+1e400B", "a limit must be finite"),
        ("dram_bytes:1e300GB", "a limit must be finite"),
        ("dram_bytes:5GiB", "'GiB' is no unit of this metric; use %, B, kB, MB, GB, TB"),
        ("dram_bytes:5ms", "'ms' is no unit of this metric"),
        ("step_time_seconds:5GB", "'GB' is no unit of this metric; use %, s, ms"),
        ("dram_ratio:5GB", "'GB' is no unit of this metric; use %, or a plain number"),
        ("dram_throughput:5%", "throughputs and spreads cannot have a limit"),
        ("samples_per_second:5s", "'s' is no unit of this metric; use %, or a plain number"),
    ],
)
def test_what_is_no_threshold_gets_one_line_that_says_what_would_be(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Limit.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_spaces_around_the_colon_mean_nothing() -> None:
    threshold = Limit.parse(" dram_bytes @clip : 5%")
    assert threshold == Limit("dram_bytes", phase="clip", percent=5)
    assert str(threshold) == "dram_bytes@clip:5%"


numbers = st.floats(0, 1e15, allow_subnormal=False)


@given(
    metric=st.sampled_from([*METRICS]),
    ratio=st.booleans(),
    phase=st.sampled_from([STEP, *PHASES]),
    percent=numbers | st.none(),
    amount=numbers,
    sign=st.sampled_from(["", "±", "+-"]),
)
def test_what_is_written_is_what_is_read(
    metric: str, ratio: bool, phase: str, percent: float | None, amount: float, sign: str
) -> None:
    name = derived_name(metric) if ratio else metric
    limits = repr(amount) if percent is None else f"{percent!r}%+{amount!r}"
    threshold = Limit.parse(f"{name}@{phase}:{sign}{limits}")
    assert threshold == Limit(name, phase, percent, amount, bool(sign))
    assert threshold.of == (metric if ratio else "")
    assert Limit.parse(str(threshold)) == threshold


def exceeded(text: str, before: float, after: float) -> bool:
    return Limit.parse(text).exceeded(before, after)[1]


@pytest.mark.parametrize(
    ("text", "before", "after", "expected"),
    [
        ("dram_bytes:5%", 100, 105, False),
        ("dram_bytes:5%", 100, 105.1, True),
        ("dram_bytes:5%", 100, 10, False),
        ("dram_bytes:±5%", 100, 94, True),
        ("dram_bytes:5", 100, 106, True),
        ("dram_bytes:5%+10", 100, 109, False),
        ("dram_bytes:20%+10", 100, 115, False),
        ("dram_bytes:5%+10", 100, 111, True),
        ("dram_bytes:5%", 0, 1, True),
        ("dram_bytes:0%", 100, 100, False),
        ("samples_per_second:5%", 100, 94, True),
        ("samples_per_second:5%", 100, 120, False),
    ],
)
def test_change_beyond_every_limit_is_a_regression(
    text: str, before: float, after: float, expected: bool
) -> None:
    assert exceeded(text, before, after) is expected


@pytest.mark.parametrize("limit", [float("inf"), float("nan")])
def test_a_limit_that_is_made_here_must_be_finite_too(limit: float) -> None:
    for part in ("percent", "amount"):
        with pytest.raises(ConfigurationError, match="a limit must be finite"):
            Limit("dram_bytes", **{part: limit})


@pytest.mark.parametrize(
    ("before", "after", "regressed"),
    [
        (1e308, 1.7e308, True),
        (1e308, 1e308, False),
        (-1e308, 1.7e308, True),
        (1e307, 1.04e307, False),
        (float("inf"), float("inf"), True),  # overflowed when it was summed
        (100.0, 129.0, False),
        (70.0, 90.3, False),
    ],
)
def test_numbers_that_overflow_do_not_pass_and_limits_are_exact(
    before: float, after: float, *, regressed: bool
) -> None:
    limit = Limit("dram_bytes", percent=29)
    assert limit.exceeded(before, after)[1] == regressed


# --- numbers that vary ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "before", "after", "verdict"),
    [
        ("step_time_seconds:5%", (1.0, 1.0), (1.06, 1.06), True),
        ("step_time_seconds:5%", (1.0, 1.0), (1.04, 1.04), False),
        ("step_time_seconds:5%", (0.99, 1.01), (1.07, 1.09), True),
        ("step_time_seconds:5%", (0.99, 1.01), (1.05, 1.09), None),
        ("step_time_seconds:5%", (0.99, 1.01), (0.99, 1.03), False),
        ("step_time_seconds:5%", (0.99, 1.01), (0.5, 0.6), False),
        ("step_time_seconds:±5%", (0.99, 1.01), (0.5, 0.6), True),
        ("step_time_seconds:±5%", (0.99, 1.01), (0.5, 1.5), None),
        ("step_time_seconds:0", (0.99, 1.01), (0.99, 1.01), None),
        ("samples_per_second:5%", (99, 101), (80, 90), True),
        ("samples_per_second:5%", (99, 101), (110, 120), False),
        ("step_time_seconds:5%", (-math.inf, math.inf), (-math.inf, math.inf), None),
        ("step_time_seconds:2ms", (-math.inf, math.inf), (1.0, 1.1), None),
        ("step_time_seconds:5%", (1.0, 1.0), (-math.inf, math.inf), None),
        ("step_time_seconds:5%", (math.nan, math.nan), (1.0, 1.0), None),
    ],
)
def test_a_limit_is_exceeded_only_if_it_is_wherever_the_numbers_lie(
    limit: str, before: Interval, after: Interval, verdict: bool | None
) -> None:
    assert Limit.parse(limit).exceeded_between(before, after) is verdict


def test_the_interval_of_a_mean_is_students() -> None:
    """Student's t of two degrees of freedom is 4.3027."""
    assert mean_interval([9.0, 10.0, 12.0]) == pytest.approx((6.538755, 14.12791), rel=1e-3)
    assert mean_interval([5.0, 5.0]) == (5.0, 5.0)
    assert mean_interval([5.0]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("metric", "varies"),
    [
        ("step_time_seconds", True),
        ("step_time_ratio", True),
        ("samples_per_second", True),
        ("gpu_busy_share", True),
        ("gpu_busy_share_ratio", True),
        ("logical_bytes@clip", False),
        ("dram_ratio", False),
        ("flops", False),
    ],
)
def test_times_and_shares_vary_and_counts_do_not(metric: str, varies: bool) -> None:
    assert Limit.parse(f"{metric}:5%").varies is varies
