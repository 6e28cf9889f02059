"""How each trainer did in a run, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpbench.show.layout import ABSENT, Table, gigabytes


def trainer_table(summary: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Table:
    """The summary for people; peak memory that was only predicted has a column of its own.

    The reason of each failure is said below, then the notes.
    """
    peaks = {"peak\nmemory GB": "peak_memory_bytes"}
    if any(line["logical_peak_memory_bytes"] is not None for line in summary):
        peaks["logical\npeak GB"] = "logical_peak_memory_bytes"
    cells = [
        [
            line["trainer"],
            ", ".join(line["instruments"]),
            f"{line['ok']}/{line['ok'] + line['failed']}"
            + (f", {line['skipped']} skipped" if line["skipped"] else ""),
            ABSENT if line["success_rate"] is None else f"{line['success_rate']:.0%}",
            *(ABSENT if line[key] is None else gigabytes(line[key]) for key in peaks.values()),
        ]
        for line in summary
    ]
    failures = [failure for line in summary for failure in line["failures"]]
    reasons = [f"{failure['error']}: {failure['message']}" for failure in failures]
    headers = ["trainer", "instruments", "cases\nok", "success", *peaks]
    return Table("Cases by trainer", headers, cells, (*reasons, *notes))
