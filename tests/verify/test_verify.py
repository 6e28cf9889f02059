"""Right private trainers pass verify, and each fault of wrong ones is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dpbench.commands.cli import main
from dpbench.commands.verify import run_checks
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.registry import resolve
from dpbench.verify.check_result import Check

FAULTY = "tests.verify.faulty"
TINY: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "model_size": "50x64x1x2"}
SMALL = "num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=4"
LLAMA = f"hf-causal-lm:model_type=llama,{SMALL},vocab_size=60,seq_len=6"
RESNET = "resnet:depth=18,image_size=32,classes=10"
PRIVATE = [
    "dpsgd",
    "dpsgd:clip=per_layer",
    "dpsgd:grad_sample=functorch",
    "dpsgd:grad_sample=ew",
    "dpsgd_ghost",
    "dpsgd_fgc",
    "fused:graphs=false,kernels=false",
    "fused",
]
QUICK = ["dpsgd", "dpsgd_ghost", "fused"]


CORRELATED = (
    "fused:noise=banded,bands=4",
    "dpsgd:noise=banded,bands=4",
)


def slow(*cases: Any) -> list[Any]:
    """Parameters that only ``--slow`` tries; each tuple is one."""
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*each, marks=pytest.mark.slow) for each in several]


def checks_of(trainer: str, *, device: str = "cpu", **axes: Any) -> list[Check]:
    usual = {"batch_size": 4} if "workload" in axes else TINY
    return run_checks(resolve(Case(trainer, **({"micro_batches": 2} | usual | axes))), device)


def own(name: str, **axes: Any) -> list[Check]:
    return checks_of(f"{FAULTY}:{name}", **axes)


def wrong(checks: list[Check]) -> dict[str, list[str]]:
    return {check.name: list(check.wrong) for check in checks if not check.passed}


def unexpected(trainer: str, checks: list[Check]) -> dict[str, list[str]]:
    """What is wrong, except that Opacus's ghost norms cancel, which is known."""
    known = {"tokens alike"} if trainer.startswith(("dpsgd_ghost", "dpsgd_fgc")) else set()
    return {name: lines for name, lines in wrong(checks).items() if name not in known}


def all_wrong(checks: list[Check]) -> list[str]:
    return [line for lines in wrong(checks).values() for line in lines]


def of_gradients(checks: list[Check]) -> list[str]:
    """What is wrong with gradients at σ = 0."""
    return [line for check in checks if check.name.startswith("gradient") for line in check.wrong]


# --- what passes ---------------------------------------------------------------------------------


@pytest.mark.repeats
@pytest.mark.parametrize(
    "trainer",
    [*QUICK, *slow(*(each for each in PRIVATE if each not in QUICK))],
)
def test_built_in_private_trainers_pass_on_the_transformer(trainer: str) -> None:
    assert not unexpected(trainer, checks_of(trainer))


@pytest.mark.parametrize("trainer", [each for each in PRIVATE if not each.endswith("=ew")])
def test_they_pass_on_a_llama(trainer: str) -> None:
    pytest.importorskip("transformers")
    assert not unexpected(trainer, checks_of(trainer, workload=LLAMA))


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", PRIVATE)
def test_they_pass_on_a_resnet(trainer: str) -> None:
    assert not unexpected(trainer, checks_of(trainer, workload=RESNET, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("trainer", [*PRIVATE, *CORRELATED])
def test_they_pass_on_a_gpu(trainer: str, precision: str) -> None:
    assert not unexpected(trainer, checks_of(trainer, precision=precision, device="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [*PRIVATE, "micro_batch"])
def test_they_pass_with_poisson_batches(trainer: str) -> None:
    checks = checks_of(trainer, sampling="poisson")
    assert not unexpected(trainer, checks)
    sizes = [c.name for c in checks if c.name.startswith("gradient sampled")]
    assert sizes == [f"gradient sampled {n}, half clipped" for n in (0, 1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SkipsEmpty", "noise: deviation: token_embedding.weight: no noise"),
        ("DividesBySampled", "token_embedding.weight: 4 times the mean of gradients clipped flat"),
    ],
)
def test_what_is_wrong_with_poisson_batches_is_named(name: str, said: str) -> None:
    found = wrong(own(name, sampling="poisson"))
    assert said in "; ".join(f"{c}: {line}" for c, lines in found.items() for line in lines)
    assert not wrong(own(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Looped", "WithoutClosure", "ByLayer"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_right_trainer_of_ones_own_passes(name: str, optimizer: str) -> None:
    assert not wrong(own(name, optimizer=optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "axes"),
    [
        ("fused", {"optimizer": "momentum"}),
        ("fused", {"trainable": "lora:2", "optimizer": "adamw"}),
        ("fused", {"activation_checkpointing": "on", "optimizer": "torch.optim:RMSprop"}),
        ("fused", {"trainable": "*.bias", "micro_batches": 1}),
        ("dpsgd_ghost", {"trainable": "lora:2", "optimizer": "adamw"}),
        ("dpsgd", {"activation_checkpointing": "on"}),
        ("fused", {"precision": "bf16"}),
        pytest.param(
            "dpsgd_fgc",
            {"precision": "bf16"},
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="PyTorch's CPU ends noise in bf16 at 3.3 σ"
            ),
        ),
        ("fused", {"precision": "bf16-amp"}),
    ],
    ids=str,
)
def test_they_pass_with_other_optimizers_precisions_and_parameters(
    trainer: str, axes: dict[str, Any]
) -> None:
    assert not unexpected(trainer, checks_of(trainer, **axes))


def test_the_reference_is_in_float32_where_the_model_has_to_be() -> None:
    first, *others = checks_of("dpsgd", workload=f"{FAULTY}:OnlyFloat32")
    assert "float32, because float64 fails: " in first.error_text
    assert not wrong(others)


def test_small_parameters_are_judged_by_more_steps() -> None:
    case = "layer:layer=layernorm,width=2,length=3"
    assert not wrong(checks_of("fused", workload=case))


def test_losses_that_are_made_of_gradients_are_verified() -> None:
    assert not wrong(checks_of("micro_batch", workload="tests.verify.right:Penalty"))


# --- gradients that differ -----------------------------------------------------------------------

CLIPPED = "times the mean of gradients clipped flat"


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("name", "axes", "said"),
    [
        ("GhostThatDiffers", {}, "token_embedding.weight: off by 0.0"),
        ("MeanOfParts", {"optimizer": "momentum"}, f"0.5 {CLIPPED}"),
        ("ByLayerCalledFlat", {}, "the mean of gradients clipped per layer"),
        ("ByBatch", {}, "the mean of micro-batches' gradients, clipped"),
        ("LeavesOneOut", {"optimizer": "adamw"}, "head.weight: does not move"),
        ("AccumulatesForEver", {}, "token_embedding.weight: from step 2 on, off by"),
        ("ClipsWithoutNoise", {}, "the mean of gradients that are not clipped"),
        *slow(
            ("MeanOfParts", {}, f"0.5 {CLIPPED}"),
            ("MeanOfParts", {"micro_batches": 4}, f"0.25 {CLIPPED}"),
            ("WrongBatchSize", {}, f"2 {CLIPPED}"),
            ("ByBatch", {"micro_batches": 1}, "the batch's gradient, clipped as one"),
            ("LeavesOneOut", {}, "head.weight: does not move"),
            ("NotFinite", {}, "not finite"),
            ("NoiseInstead", {}, "token_embedding.weight: off by 1 of its norm"),
        ),
    ],
    ids=str,
)
def test_a_gradient_that_differs_is_named_with_what_it_is(
    name: str, axes: dict[str, Any], said: str
) -> None:
    assert said in "\n".join(all_wrong(own(name, **axes)))


def test_only_the_parameters_that_differ_are_named() -> None:
    checks = own("AdaptersUnclipped", trainable="lora:2")
    lines = of_gradients(checks)
    assert "the mean of gradients that are not clipped" in lines[0]
    assert {line.partition(":")[0].endswith("up.weight") for line in lines} == {True}
    names = {check.name for check in checks if check.verdict == "FAILED"}
    assert {"gradient, half clipped", "gradient in 2 parts, all clipped"} <= names


def test_a_frozen_parameter_that_changes_is_named() -> None:
    lines = wrong(own("TrainsWhatIsFrozen", trainable="*.bias"))["frozen parameters stay"]
    assert "head.weight: is frozen, but changes" in lines


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", *slow("bf16-amp")])
def test_faults_are_seen_beside_the_rounding_of_16_bits(precision: str) -> None:
    lines = of_gradients(own("AdaptersUnclipped", trainable="lora:2", precision=precision))
    assert lines
    assert all("up.weight" in line for line in lines)


# --- noise that differs --------------------------------------------------------------------------


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        ("HalfTheNoise", "noise: deviation", "0.5"),
        ("OneParameterWithoutNoise", "noise: deviation", "final_norm.bias: no noise"),
        ("UniformNoise", "noise: distribution", "differs from the normal one by"),
        ("NoiseOfRows", "noise: elements", "head.weight: the noise repeats after 64 elements"),
        (
            "NoiseOfParameters",
            "noise: parameters, steps, runs",
            " correlates with that of position_embedding",
        ),
        ("NoiseOfSteps", "noise: parameters, steps, runs", "its noise in step 2 (σ = 10000, C"),
        ("NoiseOfRuns", "noise: parameters, steps, runs", "its noise in step 1 (σ = 10000, C"),
        *slow(
            ("NoiseTwice", "noise: deviation", "1.4"),
            ("NoiseTwiceOfOne", "noise: deviation", "final_norm.bias: 1."),
            ("NoiseWithoutThreshold", "noise: deviation", "head.weight: 1.4"),
        ),
    ],
)
def test_noise_that_differs_is_named_and_is_no_other_fault(
    name: str, check: str, said: str
) -> None:
    checks = own(name)
    found = wrong(checks)
    assert said in "\n".join(found[check])
    assert all(check.startswith("noise") for check in found)
    if name == "HalfTheNoise":  # what cannot be judged is no pass
        [judged] = [each for each in checks if each.name == "noise: distribution"]
        assert (judged.verdict, judged.passed) == ("not judged", False)


@pytest.mark.slow
def test_noise_that_repeats_in_another_process_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    axes = ["--batch-size=4", "--seq-len=8", "--model-size=50x64x1x2", "--device=cpu"]
    assert main(["verify", f"--trainer={FAULTY}:NoiseOfProcesses", *axes]) == 1
    said = capfd.readouterr().out
    assert "gradient" not in "".join(re.findall("^.*FAILED", said, re.MULTILINE))
    assert "correlates with that in step" in said
    assert "noise: parameters, steps, runs, processes: head.weight: its noise in step" in said


BANDED = "noise=banded,bands=4"


@pytest.mark.repeats
@pytest.mark.parametrize(
    "trainer",
    ["dpsgd", "fused", *slow("dpsgd_fgc", "micro_batch", f"{FAULTY}:Banded")],
)
def test_noise_that_is_correlated_over_steps_passes_as_what_it_says(trainer: str) -> None:
    assert not unexpected(trainer, checks_of(f"{trainer}:{BANDED}", micro_batches=1))


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        ("IndependentCalledBanded", "noise: parameters, steps, runs", "in step 2"),
        ("BandDropped", "noise: parameters, steps, runs", "in step 4"),
        *slow(
            ("WeightsShifted", "noise: parameters, steps, runs", "in step 2"),
            ("OneSeedForAllSteps", "noise: parameters, steps, runs", "in step 2"),
            ("BandedWithoutSensitivity", "noise: deviation", "0.7"),
        ),
    ],
)
def test_other_weights_than_a_trainer_says_are_named(name: str, check: str, said: str) -> None:
    checks = checks_of(f"{FAULTY}:{name}:{BANDED}", micro_batches=1)
    assert said in "\n".join(wrong(checks)[check])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "axes", "said"),
    [
        ("standard", {}, "trainer standard clips nothing and adds no noise"),
        (f"{FAULTY}:Unlabelled", {}, "clips nothing and adds no noise"),
        (f"{FAULTY}:SaysNothing", {}, "unknown label clips of trainer SaysNothing 'per block'"),
        ("dpsgd:max_grad_norm=0.5", {}, "verify chooses max_grad_norm"),
        (
            "fused",
            {"workload": "layer:layer=lstm,width=64,length=5"},
            "one parameter of sev",
        ),
        ("dpsgd_ghost", {"precision": "fp16-amp"}, "use bf16-amp"),
        (f"{FAULTY}:OwnOptimizer", {"optimizer": "adamw"}, "does not call plain_optimizer.step"),
    ],
)
def test_what_there_is_nothing_to_verify_of_is_refused_in_the_trainers_words(
    trainer: str, axes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        checks_of(trainer, **axes)


def test_a_model_whose_losses_are_random_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="losses of a batch change each time"):
        checks_of("dpsgd", workload=f"{FAULTY}:Random")


def test_a_trainer_that_fails_is_named_with_its_error() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(DpbenchError, match="trainer dpsgd:grad_sample=ew failed: TypeE"):
        checks_of("dpsgd:grad_sample=ew", workload=LLAMA)


@pytest.mark.slow
def test_the_seed_of_whoever_asks_stays_as_it_was() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    checks_of("fused")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("trainer", ["dpsgd_ghost", "dpsgd_fgc"])
def test_a_weight_that_is_used_by_hand_is_told_from_one_that_is_not_used(trainer: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"found no per-sample gradient .* call the layer itself"
    ) as by_hand:
        checks_of(trainer, workload="tests.verify.right:ByHand")
    assert by_hand.value.exit_code == 2
    with pytest.raises(ConfigurationError, match="the loss does not depend on it") as unused:
        checks_of(trainer, workload="tests.verify.right:ByHand:unused=true")
    assert unused.value.exit_code == 2


def test_a_weight_that_is_used_by_hand_is_refused_and_one_that_is_not_used_is_not() -> None:
    # Either is used by hand, and the first gradient is named.
    with pytest.raises(ConfigurationError, match=r"1\.(weight|bias) without a call of its layer"):
        checks_of("fused", workload="tests.verify.right:ByHand")
    checks = checks_of("fused", workload="tests.verify.right:ByHand:unused=true")
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.slow
def test_a_trainer_of_another_model_is_not_judged_by_a_layer_and_does_not_pass() -> None:
    [alike] = [check for check in own("LeavesOneOut") if check.name == "tokens alike"]
    assert (alike.verdict, alike.passed) == ("not judged", False)
    assert alike.wrong == ["trains no linear layer: 'head.weight'"]
