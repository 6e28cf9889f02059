"""``--ncu-kernels`` and what goes with it."""

from __future__ import annotations

import json

import pytest

from tests.plugin.conftest import RunSuite


def test_kernels_and_speed_of_light_come_beside_the_ranges(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_asks="""
        def test_kernels(dpbench_case, ncu):
            norms = ncu(dpbench_case).kernels.loc["clip", "reduce_kernel<NormTwoOps>"]
            assert norms.launches == 38
        """
    )
    result = project(
        *("--ncu-kernels-phase=clip", "--ncu-set=detailed", "--ncu-kernels-top=2"),
        *("--dpbench-trainer=dpsgd", "--dpbench-json=run.json", "test_asks.py"),
    )
    result.assert_outcomes(passed=1)
    text = result.stdout.str()
    title = "dpsgd-bs4-seq64-tiny-fp32, NVIDIA H200"
    assert f"{title}: bytes by kernel (top 2 of 7)" in text
    assert f"{title}: bytes by category" in text
    assert f"{title}: Speed of Light" in text
    document = json.loads((pytester.path / "run.json").read_text())
    kernels = document["kernels"]
    assert {row["phase"] for row in kernels} == {"clip"}
    assert sum(row["launches"] for row in kernels) == 80
    assert {row["trainer"] for row in kernels} == {"dpsgd"}
    rows = {(r["phase"], r["metric"]): r["value"] for r in document["rows"]}
    assert rows["clip", "kernel_launches"] == 80
    assert ("step", "kernel_launches") not in rows, "one phase is not the step"
    assert ("backward", "kernel_launches") not in rows
    assert ("backward", "dram_read_bytes") in rows
    assert len(document["speed_of_light"]) == 4
    folder = pytester.path / "ncu_reports/tiny-fp32"
    assert (folder / "kernels/report_dpsgd_bs4_seq64.ncu-rep").exists()
    command = (folder / "sol/report_dpsgd_bs4_seq64.log").read_text().splitlines()[0]
    assert "--nvtx-include dpbench@0.clip --set detailed --metrics" in command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ncu-kernels-phase=cake"], "unknown phase 'cake'; choose from forward"),
        (["--ncu-set=huge"], "unknown set of sections 'huge'; choose from basic"),
    ],
)
def test_bad_values_are_named_before_anything_runs(
    project: RunSuite, arguments: list[str], words: str
) -> None:
    result = project(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()


def test_kernels_without_ncu_are_a_usage_error(project: RunSuite) -> None:
    result = project("--ncu-kernels", replayed=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: dpbench: --ncu-kernels, --ncu-set*add to --ncu*"])
