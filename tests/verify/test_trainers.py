"""``dpbench verify``: right trainers pass, and wrong ones fail the check that names the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpbench.child.build import pick_device
from dpbench.commands.cli import main
from dpbench.commands.verify import run_checks
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.registry import TRAINERS, resolve
from dpbench.verify.check_result import Check
from dpbench.verify.trainer_checks import (
    SHAPES,
    _examples_alike,
    _not_finite,
    layer_case,
    verification_of,
    verify,
)
from tests.verify import trainers

CPU = pick_device("cpu")
OWN = trainers.__name__
SMALL: dict[str, Any] = {
    "batch_size": 4,
    "micro_batches": 2,
    "workload": "tests.verify.over_ranks:Small",
}
TRANSFORMER = {"workload": "transformer", "seq_len": 8, "model_size": "50x64x1x2"}
SHAPE = "num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=4"
LLAMA = f"hf-causal-lm:model_type=llama,{SHAPE},vocab_size=60,seq_len=6"
RESNET = "resnet:depth=18,image_size=32,classes=10"
PLAIN = "fused:graphs=false,kernels=false"
BANDED = "noise=banded,bands=4"
PRIVATE = [
    *(name for name in TRAINERS if name != BASELINE_TRAINER),
    "dpsgd:clip=per_layer",
    "dpsgd:grad_sample=functorch",
    "dpsgd:grad_sample=ew",
    PLAIN,
]


GHOST = ("tokens alike", "layer added later")
"""Checks that Opacus's fast gradient clipping or ghost clipping is known to fail."""


def slow(cases: Any, *quick: Any) -> list[Any]:
    """Parameters of which only those in ``quick`` run without ``--slow``."""
    mark = pytest.mark.slow
    return [c if c in quick else pytest.param(*_parameters(c), marks=mark) for c in cases]


def _parameters(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def case_of(trainer: str, **axes: Any) -> Case:
    usual = {"batch_size": 4, "micro_batches": 2} if "workload" in axes else SMALL
    return resolve(Case(trainer, **usual | axes))


def failures(checks: Any) -> list[str]:
    """What is wrong, as lines that begin with the check."""
    return [f"{check.name}: {line}" for check in checks for line in check.wrong]


def on_the_model(trainer: str, **axes: Any) -> list[Check]:
    """The checks of a trainer, without those on a linear layer."""
    with torch.random.fork_rng([]):
        return [*verification_of(case_of(trainer, **axes), CPU).checks(())]


def everywhere(trainer: str, **axes: Any) -> list[str]:
    """What is wrong, except what is known of Opacus."""
    found = failures(verify(case_of(trainer, **axes), "cpu"))
    known = GHOST * trainer.startswith(("dpsgd_ghost", "dpsgd_fgc"))
    known += ("examples alike",) * trainer.startswith("dpsgd")  # Opacus sums in 16 bits
    return [line for line in found if not line.startswith((*known, "-"))]


# --- wrong ---------------------------------------------------------------------------------------

ON_THE_LAYER = ("240 steps", "60 steps", "norms not finite", "layer added later")
"""Names of checks that only a linear layer has."""


@pytest.mark.parametrize(
    "name",
    slow(
        trainers.WRONG,
        *("HalfTheNoise", "Uniform", "OfHalf", "OneRow", "FirstForEver", "SigmaOfTwoDecimals"),
        *("Unclipped", "ThrownAwayWithNoise", "MiddlePartUnclipped", "Stats", "SecondMomentRaw"),
        *("SkipsEmpty", "MeanOfParts", "LeavesOneOut", "HundredthWeak", "EachFromFiftieth"),
        *("OfOneForward", "ByBackward"),
        *("SeedsTorch", "SeedByDefault"),
    ),
)
def test_a_wrong_trainer_fails_the_check_that_names_the_fault(name: str) -> None:
    fails, trainer, axes = trainers.WRONG[name], f"{OWN}:{name}", trainers.AXES[name]
    if any(check in fails for check in ON_THE_LAYER):
        found = everywhere(trainer, **axes)
    else:
        found = failures(on_the_model(trainer, **axes))
    assert fails in "\n".join(found)
    assert found


def test_noise_that_is_wrong_is_no_fault_of_gradients_and_no_pass_where_it_is_not_judged() -> None:
    checks = on_the_model(f"{OWN}:HalfTheNoise")
    assert all(line.startswith("noise: ") for line in failures(checks))
    [judged] = [check for check in checks if check.name == "noise: distribution"]
    assert (judged.verdict, judged.passed) == ("not judged", False)


@pytest.mark.parametrize("precision", slow(("fp32", "bf16", "bf16-amp"), "fp32"))
def test_only_the_parameters_that_differ_are_named(precision: str) -> None:
    checks = on_the_model(f"{OWN}:AdaptersUnclipped", trainable="lora:2", precision=precision)
    found = [line for line in failures(checks) if line.startswith("gradient")]
    assert found
    assert all("up.weight: " in line for line in found)
    if precision == "fp32":
        assert "gradient, half clipped: " in found[0]
        assert "the mean of gradients that are not clipped" in found[0]


def test_correlated_noise_is_judged_in_no_more_steps_than_it_was_scaled_for() -> None:
    assert not failures(on_the_model("fused:noise=banded,bands=2,noise_steps=3"))


def test_a_frozen_parameter_that_changes_is_named() -> None:
    found = failures(on_the_model(f"{OWN}:TrainsWhatIsFrozen", trainable="*.bias"))
    assert "frozen parameters stay: head.weight: is frozen, but changes" in found


@pytest.mark.parametrize("name", slow(trainers.BANDED, "IndependentCalledBanded"))
def test_other_weights_than_a_trainer_says_are_named(name: str) -> None:
    # The correlation with the fourth step before is small, and shows in many elements only.
    axes = TRANSFORMER if name == "BandDropped" else {}
    found = failures(on_the_model(f"{OWN}:{name}:{BANDED}", **axes, micro_batches=1))
    assert trainers.BANDED[name][0] in "\n".join(found)


@pytest.mark.slow
def test_noise_that_repeats_in_another_process_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    axes = ["--batch-size=4", "--seq-len=8", "--model-size=50x64x1x2", "--device=cpu"]
    assert main(["verify", f"--trainer={OWN}:NoiseOfProcesses", *axes]) == 1
    said = capfd.readouterr().out
    assert "noise: parameters, steps, runs, processes: head.weight: its noise in step" in said


@pytest.mark.slow
def test_what_begins_right_may_be_wrong_beside_it() -> None:
    for name in ("SkipsEmpty", "DividesBySampled"):
        assert not everywhere(f"{OWN}:{name}")


# --- right ---------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 1},
    {"trainable": "lora:2", "optimizer": "adamw"},
    {"optimizer": "momentum", "micro_batches": 4},
    {"activation_checkpointing": "on", "optimizer": "torch.optim:RMSprop"},
    {"sampling": "poisson"},
    {"trainable": "*.bias"},
    {"precision": "bf16"},
    {"precision": "bf16-amp"},
]
OTHER_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {"batch_size": 6, "micro_batches": 3}),
    ("dpsgd", {"batch_size": 1, "micro_batches": 1}),
    ("dpsgd", {"workload": "layer:layer=layernorm,width=2,length=3"}),
    ("dpsgd", {"workload": "layer:layer=conv,width=8,length=6"}),
    ("fused", {"workload": "layer:layer=groupnorm"}),
    ("fused", {"workload": "layer:layer=layernorm,width=2,length=3"}),
    ("micro_batch", {"workload": f"{OWN}:Penalty"}),
    ("fused", {"workload": f"{OWN}:ByHand:unused=true"}),
    *((f"{name}:{BANDED}", {"micro_batches": 1}) for name in ("fused", "dpsgd", "dpsgd_fgc")),
    (f"{OWN}:Banded:{BANDED}", {"micro_batches": 1}),
    *((f"{OWN}:{name}", trainers.AXES.get(name, {})) for name in trainers.RIGHT),
    *(
        (f"{OWN}:{name}", {"optimizer": optimizer})
        for name in ("Looped", "WithoutClosure", "ByLayer")
        for optimizer in ("momentum", "adamw")
    ),
    *((f"{OWN}:{name}", {}) for name in ("Looped", "ByVmap", "AccumulatesInGrad")),
    *((f"{OWN}:{name}", {}) for name in ("RefusesNaN", "LeavesNaNOut", "MeanOfNoisyParameters")),
]


@pytest.mark.parametrize(
    ("trainer", "axes"),
    slow(
        [(name, axes) for name in PRIVATE for axes in SETTINGS] + OTHER_SETTINGS,
        ("fused", {"trainable": "lora:2", "optimizer": "adamw"}),
    ),
    ids=str,
)
def test_a_right_trainer_passes(trainer: str, axes: dict[str, Any]) -> None:
    if trainer.startswith("dpsgd") and torch.__version__ < "2.12" and "precision" in axes:
        pytest.skip("PyTorch's CPU ends noise in bf16 at 3.3 σ")
    if trainer.startswith(OWN) and trainer.partition(":")[2] in trainers.RIGHT:
        axes = {**axes, "micro_batches": 2}
    assert not everywhere(trainer, **axes)


def test_what_the_optimizer_receives_is_judged_where_parameters_also_move_otherwise() -> None:
    assert not failures(on_the_model(f"{OWN}:DecayBefore"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DecayBefore", "Master"])
def test_another_process_judges_the_movement_in_the_same_way(name: str) -> None:
    assert not failures(verify(case_of(f"{OWN}:{name}"), "cpu", processes=True))


@pytest.mark.parametrize("trainer", slow(PRIVATE, "fused"))
def test_built_in_private_trainers_pass_on_a_transformer(trainer: str) -> None:
    assert not failures(on_the_model(trainer, **TRANSFORMER))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", PRIVATE)
def test_they_pass_on_a_llama(trainer: str) -> None:
    pytest.importorskip("transformers")
    if trainer.endswith("=ew"):
        with pytest.raises(DpbenchError, match="trainer dpsgd:grad_sample=ew failed: TypeE"):
            run_checks(case_of(trainer, workload=LLAMA), "cpu")
    else:
        assert not failures(on_the_model(trainer, workload=LLAMA))


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", slow(PRIVATE, "dpsgd", "dpsgd_ghost", "fused"))
def test_they_pass_on_a_resnet_on_a_gpu(trainer: str) -> None:
    found = failures(verify(case_of(trainer, workload=RESNET), "cuda"))
    assert not [line for line in found if not line.startswith(GHOST)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("trainer", [*PRIVATE, f"fused:{BANDED}", f"dpsgd:{BANDED}"])
def test_they_pass_on_a_gpu(trainer: str, precision: str) -> None:
    parts = 1 if BANDED in trainer else 2
    found = failures(verify(case_of(trainer, precision=precision, micro_batches=parts), "cuda"))
    known = GHOST * trainer.startswith(("dpsgd_ghost", "dpsgd_fgc"))
    known += ("examples alike",) * trainer.startswith("dpsgd")
    assert not [line for line in found if not line.startswith((*known, "-"))]


def test_poisson_batches_of_other_sizes_are_checked_and_no_seed_is_left() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    checks = verify(case_of("dpsgd", sampling="poisson"), "cpu")
    assert not failures(checks)
    assert torch.equal(before, torch.random.get_rng_state())
    sizes = [c.name for c in checks if c.name.startswith("gradient sampled")]
    assert sizes == [f"gradient sampled {n}, half clipped" for n in (0, 1, 5)]


@pytest.mark.parametrize(
    ("trainer", "precision"),
    slow(
        [("dpsgd_ghost", "fp32"), ("dpsgd_ghost", "bf16"), ("dpsgd_fgc", "bf16")],
        ("dpsgd_ghost", "fp32"),
    ),
)
def test_ghost_clipping_of_opacus_fails_what_is_known(trainer: str, precision: str) -> None:
    found = failures(verify(case_of(trainer, precision=precision), "cpu"))
    others = {"examples alike"} if precision == "bf16" else set()
    assert {line.partition(":")[0] for line in found} == {*GHOST, *others}


@pytest.mark.parametrize(
    ("trainer", "fails"),
    [(f"{OWN}:Looped", True), (f"{OWN}:SumsInFloat32", False), ("fused", False), ("dpsgd", True)],
)
def test_a_sum_in_16_bits_fails_examples_that_are_alike(trainer: str, fails: bool) -> None:
    layer = verification_of(layer_case(case_of(trainer, precision="bf16"), *SHAPES[0]), CPU)
    with torch.random.fork_rng([]):
        assert _examples_alike("alike", layer).passed is not fails


@pytest.mark.parametrize(("trainer", "noted"), [("dpsgd", True), ("fused", False)])
def test_an_example_that_makes_parameters_no_numbers_is_noted(trainer: str, noted: bool) -> None:
    layer = verification_of(layer_case(case_of(trainer), *SHAPES[0]), CPU)
    with torch.random.fork_rng([]):
        assert [check.verdict for check in _not_finite("", layer)] == ["ok", *["note"] * noted]


def test_the_reference_is_in_float32_where_the_model_has_to_be() -> None:
    first, *others = on_the_model("dpsgd", workload=f"{OWN}:OnlyFloat32")
    assert "float32, because float64 fails: " in first.error_text
    assert not failures(others)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "axes", "said"),
    [
        ("standard", {}, "trainer standard clips nothing and adds no noise"),
        (f"{OWN}:Unlabelled", {}, "clips nothing and adds no noise"),
        (f"{OWN}:SaysNothing", {}, "unknown label clips of trainer SaysNothing 'per block'"),
        ("dpsgd:max_grad_norm=0.5", {}, "verify chooses max_grad_norm"),
        (f"{OWN}:OwnOptimizer", {"optimizer": "adamw"}, "does not call plain_optimizer.step"),
        ("dpsgd", {"workload": f"{OWN}:Random"}, "losses of a batch change each time"),
        (
            f"{OWN}:OfOneForward",
            {"workload": f"{OWN}:Mixes:length=1"},
            "does not run with one example .*no trainer can be verified on this model",
        ),
        ("dpsgd_ghost", {"workload": f"{OWN}:ByHand"}, r"no per-sample gr.* call the layer itself"),
        ("dpsgd_fgc", {"workload": f"{OWN}:ByHand:unused=true"}, "loss does not depend on it"),
        ("fused", {"workload": f"{OWN}:ByHand"}, r"1\.(weight|bias) without a call of its layer"),
    ],
)
def test_what_there_is_nothing_to_verify_of_is_refused_in_the_trainers_words(
    trainer: str, axes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        run_checks(case_of(trainer, **axes), "cpu")
    assert refused.value.exit_code == 2


@pytest.mark.slow
def test_a_trainer_of_another_model_is_not_judged_by_a_layer_and_does_not_pass() -> None:
    checks = verify(case_of(f"{OWN}:LeavesOneOut"), "cpu")
    [alike] = [check for check in checks if check.name == "tokens alike"]
    assert (alike.verdict, alike.passed) == ("not judged", False)
    assert alike.wrong == ["trains no linear layer: 'head.weight'"]
