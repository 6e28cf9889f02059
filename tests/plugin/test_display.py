"""What a session shows and which files it writes; with and without xdist."""

from __future__ import annotations

import csv
import json

import pytest

from tests.plugin.conftest import RunSuite

ASKED = [
    *("--dpbench-columns=dram_bytes,dram_ratio", "--dpbench-sort=dram_ratio"),
    *("--dpbench-group-by=device", "--dpbench-csv=out/run.csv", "--dpbench-markdown=out/run.md"),
    "--dpbench-github-benchmark=out/bench.json",
]


@pytest.mark.parametrize(
    ("workers", "summary"),
    [
        (["-p", "no:xdist"], "summary.md"),
        (["-n0"], "absent/summary.md"),  # cannot be written, which is a warning and no more
        (["-n2", "--dpbench-html=out/page.html"], "summary.md"),
    ],
    ids=str,
)
def test_tables_and_files_are_as_asked_for(
    project: RunSuite,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    workers: list[str],
    summary: str,
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / summary))
    result = project(*workers, *ASKED)
    result.assert_outcomes(passed=4)
    lines = result.stdout.lines
    start = lines.index("tiny fp32, NVIDIA H200: GB per step")
    assert lines[start + 2].split() == ["case", "DRAM", "DRAM"]
    assert [line.split()[0] for line in lines[start + 5 : start + 7]] == ["standard", "dpsgd"]
    assert not any("by phase" in line for line in lines)
    markdown = (pytester.path / "out/run.md").read_text()
    if (pytester.path / summary).exists():
        assert (pytester.path / summary).read_text() == f"\n{markdown}"
    else:
        result.stdout.fnmatch_lines(["WARNING: dpbench: GITHUB_STEP_SUMMARY: *absent/summary.md*"])
    entries = json.loads((pytester.path / "out/bench.json").read_text())
    with (pytester.path / "out/run.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["phase"] == "step"]
    dram = [float(row["value"]) for row in rows if row["metric"].startswith("dram_")]
    values = {entry["name"]: entry["value"] for entry in entries}
    totals = [value for name, value in values.items() if name.endswith("/dram_bytes")]
    assert sum(totals) == sum(dram)
    assert len(values) == 3  # two totals, and the ratio of dpsgd
    if "-n2" in workers:  # drawing a page takes a second
        page = (pytester.path / "out/page.html").read_text()
        assert all(f"{value:,.0f}" in page for value in dram)
