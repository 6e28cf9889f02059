"""Reading real kernel-replay reports, and accounting for every kernel in them."""

from __future__ import annotations

import lzma
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.case import OUTSIDE, Case
from dpbench.instruments.counters import CounterUnknown
from dpbench.instruments.ncu.report import (
    ForeignReport,
    KernelReport,
    NothingProfiled,
    ReportUnreadable,
    kernels_of,
    load_actions,
    phase_of,
    read,
    read_kernels,
)
from tests.recorded import RANGES, unpacked

STANDARD, DPSGD = (f"kernels/report_{t}_bs4_seq64.ncu-rep" for t in ("standard", "dpsgd"))
CLIP = "kernels/clip/report_dpsgd_bs4_seq64.ncu-rep"


@pytest.fixture(scope="module")
def dpsgd_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(DPSGD, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def dpsgd(dpsgd_path: Path) -> KernelReport:
    return read_kernels(dpsgd_path)


def edited(name: str, old: bytes, new: bytes, directory: Path) -> Path:
    """A recorded report in which one string is another of the same length."""
    assert len(old) == len(new)
    path = directory / "edited.ncu-rep"
    whole = lzma.decompress((RANGES / f"{name}.xz").read_bytes())
    assert old in whole
    path.write_bytes(whole.replace(old, new))
    return path


def test_a_launch_says_what_where_and_how_much(dpsgd: KernelReport) -> None:
    assert dpsgd.device == "NVIDIA H200"
    last = dpsgd.launches[-1]
    assert (last.repeat, last.phase) == (0, "optimizer")
    assert last.name.startswith("void at::native::<unnamed>::multi_tensor_apply_kernel<")
    assert "BinaryOpListAlphaFunctor<float" in last.name
    assert last.l2_bytes > last.read_bytes >= 0
    assert 1e-6 < last.seconds < 1e-3


def test_numbers_are_those_that_nsight_compute_saved(dpsgd: KernelReport, dpsgd_path: Path) -> None:
    import ncu_report

    [profiled] = ncu_report.load_report(str(dpsgd_path))
    for position in (0, 100, 467):
        action, launch = profiled.action_by_idx(position), dpsgd.launches[position]
        assert action["dram__bytes_read.sum"].value() == launch.read_bytes
        assert action["dram__bytes_write.sum"].value() == launch.write_bytes
        assert action["lts__t_bytes.sum"].value() == launch.l2_bytes
        assert action["gpu__time_duration.sum"].unit() == "ns"
        assert action["gpu__time_duration.sum"].value() == pytest.approx(1e9 * launch.seconds)


def test_an_error_keeps_its_words_and_its_remedy_on_the_way_to_another_process() -> None:
    error = CounterUnknown(
        "x.ncu-rep: the report does not contain the counter cake", log=Path("x.log")
    )
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), there.log) == (CounterUnknown, str(error), error.log)
    assert str(error).count(CounterUnknown.remedy) == 1


def test_a_filter_by_phase_leaves_the_other_kernels_out(
    dpsgd: KernelReport, tmp_path: Path
) -> None:
    clip = read_kernels(unpacked(CLIP, tmp_path))
    names = [launch.name for launch in dpsgd.launches if launch.phase == "clip"]
    assert [launch.name for launch in clip.launches] == names


def test_another_program_is_outside_every_phase(tmp_path: Path) -> None:
    """Recorded without NVTX: operators, losses and optimizers in float32 and bfloat16."""
    path = tmp_path / "another_program.ncu-rep"
    path.write_bytes(lzma.decompress((RANGES.parent / f"{path.name}.xz").read_bytes()))
    launches = read_kernels(path).launches
    assert Counter((each.repeat, each.phase) for each in launches) == {(0, OUTSIDE): 414}
    assert len(launches) == 414


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"dpbench", b"another"), (b"0.clip", b"0.cake")],
    ids=["other ranges", "of an unknown phase"],
)
def test_kernels_outside_every_phase_are_counted_and_not_dropped(
    old: bytes, new: bytes, dpsgd: KernelReport, tmp_path: Path
) -> None:
    found = read_kernels(edited(CLIP, old, new, tmp_path)).launches
    assert Counter(launch.phase for launch in found) == {OUTSIDE: 80}
    names = [launch.name for launch in dpsgd.launches if launch.phase == "clip"]
    assert [launch.name for launch in found] == names


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("3.clip", (3, "clip")),
        ("0.outside", (0, OUTSIDE)),
        ("end", (0, OUTSIDE)),
        ("x.clip", (0, OUTSIDE)),
        ("1.", (0, OUTSIDE)),
        (None, (0, OUTSIDE)),
    ],
)
def test_the_phase_is_read_off_the_range(name: str | None, place: tuple[int, str]) -> None:
    assert phase_of(name) == place


def test_a_missing_counter_is_an_error_and_never_a_zero(tmp_path: Path) -> None:
    path = edited(STANDARD, b"lts__t_bytes.sum", b"lts__t_cakes.sum", tmp_path)
    with pytest.raises(CounterUnknown, match=r"lts__t_bytes\.sum"):
        read_kernels(path)


def test_counters_are_read_by_the_names_that_a_chip_has(dpsgd_path: Path) -> None:
    """A report of GB202, made from one of GH100: only the two names differ."""

    class Gb202:
        def __init__(self, action: Any) -> None:
            self.action = action

        def metric_by_name(self, name: str) -> Any:
            if name.startswith("dram__"):
                if "_op_" not in name:
                    return None
                name = name.replace("bytes_op_", "bytes_")
            return self.action.metric_by_name(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.action, name)

    actions = load_actions(dpsgd_path)[:20]
    as_gb202 = kernels_of([Gb202(action) for action in actions], dpsgd_path)
    assert as_gb202 == kernels_of(actions, dpsgd_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.9999])
def test_a_truncated_report_is_an_error(share: float, tmp_path: Path) -> None:
    """NVIDIA's library reads it as a report with fewer kernels, the last without metrics."""
    path = unpacked(CLIP, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(
        (ReportUnreadable, NothingProfiled), match=r"report_dpsgd.*\.ncu-rep.* report"
    ):
        read_kernels(path)
    if share >= 0.3:
        with pytest.raises(ReportUnreadable, match="the report is truncated"):
            read(path, Case("dpsgd", 4, 64, "tiny"))


def test_the_report_of_a_run_in_which_nothing_was_profiled_says_so() -> None:
    empty = RANGES.parent / "ncu_output" / "nothing.ncu-rep"
    with pytest.raises(NothingProfiled, match="contains no kernel"):
        read_kernels(empty)
    with pytest.raises(NothingProfiled, match="contains no range"):
        read(empty, Case("standard", 4, 64, "tiny"))


def test_reports_of_ranges_and_of_kernels_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(ForeignReport, match="ranges, not kernels"):
        read_kernels(RANGES / "report_standard_bs4_seq64.ncu-rep")
    kernels = unpacked(STANDARD, tmp_path)
    with pytest.raises(ForeignReport, match="kernels, not ranges"):
        read(kernels, Case("standard", 4, 64, "tiny"))
