"""A workload of one's own: named, built, trained and counted, and refused where it is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor

from dpbench import TRAINERS, WORKLOADS
from dpbench.advice.footprint import footprints
from dpbench.child.build import build, smoke_test
from dpbench.child.task import Task
from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.core.errors import CaseRefused, ConfigurationError
from dpbench.core.grid import Grid
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import Timing
from dpbench.results.schema import parsed
from tests.named import target
from tests.workloads import digits

CPU = torch.device("cpu")
HERE = "tests.workloads.digits"


def case_of(workload: type, trainer: str = "standard", **axes: Any) -> Case:
    return resolve(Case(trainer, 4, workload=target(workload), **axes))


def refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- built and trained ------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc"])
def test_every_trainer_trains_it(trainer: str) -> None:
    smoke_test(case_of(digits.Digits, trainer))


def test_parameters_build_the_model_and_the_batches() -> None:
    trainer, batches = build(case_of(digits.Digits, set={"image_size": 9}), CPU, 3)
    assert trainer.model[1].in_features == 81
    assert [batch["image"].shape for batch in batches] == [(4, 1, 9, 9)] * 3


def test_bf16_makes_images_and_parameters_bfloat16_and_leaves_labels() -> None:
    trainer, (batch,) = build(case_of(digits.Digits, "dpsgd", precision="bf16"), CPU, 1)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert (batch["image"].dtype, batch["label"].dtype) == (torch.bfloat16, torch.int64)


def test_without_noise_or_clipping_private_trainers_do_what_the_standard_one_does() -> None:
    workload = digits.Digits(image_size=5)
    (batch,) = workload.batches(4)
    torch.manual_seed(0)
    model = workload.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    updates = []
    for name in TRAINERS:
        model.load_state_dict(before)
        trained = workload.model()
        trained.load_state_dict(before)
        options = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "learning_rate": 1.0}
        TRAINERS[name](trained, batch_size=4, workload=workload, **options).train_step(batch)
        updates.append(torch.cat([p.detach().reshape(-1) for p in trained.parameters()]))
    for update in updates[1:]:
        torch.testing.assert_close(update, updates[0], rtol=1e-4, atol=1e-6)


def test_logical_bytes_are_those_of_its_own_layers() -> None:
    counts = [
        sum(row.value for row in Logical().count(case).rows if row.phase == "optimizer")
        for case in (case_of(digits.Digits, set={"hidden": n}) for n in (16, 32))
    ]
    assert counts[1] > 1.9 * counts[0] > 0


def test_a_trainer_from_before_there_were_workloads_trains_the_transformer() -> None:
    smoke_test(resolve(Case(target(digits.FixedTrainer), 2, 8, "tiny")))


# --- named --------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [f"{HERE}:Digits", f"other={HERE}:Digits"])
def test_a_class_is_named_by_its_target_with_or_without_a_name(named: str) -> None:
    name = resolve(Case("standard", 4, workload=named)).workload
    assert WORKLOADS[name] is digits.Digits


def test_a_function_of_its_parameters_may_make_one() -> None:
    case = resolve(Case("dpsgd", 4, workload=f"{HERE}:digits:size=7"))
    assert (case.workload, case.set) == ("digits", "size=7")
    assert build(case, CPU, 1)[0].model[1].in_features == 49
    told = Task(case, Timing(Path())).as_json()["case"]
    assert told["workload"] == f"digits={HERE}:digits:size=7"


@pytest.mark.parametrize("named", [digits.Digits, digits.Digits(), None])
def test_what_is_no_text_names_nothing(named: Any) -> None:
    assert "is not a name; write a name as package.module:Class" in refusal(
        lambda: Case("standard", 4, workload=named)
    )


def test_parameters_are_part_of_id_report_and_row() -> None:
    case = case_of(digits.Digits, "dpsgd", set={"image_size": 9, "hidden": 2})
    assert case.id == "dpsgd-bs4-Digits,hidden=2,image_size=9-fp32"
    assert case.report_path == Path("Digits,hidden=2,image_size=9-fp32/report_dpsgd_bs4.ncu-rep")
    assert (case.seq_len, case.model_size, case.attention, case.model) == (0, "", "", "")
    assert case != case_of(digits.Digits, "dpsgd", set={"image_size": 9, "hidden": 3})
    assert case.baseline.set == case.set


def test_text_of_parameters_is_the_same_however_they_are_given() -> None:
    sets = [
        "a=1,b=x-y",
        {"b": "x-y", "a": 1},
        ["b=x-y", "a=1"],
        " b = x-y , a=1.0 ".replace(".0", ""),
    ]
    cases = {Case("dpsgd", 4, workload="w", set=each) for each in sets}  # type: ignore[arg-type]
    assert {case.set for case in cases} == {"a=1,b=x-y"}
    assert cases.pop().parameters == {"a": 1, "b": "x-y"}


@pytest.mark.parametrize("value", ["configs/small-fp32.json", "a-fp32-b", "x y", "50%", "ü"])
def test_any_value_stands_in_a_report_path(value: str) -> None:
    case = Case("dpsgd", 4, workload="w", set={"file": value}, precision="bf16")
    assert len(case.report_path.parts) == 2


# --- on the command line, in grids --------------------------------------------------------------


@pytest.mark.usefixtures("counted_here")
def test_set_given_twice_is_two_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"--workload={HERE}:Digits", "--set=image_size=8", "--set=image_size=9"]
    file = tmp_path / "run.json"
    options = ["--batch-size=4", "--trainer=standard", "--trainer=dpsgd", "--instrument=logical"]
    assert main(["run", *named, *options, "--json", str(file)]) == 0
    document = parsed(file.read_bytes())
    found = {(case["workload"], case["set"], case["seq_len"]) for case in document["cases"]}
    assert found == {("Digits", "image_size=8", 0), ("Digits", "image_size=9", 0)}
    assert {(row["set"], row["trainer"]) for row in document["ratios"]} >= {
        ("image_size=8", "dpsgd")
    }
    assert "Digits,image_size=8 fp32, batch 4, logical (no hardware)" in capsys.readouterr().out
    assert main(["show", str(file)]) == 0
    assert "Digits,image_size=9 fp32, batch 4" in capsys.readouterr().out


def test_grid_file_sets_parameters(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f"workload = '{HERE}:Digits'\ntrainer = ['standard', 'dpsgd']\nbatch_size = 4\n"
        "set = ['image_size=8', 'image_size=9', 'hidden=4']\n"
    )
    cases = Grid.named(str(path)).cases()
    assert [case.set for case in cases[::2]] == ["hidden=4,image_size=8", "hidden=4,image_size=9"]
    assert len(cases) == 4


def test_one_grid_has_the_transformer_and_others() -> None:
    axes = {"workload": ["transformer", f"{HERE}:Digits"], "batch_size": [8], "trainer": ["dpsgd"]}
    ids = [case.id for case in Grid.named("grid1").with_axes(**axes).cases()]
    assert ids == [
        "dpsgd-bs8-seq256-1b-fp32",
        "dpsgd-bs8-Digits-fp32",
        "dpsgd-bs8-seq1024-1b-fp32",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload=nope"], "unknown workload 'nope'; choose from transformer"),
        (
            [f"--workload={HERE}:Digits", "--seq-len=8"],
            "seq_len belongs to the transformer; parameters of Digits",
        ),
        (
            [f"--workload={HERE}:Digits", "--set=size=8"],
            "unknown parameter of workload Digits 'size'; choose from image_size, hidden",
        ),
        ([f"--workload={HERE}:Digits", "--set=8"], "a parameter is NAME=VALUE in printable"),
        (
            ["--set=image_size=8"],
            "unknown parameter of workload transformer 'image_size'; choose from seq_len, model_si",
        ),
        ([f"--workload={HERE}:Absent"], f"unknown class of {HERE} 'Absent'; choose from"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_a_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["step", "--trainer=standard", "--device=cpu", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("set = 3", "set must be str or a list of str, not 3"),
        ("set = {a = 1}", "set must be str or a list of str"),
        (
            "set = 'a=x,y'",
            "a parameter is NAME=VALUE in printable text without commas",
        ),
        (
            "seq_len = 8",
            "seq_len belongs to the transformer; parameters of mine are given with set",
        ),
    ],
)
def test_what_a_grid_file_cannot_set_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"workload = 'mine'\ntrainer = 'dpsgd'\nbatch_size = 4\n{text}\n")
    message = refusal(lambda: Grid.named(str(path)))
    assert message.startswith(f"grid file {path}: ")
    assert said in message


# --- what is wrong with one ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (digits.MeanLoss, "MeanLoss.losses must return one loss for each example, [4], but"),
        (digits.NoExamples, "must be the example; shapes: [4, 3], []"),
        (digits.OtherSize, "OtherSize.batches(4) returned a batch of 5 examples"),
        (digits.NoTensors, "dictionaries and tensors, but not str"),
        (digits.NoBatch, "NoBatch.batches returned no batch"),
        (digits.NoReturn, "NoReturn.batches returned no batch"),
        (digits.NoModel, "NoModel.model must return an nn.Module, not NoneType"),
        (
            digits.NoWorkload,
            "the class NoWorkload, which is no Workload; a workload is a subclass of dpbench",
        ),
    ],
)
def test_a_wrong_workload_is_refused_in_a_line(workload: type, said: str) -> None:
    assert said in refusal(lambda: smoke_test(case_of(workload)))


def test_an_error_shows_the_users_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = 'return model(batch["picture"]))'
    assert main(["smoke", f"--workload={HERE}:Failing", "--trainer=dpsgd"]) == 1
    assert line in capsys.readouterr().out
    with pytest.raises(Exception, match="counting logical bytes failed") as caught:
        Logical().count(case_of(digits.Failing))
    assert line in str(caught.value)


def test_torch_logs_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[object] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(fake_tensor.log, "handlers", [handler])
    with pytest.raises(Exception, match=r"super\(\).losses\(model, batch\) @ torch.eye\(3\)"):
        Logical().count(case_of(digits.Misshapen))
    assert not logged


def test_what_opacus_cannot_train_is_said_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    named = f"--workload={HERE}:Normalised"
    trainers = ["--trainer=standard", "--trainer=dpsgd"]
    assert main(["smoke", named, *trainers]) == 1
    shown = capsys.readouterr().out
    assert "standard: [TEST OK] " in shown
    assert "BatchNorm cannot support training with differential privacy" in shown


@pytest.mark.usefixtures("counted_here")
@pytest.mark.parametrize("built_in", [True, False])
def test_what_no_gpu_would_change_is_said_before_one_is_used(built_in: bool) -> None:
    case = Case("dpsgd", 4, 8, "tiny", parallel="fsdp2", gpus=2)
    if not built_in:
        case = case_of(digits.Normalised, "dpsgd")
    with pytest.raises(CaseRefused, match=f"^{case.id}: (Opacus|DPSGDTrainer does not train)"):
        raise dict(footprints([case]))[case]


def test_a_model_that_ignores_its_size_is_not_called_by_it() -> None:
    case = Case("standard", 2, 8, "tiny", model=f"wide={HERE}:WideModel")
    message = refusal(lambda: build(resolve(case), CPU, 1))
    assert "model wide has no layer of width 64, so it ignores the model size" in message
    right = Case("standard", 2, 8, "100x48x1x2", model="wide")
    assert build(right, CPU, 1)[0].model.head.out_features == 100
