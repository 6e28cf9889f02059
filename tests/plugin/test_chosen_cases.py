"""The cases that options choose are counted as the options of Nsight Compute say."""

from __future__ import annotations

import json

import pytest

from dpbench.results.schema import parsed
from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import command_in, phases

CHOSEN = [
    *("--dpbench-trainer=dpsgd", "--dpbench-batch-size=2", "--dpbench-batch-size=3"),
    *("--dpbench-seq-len=8", "--dpbench-model-size=small", "--dpbench-precision=bf16"),
    *("--dpbench-attention=dp_mha", "--dpbench-model=mine=outside:Model"),
]
COUNTED = [
    *("--ncu", "--ncu-path=./ncu", "--ncu-dir=deep/reports"),
    *("--ncu-metrics=gld_throughput", "--ncu-metrics=global_store_bytes"),
    *("--ncu-warmup=4", "--ncu-active=7", "--dpbench-no-timing"),
    *("--ncu-kernels-phase=clip", "--ncu-kernels-top=2"),
    *("--dpbench-save=clip", "--dpbench-storage=kept"),
]


@pytest.mark.slow
@pytest.mark.repeats
@pytest.mark.parametrize("mode", [["-p", "no:xdist"], ["-n1"]], ids=str)
def test_the_chosen_cases_are_counted_and_saved_as_asked(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # which has no ÷; a table remains a table
    pytester.makepyfile(
        outside="",
        test_suite="""
        def test_kernels(dpbench_case, ncu):
            measured = ncu(dpbench_case)
            assert measured.kernels.loc["clip", "reduce_kernel<NormTwoOps>"].launches == 38
        """,
    )
    result = project(*mode, *CHOSEN, *COUNTED, replayed=False)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "dpbench: cell, 2 cases, NVIDIA H200 (driver 580.159.03)",
            "*: bytes by kernel (top 2 of 7)",
            "*: bytes by category",
            "dpbench: saved kept/NVIDIA-H200/0001_clip.json",
        ]
    )
    folder = pytester.path / "deep/reports/small-bf16-dp_mha-mine"
    for size in (2, 3):
        name = f"report_dpsgd_bs{size}_seq8"
        task = json.loads((folder / f"{name}.task.json").read_text())
        cell = {"batch_size": size, "seq_len": 8, "model_size": "small", "attention": "dp_mha"}
        named = {"trainer": "dpsgd", "precision": "bf16", "model": "mine=outside:Model"}
        assert (cell | named).items() <= task["case"].items()
        assert task["instrument"] == "dpbench.instruments.ncu.ncu:Ncu"
        assert task["fields"]["steps"] == {"warmup": 4, "active": 7}
        assert "--nvtx-include dpbench@0.clip" in command_in(folder / f"kernels/{name}.log")
    assert not list(folder.glob("*.timing.log"))

    [path] = Storage(pytester.path / "kept").paths()
    document = parsed(path.read_bytes())
    assert {row["metric"] for row in document["rows"] if row["instrument"] == "ncu"} == {
        "dram_read_bytes",
        "dram_write_bytes",
        "global_load_bytes",
        "global_store_bytes",
    }
    assert phases(document["rows"], "kernel_launches") == {"clip"}, "one phase is not the step"
    assert sum(row["launches"] for row in document["kernels"]) == 2 * 80
    assert "backward" in phases(document["rows"], "dram_read_bytes")
    assert {row["phase"] for row in document["kernels"]} == {"clip"}
    session, environment = document["session"], document["environment"]
    assert (session["status"], session["regressed"]) == ("complete", False)
    assert session["cases_asked"] == 2
    assert session["settings"]["ncu"]["steps"] == {"warmup": 4, "active": 7}
    assert session["workers"] == ("-n1" in mode)
    assert environment["versions"]["ncu"] == "2025.3.1"
    assert environment["versions"]["torch"]
    assert environment["machine"]["cpus"] >= 1
    assert session["seconds"] >= 0
    assert environment["gpu"]["driver"] == "580.159.03"
