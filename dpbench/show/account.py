"""The account of a step as a table."""

from __future__ import annotations

import pandas as pd

from dpbench.results.account import ACCOUNT_COLUMNS, TOLERANCE, in_cache, unaccounted
from dpbench.show.layout import Table, gigabytes


def account_table(title: str, account: pd.DataFrame) -> Table:
    """An account in GB, a line for each phase; all with two decimals if the step reaches DRAM."""
    small = in_cache(account)
    cells = [
        [
            str(phase),
            *(
                gigabytes(line[part]) if small else f"{line[part] / 1e9:.2f}"
                for part in (*ACCOUNT_COLUMNS, "remainder")
            ),
            f"{line.share:.2%}",
        ]
        for phase, line in account.iterrows()
    ]
    parts = [f"{whose}\n{way}" for whose in ("kern.", "copy", "range") for way in ("read", "write")]
    notes = ["Left over: range less kernels less copies; % of the step's range."]
    if small:
        notes.append("WARNING: at this size copies stay in the L2 cache; nothing can add up.")
    elif unaccounted(account):
        notes.append(f"WARNING: more than {TOLERANCE:.0%} of the step is not accounted for.")
    headers = ["phase", *parts, "left\nover", "%"]
    return Table(f"{title}: DRAM GB per step", headers, cells, tuple(notes))
