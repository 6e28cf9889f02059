"""Tables, files and limits of a session, without xdist and with two workers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dpbench.results.schema import parsed
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import (
    less_and_elsewhere,
    recorded_document,
    save,
    saved,
    values,
)

SHOWN = [
    *("--dpbench-grid=cells.toml", "--dpbench-autosave"),
    *("--dpbench-columns=dram_bytes,dram_ratio", "--dpbench-sort=dram_bytes"),
    "--dpbench-expect=none",
    *("--dpbench-group-by=phase", "--dpbench-csv=out/run.csv", "--dpbench-json=out/run.json"),
    *("--dpbench-markdown=out/run.md", "--dpbench-html=out/run.html"),
    "--dpbench-output=out/also.md",
    *("--dpbench-compare=1", "--dpbench-compare-across"),
    "--dpbench-compare-fail=global_load_bytes:5%",
    "--dpbench-compare-fail=global_load_ratio@backward:3%",
    "--dpbench-compare-fail=global_store_bytes:20%",
    "--dpbench-compare-fail=step_time_seconds:5%",
]


@pytest.mark.repeats
@pytest.mark.parametrize("mode", [["-p", "no:xdist"], ["-n2"]], ids=str)
def test_a_session_is_shown_written_and_judged_as_asked(
    project: RunSuite,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    temporary: Path,
    mode: list[str],
) -> None:
    save(pytester.path, "elsewhere", recorded_document(less_and_elsewhere))
    pytester.makefile(
        ".toml",
        cells="trainer = ['standard', 'dpsgd', 'dpsgd_ghost']\n"
        "batch_size = 4\nseq_len = 64\nmodel_size = 'tiny'",
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    result = project(*mode, *SHOWN)

    # Each case once, however many tests ask; one that fails or got worse fails its own tests.
    result.assert_outcomes(passed=2, failed=4)
    log = pytester.path / "ncu_reports/tiny-fp32/measured.txt"
    assert sorted(log.read_text().split()) == [
        "report_dpsgd_bs4_seq64",
        "report_dpsgd_ghost_bs4_seq64",
        "report_standard_bs4_seq64",
    ]
    text = result.stdout.str()
    assert text.count("CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: no recording of") == 3
    assert text.count("2 regressions against 0001_elsewhere") == 2
    assert "Traceback" not in text
    result.stdout.fnmatch_lines(["*--- end of *report_dpsgd_ghost_bs4_seq64.log*"])
    result.stdout.fnmatch_lines(
        [
            "* dpbench comparison *",
            "metric*phase*before*after*change*limit",
            "global_load_bytes*step*MB*MB*+10.00%*5%",
            "global_load_ratio*backward*+10.00%*3%",
            "tiny fp32, phase forward, NVIDIA H200: MB per step",
            "case*DRAM*DRAM",
            "dpsgd bs4 seq64 *",
            "standard bs4 seq64 *",
            "tiny fp32, phase backward, NVIDIA H200: MB per step",
            "standard bs4 seq64 *",
            "dpsgd bs4 seq64 *",
            "Change: tiny fp32, batch 4, sequence 64, ncu on NVIDIA A100 -> NVIDIA H200,",
            "dpbench: compared with 0001_elsewhere",
            "dpbench: saved .dpbench/NVIDIA-H200/0002_*T*Z.json",
            "ERROR: dpbench: step_time_seconds:5% was not checked: 0001_elsewhere has no*",
        ]
    )
    assert text.count("phase forward, NVIDIA H200: MB per step") == 1
    run = saved(pytester.path, 2)
    assert (run.status, run.regressed) == ("complete", True)
    regressions = run.session["regressions"]
    assert sorted((row["trainer"], row["metric"], row["phase"]) for row in regressions) == [
        ("dpsgd", "global_load_bytes", "step"),
        ("dpsgd", "global_load_ratio", "backward"),
    ]
    check_files(pytester.path)
    assert not list(temporary.glob("dpbench-*"))


def check_files(folder: Path) -> None:
    """Whether the files of `SHOWN` say the same."""
    document = parsed((folder / "out/run.json").read_bytes())
    assert {case["trainer"]: case["error"] for case in document["cases"]} == {
        "standard": None,
        "dpsgd": None,
        "dpsgd_ghost": "CaseFailed",
    }
    for trainer in ("standard", "dpsgd"):
        assert values(document, trainer) == values(recorded_document(), trainer)
    with (folder / "out/run.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["value"]) for row in rows] == [row["value"] for row in document["rows"]]
    dram = [
        float(row["value"])
        for row in rows
        if row["phase"] == "step" and row["metric"] == "dram_bytes"
    ]
    markdown = (folder / "out/run.md").read_text(encoding="utf-8")
    assert (folder / "out/also.md").read_text(encoding="utf-8") == markdown
    assert "| dpsgd bs4 seq64" in markdown.partition("phase backward")[0]
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith(f"\n{markdown.rstrip()}")
    assert "Change: " in summary
    page = (folder / "out/run.html").read_text(encoding="utf-8")
    assert "2 cases measured on NVIDIA H200. 1 case failed." in page
    assert 'id="plot-phases-0"' in page
    assert all(f"{value:,.0f}" in page for value in dram)
