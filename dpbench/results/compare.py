"""Two runs side by side: what changed. `dpbench.results.gate` judges it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER
from dpbench.errors import ConfigurationError
from dpbench.metrics import RATIO, ratio_name
from dpbench.results.frame import summarise, with_ratios

KEYS = [*AXES, "instrument", "metric", "phase"]
CHANGES = [*KEYS, "device", "unit", "before", "after", "change", "relative"]
"""The columns of a comparison; ``change`` is after - before, ``relative`` that over before."""


@dataclass(frozen=True)
class Pairs:
    """The numbers of two long tables, and those that stand side by side.

    Args:
        old: one row per case, instrument, device, metric (ratios among them) and phase.
        new: the same of the other table.
        changes: the columns `CHANGES`; ``old`` and ``new`` are the places of a pair's two numbers
            in these tables, ``new`` NaN where the number is not there any more.
    """

    old: pd.DataFrame
    new: pd.DataFrame
    changes: pd.DataFrame


def compare(before: pd.DataFrame, after: pd.DataFrame, *, across: bool = False) -> pd.DataFrame:
    """What became of each number of ``before`` whose case and instrument ``after`` has too.

    Args:
        before: a long table.
        after: a long table.
        across: compare also what different devices or instruments measured. The columns
            ``device`` and ``instrument`` then say ``X -> Y``, and logical bytes stand against
            DRAM bytes.

    Returns:
        One row per case, instrument, metric (ratios to standard among them, as ``dram_ratio``)
        and phase, with the columns `CHANGES`. ``after`` is NaN where it is not there any more;
        ratios stand only where both tables have the baseline.

    Raises:
        ConfigurationError: devices or instruments differ, and ``across`` was not asked for.
    """
    if not across:
        check_comparable(before, after)
    changes = pairs(before, after, across=across).changes
    return changes[~without_baseline(changes)][CHANGES].reset_index(drop=True)


def pairs(before: pd.DataFrame, after: pd.DataFrame, *, across: bool = False) -> Pairs:
    """The numbers of two long tables, side by side where case and instrument agree."""
    old, new = numbers(before), numbers(after)
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
    return Pairs(old, new, joined[[*CHANGES, "old", "new"]].reset_index(drop=True))


def without_baseline(changes: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are ratios that are not there any more: their baseline, or the number, is gone."""
    return changes.metric.str.endswith(RATIO) & changes.after.isna()


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


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """A number per case, instrument, device, metric and phase; ratios as metrics of their own."""
    summary = with_ratios(summarise(_finite(frame)))
    ratios = summary[(summary.trainer != BASELINE_TRAINER) & summary.ratio.notna()]
    names = {metric: ratio_name(metric) for metric in ratios.metric.unique()}
    ratios = ratios.assign(metric=ratios.metric.map(names), value=ratios.ratio, unit="1")
    found = pd.concat([summary, ratios], ignore_index=True)
    return found[[*KEYS, "device", "unit", "value"]]


def _finite(frame: pd.DataFrame) -> pd.DataFrame:
    """A long table without numbers of which a repeat is none: their sum or mean would be wrong."""
    wrong = ~np.isfinite(frame.value.astype(float))
    if not wrong.any():
        return frame
    keys = [*KEYS, "device"]
    named = pd.MultiIndex.from_frame(frame[wrong][keys])
    return frame[~pd.MultiIndex.from_frame(frame[keys]).isin(named)]


def _join(old: pd.DataFrame, new: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Old rows whose case and instrument are in the new ones, beside the new value."""
    for frame in (old, new):
        if frame.duplicated(keys).any():
            raise ConfigurationError("a run has one case on several devices: no one value of it")
    measured = [key for key in keys if key not in ("metric", "phase")]
    after = new.rename_axis("new").reset_index()
    after = after[list(dict.fromkeys([*keys, "device", "value", "new"]))]
    before = old.rename_axis("old").reset_index()
    before = before.merge(new[measured].drop_duplicates(), on=measured)
    joined = before.merge(after, on=keys, how="left", suffixes=("", "_new"))
    if "device" not in keys:
        joined["device"] = _changed(joined.device, joined.device_new)
    return joined.rename(columns={"value": "before", "value_new": "after"})


def _join_instruments(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Numbers of the same quantity by different instruments."""
    keys = [*AXES, "phase", "quantity"]
    before, after = (
        frame.assign(quantity=frame.metric.str.replace("^logical_", "dram_", regex=True))
        .rename_axis(name)
        .reset_index()
        for name, frame in (("old", old), ("new", new))
    )
    after = after[[*keys, "instrument", "device", "value", "new"]]
    joined = before.merge(after, on=keys, suffixes=("", "_new"))
    for column in ("instrument", "device"):
        joined[column] = _changed(joined[column], joined[f"{column}_new"])
    return joined.rename(columns={"value": "before", "value_new": "after"})


def _changed(old: pd.Series[str], new: pd.Series[str]) -> pd.Series[str]:
    """``X`` where both are X (or the new one is missing), else ``X -> Y``."""
    return old.where((old == new) | new.isna(), old + " -> " + new.fillna(""))
