"""``--dpbench-json`` renews a reference, here with what is timed and profiled, too."""

from __future__ import annotations

import json

import pytest

from dpbench.child.messages import Steps
from dpbench.child.task import Task
from dpbench.results.schema import parsed
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import (
    halved,
    phases,
    recorded_document,
    values,
)

TIMED = [
    *("--ncu-kernels", "--dpbench-warmup=2", "--dpbench-active=4"),
    *("--dpbench-instrument=torch_profiler", "--dpbench-profile-dir=profiles"),
    *("--dpbench-profile-schedule=wait=1", "--dpbench-profile-threshold=0.12"),
    *("--dpbench-compare=reference.json", "--dpbench-json=renewed.json"),
]


@pytest.mark.slow
def test_a_reference_is_renewed_with_what_was_counted_timed_and_profiled(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    path = pytester.path / "reference.json"
    old = recorded_document(halved, started="2026-01-02") | {"environment": {"python": "3.0"}}
    path.write_text(json.dumps(old))
    old = parsed(path.read_bytes())
    measured = ["--ncu", "--ncu-path=./ncu", "--dpbench-trainer=standard"]
    result = project("-p", "no:xdist", *measured, *TIMED, replayed=False)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["standard*dram_bytes*+100.00%*"])
    assert parsed(path.read_bytes()) == old
    new = parsed((pytester.path / "renewed.json").read_bytes())
    assert values(new, "standard", "ncu") == values(recorded_document(), "standard")
    assert new["environment"]["gpu"]["driver"] == "580.159.03"
    by = ["ncu", "ncu_kernels", "timing", "torch_profiler"]
    assert sorted(new["cases"][0]["instruments"]) == by
    rows = [row for row in new["rows"] if row["trainer"] == "standard"]
    assert phases(rows, "kernel_launches") == {"step", "forward", "backward", "optimizer"}
    timed = [r for r in rows if (r["phase"], r["metric"]) == ("step", "step_time_seconds")]
    assert [row["repeat"] for row in timed] == [0, 1, 2, 3]
    assert phases(rows, "memset_bytes") >= {"step", "forward"}

    folder = pytester.path / "ncu_reports/tiny-fp32"
    timing = Task.read(folder / "report_standard_bs4_seq64.timing.task.json").instrument
    assert (timing.device, timing.steps) == ("cuda", Steps(2, 4))
    profile = pytester.path / "profiles/standard-bs4-seq64-tiny-fp32"
    report = (profile / "report.txt").read_text(encoding="utf-8")
    assert "schedule: skip_first 1, wait 1, warmup 1, active 1, repeat 1" in report
    slow = report.partition("operators that take 0.12 ms")[2].partition("Sums over")[0]
    assert "aten::mm\n" in slow
    assert "aten::addmm\n" not in slow, "it takes 0.11 ms"
