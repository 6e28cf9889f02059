"""The instruments that profile kernel by kernel: their exact commands, and what they make."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpbench import Case, ConfigurationError
from dpbench.child.messages import Steps
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments import choose
from dpbench.instruments.ncu.ncu import NcuKernels
from tests.recorded import RANGES, unpacked

CASE = Case("dpsgd", 8, 256)
TINY = Case("dpsgd", 4, 64, "tiny")


def test_the_whole_argument_list_for_every_phase() -> None:
    assert NcuKernels(Path("reports"), path="/opt/ncu").profiler_command(CASE) == [
        "/opt/ncu",
        *("--config-file", "off"),
        *("--replay-mode", "kernel"),
        *("--cache-control", "none"),
        *("--clock-control", "none"),
        *("--import-sass", "no"),
        "--nvtx",
        *("--nvtx-include", "regex:dpbench@.*"),
        "--metrics",
        "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,gpu__time_duration.sum",
        "--force-overwrite",
        *("--export", "reports/1b-fp32/kernels/report_dpsgd_bs8_seq256.ncu-rep"),
    ]


def asked_on(chip: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The counters that ncu is asked for on a chip."""
    card = Gpu("GPU-0", "a card", 10**9, "580", chip)
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [card])
    [kernels] = choose(["ncu_kernels"], Settings(own={"ncu_path": sys.executable}))
    assert isinstance(kernels, NcuKernels)
    command = kernels.profiler_command(CASE)
    return command[command.index("--metrics") + 1]


def test_a_chip_is_asked_for_its_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_on("GB202", monkeypatch) == (
        "dram__bytes_op_read.sum,dram__bytes_op_write.sum,lts__t_bytes.sum,gpu__time_duration.sum"
    )
    with pytest.raises(ConfigurationError, match="GB10B has no counters for dram_read_bytes, dram"):
        asked_on("GB10B", monkeypatch)


def test_phases_are_chosen_by_the_names_of_their_ranges() -> None:
    """This option, and no other, may be given twice."""
    instrument = NcuKernels(Path("r"), steps=Steps(1, 2), phases=("clip", "noise"))
    command = instrument.profiler_command(CASE)
    filters = [command[i + 1] for i, text in enumerate(command) if text == "--nvtx-include"]
    assert filters == [f"dpbench@{step}.{p}" for step in (0, 1) for p in ("clip", "noise")]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A report directory with what a run of the tiny dpsgd case leaves."""
    unpacked("kernels/report_dpsgd_bs4_seq64.ncu-rep", tmp_path)
    ranges = RANGES / "report_dpsgd_bs4_seq64.ncu-rep"
    (tmp_path / "tiny-fp32" / ranges.name).write_bytes(ranges.read_bytes())
    return tmp_path


@pytest.mark.parametrize(("phases", "nothing"), [((), False), (("clip",), False), (("x",), True)])
def test_the_report_of_ranges_says_whether_phases_launch_kernels(
    directory: Path, phases: tuple[str, ...], nothing: bool
) -> None:
    assert NcuKernels(directory, phases=phases).nothing_to_profile(TINY) is nothing
    assert not NcuKernels(directory / "empty", phases=phases).nothing_to_profile(TINY)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kernels_phase": ["cake"]}, "unknown phase 'cake'; choose from forward"),
        ({"kernels_phase": ["clip", ""]}, "--ncu-kernels-phase '' names no phase"),
    ],
)
def test_bad_values_are_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose([], Settings(of_pytest=True, own={"ncu_path": sys.executable}, **said))
