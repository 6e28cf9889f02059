"""The doctor on a real GPU: counters that are right, and roofs that a card can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ceilings import measure_ceilings
from dpbench.commands import doctor
from dpbench.commands.doctor import OK, READ, WORK, WRITTEN, Diagnosis
from dpbench.core.errors import ConfigurationError
from dpbench.core.gpu import visible_gpus
from dpbench.core.settings import Settings
from dpbench.results.roofline import Roofs, find_card

pytestmark = pytest.mark.gpu


@pytest.fixture
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if not request.config.getoption("--ncu"):
        pytest.skip("runs under Nsight Compute: --ncu")
    return Settings(ncu_dir=tmp_path, own={"ncu_path": request.config.getoption("--ncu-path")})


def all_is_right(found: list[Diagnosis]) -> None:
    """Both findings are, and they are about every metric of every work, the L2's too."""
    assert [finding.status for finding in found] == [OK] * 2, found
    judged = {(line["work"], line["metric"]) for line in found[1].counted}
    assert judged >= {(work, m) for work, *_ in WORK.values() for m in (*READ, *WRITTEN)}


def test_work_of_known_size_is_counted_by_every_metric_and_rightly(setup: Settings) -> None:
    all_is_right(list(doctor.counters(setup)))


def test_cupti_counts_known_work_and_nothing_while_the_gpu_rests(tmp_path: Path) -> None:
    all_is_right(list(doctor.cupti(Settings(ncu_dir=tmp_path))))


def card() -> Roofs:
    try:
        return find_card(visible_gpus()[0].name)
    except ConfigurationError:
        pytest.skip("this card is not in the table")


def test_measured_ceilings_lie_below_the_data_sheet_and_not_far() -> None:
    sheet = card()
    measured = measure_ceilings()
    assert 0.6 < measured["bandwidth"] / sheet.bandwidth < 1.02
    for precision in sheet.flops.keys() & measured["flops"].keys():
        assert 0.4 < measured["flops"][precision] / sheet.flops[precision] < 1.05, precision


def test_a_message_to_another_gpu_is_counted_by_nvml(tmp_path: Path) -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("this process sees one GPU")
    [finding] = doctor.links(Settings(ncu_dir=tmp_path))
    assert finding.status == OK or "not counted: NVML says" in finding.detail, finding
