"""Two runs side by side: what changed, and whether by more than it may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER, Case
from dpbench.errors import ConfigurationError
from dpbench.metrics import ratio_name
from dpbench.results.frame import summarise, with_ratios
from dpbench.results.threshold import Threshold

KEYS = [*AXES, "instrument", "metric", "phase"]
CHANGES = [*KEYS, "device", "unit", "before", "after", "change", "relative"]
"""The columns of a comparison; ``change`` is after - before, ``relative`` that over before."""


def compare(
    before: pd.DataFrame, after: pd.DataFrame, *, across: bool = False, checked: bool = False
) -> pd.DataFrame:
    """What became of each number of ``before`` whose case and instrument ``after`` has too.

    Args:
        before: a long table.
        after: a long table.
        across: compare also what different devices or instruments measured. The columns
            ``device`` and ``instrument`` then say ``X -> Y``, and logical bytes stand against
            DRAM bytes.
        checked: whether the premises of the two have been compared already.

    Returns:
        One row per case, instrument, metric (ratios to standard among them, as ``dram_ratio``)
        and phase, with the columns `CHANGES`. ``after`` is NaN where it is not there any more.

    Raises:
        ConfigurationError: devices or instruments differ, and ``across`` was not asked for.
    """
    if not (across or checked):
        check_comparable(before, after)
    old, new = _values(before), _values(after)
    if across:
        shared = set(old.instrument) & set(new.instrument)
        parts = [
            _join(old[old.instrument.isin(shared)], new[new.instrument.isin(shared)], KEYS),
            _join_instruments(old[~old.instrument.isin(shared)], new[~new.instrument.isin(shared)]),
        ]
        joined = pd.concat([part for part in parts if not part.empty] or parts[:1])
    else:
        joined = _join(old, new, [*KEYS, "device"])
    joined["change"] = joined.after - joined.before
    joined["relative"] = joined.change / joined.before.abs().where(joined.before != 0)
    joined.loc[(joined.before == 0) & (joined.change == 0), "relative"] = 0.0
    return joined[CHANGES].reset_index(drop=True)


def check_comparable(before: pd.DataFrame, after: pd.DataFrame) -> None:
    """Refuse to compare numbers with different premises.

    Raises:
        ConfigurationError: no instrument is in both, or one was used on different devices; or
            one of the two holds nothing.
    """
    if before.empty or after.empty:
        raise ConfigurationError("a run without a single row has nothing to compare")
    pairs = [frame_sources(frame) for frame in (before, after)]
    instruments = [{instrument for _, instrument in found} for found in pairs]
    agreed = {instrument for _, instrument in pairs[0] & pairs[1]}
    if not agreed or instruments[0] & instruments[1] != agreed:
        old, new = (describe(frame) for frame in (before, after))
        raise ConfigurationError(
            f"{old} and {new} are different premises; to compare across them all the same, "
            f"ask for it (--across, --dpbench-compare-across)"
        )


def frame_sources(frame: pd.DataFrame) -> set[tuple[str, str]]:
    """Each (device, instrument) that has rows in a long table."""
    pairs = frame[["device", "instrument"]].drop_duplicates()
    return set(pairs.itertuples(index=False, name=None))


def describe(frame: pd.DataFrame) -> str:
    """Instruments and devices of a long table, e.g. ``ncu on NVIDIA H200``."""
    devices: dict[str, list[str]] = {}
    for device, instrument in sorted(frame_sources(frame)):
        devices.setdefault(device, []).append(instrument)
    return "; ".join(f"{', '.join(n)} on {d}" for d, n in devices.items()) or "nothing"


def judge(changes: pd.DataFrame, thresholds: Iterable[Threshold]) -> pd.DataFrame:
    """The rows that a threshold is set for, with ``limit``, ``threshold`` and ``regressed``.

    Args:
        changes: a comparison.
        thresholds: a row that several apply to comes several times.

    Returns:
        ``limit`` is the change that is allowed, in the metric's unit; ``threshold`` says what
        it came from.
    """
    parts = []
    for threshold in thresholds:
        chosen = changes[(changes.metric == threshold.name) & (changes.phase == threshold.phase)]
        verdict = threshold.exceeded(chosen.before, chosen.after)
        parts.append(chosen.join(verdict).assign(threshold=str(threshold)))
    columns = [*changes.columns, "limit", "regressed", "threshold"]
    if not parts:
        return pd.DataFrame(columns=columns)
    return pd.concat(parts, ignore_index=True)[columns]


def regressions(verdict: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a verdict that exceed their limit, as plain JSON types; NaN is None."""
    worse = verdict[verdict.regressed.astype(bool)].drop(columns="regressed")
    plain = worse.astype(object).where(worse.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in plain.to_dict("records")]


def unapplied(changes: pd.DataFrame, thresholds: Sequence[Threshold]) -> list[Threshold]:
    """The thresholds that no row of a comparison is about."""
    there = set(zip(changes.metric, changes.phase, strict=True))
    return [t for t in thresholds if (t.name, t.phase) not in there]


def ungated(
    after: pd.DataFrame, changes: pd.DataFrame, thresholds: Iterable[Threshold]
) -> dict[str, list[str]]:
    """For each threshold, the compared cases that have its number now and had none before.

    Such as a ratio, of a case whose reference is a run without the baseline.

    Args:
        after: a long table.
        changes: its comparison with what was before.
        thresholds: what is set for it.

    Returns:
        The cases by threshold, each as one phrase; thresholds that miss none are left out.
    """
    columns = [*AXES, "instrument"]
    compared = changes[columns].drop_duplicates()
    numbers = _values(after).merge(compared, on=columns)
    found: dict[str, list[str]] = {}
    for threshold in thresholds:
        now, then = (
            frame[(frame.metric == threshold.name) & (frame.phase == threshold.phase)][list(AXES)]
            for frame in (numbers, changes)
        )
        had = set(then.itertuples(index=False, name=None))
        missing = [axes for axes in now.itertuples(index=False, name=None) if axes not in had]
        if had and missing:  # without any, the threshold is an error
            cases = [Case(*axes).id for axes in missing]
            found[str(threshold)] = list(dict.fromkeys(cases))
    return found


def _values(frame: pd.DataFrame) -> pd.DataFrame:
    """A number per case, instrument, device, metric and phase; ratios as metrics of their own."""
    summary = with_ratios(summarise(frame))
    ratios = summary[(summary.trainer != BASELINE_TRAINER) & summary.ratio.notna()]
    names = {metric: ratio_name(metric) for metric in ratios.metric.unique()}
    ratios = ratios.assign(metric=ratios.metric.map(names), value=ratios.ratio, unit="1")
    return pd.concat([summary, ratios])[[*KEYS, "device", "unit", "value"]]


def _join(old: pd.DataFrame, new: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Old rows whose case and instrument are in the new ones, beside the new value."""
    for frame in (old, new):
        if frame.duplicated(keys).any():
            raise ConfigurationError("a run has one case on several devices: no one value of it")
    measured = [key for key in keys if key not in ("metric", "phase")]
    old = old.merge(new[measured].drop_duplicates(), on=measured)
    after = new[list(dict.fromkeys([*keys, "device", "value"]))]
    joined = old.merge(after, on=keys, how="left", suffixes=("", "_new"))
    if "device" not in keys:
        joined["device"] = _changed(joined.device, joined.device_new)
    return joined.rename(columns={"value": "before", "value_new": "after"})


def _join_instruments(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Numbers of the same quantity by different instruments."""
    keys = [*AXES, "phase", "quantity"]
    old, new = (
        frame.assign(quantity=frame.metric.str.replace("^logical_", "dram_", regex=True))
        for frame in (old, new)
    )
    after = new[[*keys, "instrument", "device", "value"]]
    joined = old.merge(after, on=keys, suffixes=("", "_new"))
    for column in ("instrument", "device"):
        joined[column] = _changed(joined[column], joined[f"{column}_new"])
    return joined.rename(columns={"value": "before", "value_new": "after"})


def _changed(old: pd.Series[str], new: pd.Series[str]) -> pd.Series[str]:
    """``X`` where both are X (or the new one is missing), else ``X -> Y``."""
    return old.where((old == new) | new.isna(), old + " -> " + new.fillna(""))
