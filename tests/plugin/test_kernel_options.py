"""Bad values for what goes with ``--ncu-kernels``."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite


@pytest.mark.slow
def test_a_phase_in_which_a_trainer_launches_nothing_is_no_failure(project: RunSuite) -> None:
    result = project("-n0", "--ncu-kernels-phase=clip")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            "dpsgd-bs4-*: bytes by kernel*",
            "standard-bs4-*: no kernel ran in clip.",
        ]
    )


def test_kernels_without_ncu_are_a_usage_error(project: RunSuite) -> None:
    result = project("--ncu-kernels", replayed=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: dpbench: --ncu-kernels requires an instrument*"])
