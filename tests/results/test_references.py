"""What the cases of a session are compared with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.results.compare import ungated
from dpbench.results.frame import to_frame
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome, document
from dpbench.results.references import (
    References,
    alone,
    alone_in_words,
    as_they_are,
    keys_of,
    ungated_in_words,
)
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.results.threshold import Threshold

H200 = "NVIDIA H200"
A100 = "NVIDIA A100"
NCU = (H200, "ncu")


def measured(trainer: str, value: float, *, device: str = H200, by: str = "ncu") -> Outcome:
    case = Case(trainer, 8, 256)
    row = Measurement(case, by, STEP, "l2_total_bytes", value, "B", 0, device, "")
    return Outcome(case, (row,), 1.0, instruments=(by,))


def failed(trainer: str) -> Outcome:
    return Outcome(Case(trainer, 8, 256), (), 1.0, error="CaseFailed", instruments=("ncu",))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "runs")


def save(storage: Storage, outcomes: Iterable[Outcome], **session: Any) -> Path:
    made = document(list(outcomes), {}, {"status": COMPLETE, **session})
    return storage.allocate("run", H200, json.dumps(made))


def changes(references: References, *outcomes: Outcome) -> dict[tuple[str, str], tuple[Any, ...]]:
    """For each trainer and metric: the value before, and the number of the run it is from."""
    after = to_frame(row for outcome in outcomes for row in outcome.rows)
    found = references.changes(after)
    return {
        (row.trainer, row.metric): (row.before, int(row.reference[:4]))
        for row in found.itertuples()
    }


BOTH = (measured("standard", 100), measured("dpsgd", 500))


def test_each_case_is_compared_with_the_newest_good_run_in_which_it_was_measured(
    storage: Storage,
) -> None:
    save(storage, [measured("standard", 1), measured("dpsgd", 4)])
    save(storage, [measured("standard", 2), failed("dpsgd")])
    save(storage, [measured("standard", 3), measured("dpsgd", 5)], regressed=True)
    save(storage, [measured("standard", 4), measured("dpsgd", 6)], status=INTERRUPTED)
    save(storage, [measured("dpsgd", 7, device=A100), measured("dpsgd", 8, by="timing")])
    references = storage.references([H200])
    assert changes(references, *BOTH) == {
        ("standard", "l2_total_bytes"): (2, 2),
        ("dpsgd", "l2_total_bytes"): (4, 1),
        ("dpsgd", "l2_ratio"): (4, 1),  # over the baseline of its own run
    }
    [first, second] = references.chosen(keys_of([Case("dpsgd", 8, 256)], [NCU, (H200, "timing")]))
    assert (first.name[:4], second.name[:4]) == ("0001", "0005")


def test_named_run_alone_counts_whatever_became_of_it(storage: Storage) -> None:
    save(storage, [measured("dpsgd", 4)])
    path = save(storage, [measured("standard", 2)], regressed=True)
    assert changes(References.to(Run.load(path)), *BOTH) == {("standard", "l2_total_bytes"): (2, 2)}


def test_cases_without_a_reference_are_named(storage: Storage) -> None:
    save(storage, [measured("standard", 1)])
    after = to_frame(
        row
        for outcome in (*BOTH, measured("standard", 3, by="timing"), measured("dpsgd_fgc", 1))
        for row in outcome.rows
    )
    found = alone(after, storage.references([H200]).changes(after))
    assert found == [
        "dpsgd-bs8-seq256-1b-fp32",
        "standard-bs8-seq256-1b-fp32 (timing)",
        "dpsgd_fgc-bs8-seq256-1b-fp32",
    ]
    assert alone_in_words(found[:1]) == "nothing to compare 1 case with: dpsgd-bs8-seq256-1b-fp32"
    assert alone_in_words(["a"] * 12).startswith("nothing to compare 12 cases with: a, a")
    assert alone_in_words(["a"] * 12).endswith(", a and 2 more")
    assert Storage(storage.directory / "absent").references([H200]).changes(after).empty


def test_case_whose_reference_lacks_the_ratio_of_a_limit_is_named(storage: Storage) -> None:
    ghost = measured("dpsgd_ghost", 300)
    save(storage, [*BOTH, ghost])
    save(storage, [measured("dpsgd", 500)])  # without the baseline that a ratio needs
    after = to_frame(row for outcome in (*BOTH, ghost) for row in outcome.rows)
    found = storage.references([H200]).changes(after)
    limits = [Threshold.parse(text) for text in ("l2_ratio:3%", "l2_total_bytes:1%")]
    cases = ungated(after, found, limits)
    assert cases == {"l2_ratio:3%": [Case("dpsgd", 8, 256).id]}
    [line] = ungated_in_words(cases)
    assert line.startswith("l2_ratio:3% judged nothing of dpsgd-bs8-seq256-1b-fp32: ")


def test_session_is_not_compared_with_its_own_file(storage: Storage) -> None:
    save(storage, [measured("standard", 1)])
    references = storage.references([H200])
    references.own = save(storage, [measured("standard", 2)])
    assert changes(references, BOTH[0]) == {("standard", "l2_total_bytes"): (1, 1)}
    resumed = storage.references([H200])
    resumed.own = references.own
    assert changes(resumed, BOTH[0]) == {("standard", "l2_total_bytes"): (1, 1)}


def test_run_that_ends_while_the_session_goes_on_is_no_reference(storage: Storage) -> None:
    """Or one process of the session would judge by it, and another by an older one."""
    save(storage, [measured("dpsgd", 4)])
    running = save(storage, [measured("dpsgd", 5)], status=INTERRUPTED)
    references = storage.references([H200])
    worker = References(references.files)
    running.write_text(json.dumps(document([measured("dpsgd", 1)], {}, {"status": COMPLETE})))
    os.utime(running, ns=(0, references.files[running] + 1))  # however coarse the clock is
    for process in (references, worker):
        assert changes(process, measured("dpsgd", 6)) == {("dpsgd", "l2_total_bytes"): (4, 1)}


def test_damaged_files_on_the_way_are_named(storage: Storage) -> None:
    save(storage, [measured("standard", 1)])
    cut = storage.allocate("cut", H200, "{")
    references = storage.references([H200])
    assert changes(references, BOTH[0]) == {("standard", "l2_total_bytes"): (1, 1)}
    [line] = references.skipped
    assert line.startswith(f"skipped: run file {cut} is damaged")
    with pytest.raises(ConfigurationError, match="is damaged"):
        References(as_they_are([cut]), named=True).changes(to_frame(BOTH[0].rows))
