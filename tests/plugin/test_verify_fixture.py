"""The fixture ``verify``, as a project that has a private trainer of its own can use it."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite


def test_it_fails_the_test_of_a_trainer_that_does_otherwise(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        import pytest
        from dpbench import Case, DPSGDTrainer, DpbenchError

        SMALL = {"seq_len": 4, "model_size": "50x16x1x2"}

        class HalfTheNoise(DPSGDTrainer):
            def __init__(self, model, *, noise_multiplier=1.0, **options):
                super().__init__(model, noise_multiplier=noise_multiplier / 2, **options)

        def test_right(verify):
            layer = {"layer": "linear", "width": 8, "length": 3}
            checks = verify("fused", workload="layer", set=layer, device="cpu")
            assert len(checks) == 22 and all(check.passed for check in checks)

        def test_wrong(verify):
            case = Case(f"{__name__}:HalfTheNoise", 2, **SMALL)
            verify(case, device="cpu", optimizer="momentum")

        def test_refused(verify):
            with pytest.raises(DpbenchError, match="unknown field of a case 'seqlen'"):
                verify("dpsgd", seqlen=4)
        """
    )
    result = project()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "verify HalfTheNoise-bs2-seq4-50x16x1x2-fp32-*momentum*",
            "noise: deviation * FAILED * 0.* σC/B*",
            "noise: deviation: head.weight: 0.* times the deviation σC/B (σ = 10000, C = 0.7)",
        ]
    )
