"""Cases whose trainer or workload has parameters."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.commands.case_arguments import chosen_case
from dpbench.commands.cli import build_parser
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.names import joined, parted
from dpbench.core.registry import TRAINERS, import_named, resolve
from tests.core.test_case import CELL, refusal

# --- parameters of other workloads -----------------------------------------------------------

PARAMETERS = st.dictionaries(
    st.sampled_from(["a", "b", "image_size"]),
    st.one_of(
        st.integers(),
        st.booleans(),
        st.floats(),
        st.text("aA1.0e/-%=, \n", max_size=5),
        st.sampled_from(["x-fp32", "..", "1", "1.0", "true", "%2D", "NaN"]),
    ),
    max_size=2,
)


def with_parameters(parameters: dict[str, object], precision: str) -> Case | None:
    try:
        return Case("dpsgd", 8, precision=precision, workload="layer", set=parameters)
    except ConfigurationError:
        return None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(PARAMETERS, PARAMETERS), min_size=2, max_size=6))
def test_trainers_with_other_parameters_share_neither_id_nor_report(
    given_: list[tuple[dict[str, object], dict[str, object]]],
) -> None:
    cases = {
        replace(case, trainer=joined("dpsgd", other.set), optimizer=joined("adamw", other.set))
        for one, two in given_
        if (case := with_parameters(one, "fp32")) and (other := with_parameters(two, "bf16"))
    }
    assert len({case.id for case in cases}) == len({case.report_path for case in cases})
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert Case.from_row(json.loads(json.dumps(asdict(case)))) == case


@pytest.mark.parametrize(
    ("spelling", "name", "parameters"),
    [
        ("dpsgd", "dpsgd", ""),
        ("dpsgd:clip=per_layer", "dpsgd", "clip=per_layer"),
        ("package.module:Class", "package.module:Class", ""),
        ("mine=package.module:Class", "mine=package.module:Class", ""),
        ("package.module:Class:alpha=2", "package.module:Class", "alpha=2"),
        ("mine=package.module:Class:alpha=2", "mine=package.module:Class", "alpha=2"),
        ("m:Outer.Inner:a=b:c=d,e=f=g", "m:Outer.Inner", "a=b:c=d,e=f=g"),
        ("dpsgd:target=m:Class", "dpsgd", "target=m:Class"),
    ],
)
def test_a_name_ends_where_its_parameters_begin(spelling: str, name: str, parameters: str) -> None:
    assert parted(spelling) == (name, parameters)
    assert joined(name, parameters) == spelling


def test_parameters_are_the_same_in_whichever_order_they_are_written() -> None:
    assert Case("dpsgd: b=2.50,a=True", 8, 256) == Case("dpsgd:a=true,b=2.5", 8, 256)


def test_name_without_parameters_is_in_id_and_report_as_it_was() -> None:
    case = Case("dpsgd", 8, 256, optimizer="adamw", trainable="lora:8")
    assert case.id == "dpsgd-bs8-seq256-1b-fp32-optimizer=adamw-trainable=lora:8"
    folder = "1b-fp32-optimizer=adamw-trainable=lora@3A8"
    assert case.report_path == Path(folder, "report_dpsgd_bs8_seq256.ncu-rep")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainer": "dpsgd:clip"}, "write a parameter as dpsgd:NAME=VALUE"),
        ({"trainer": "dpsgd:per-layer=1"}, "a parameter is NAME=VALUE in printable text"),
        ({"trainer": "dpsgd:clip=flat,per_layer"}, "a parameter is NAME=VALUE in printable text"),
        (
            {"trainer": "dpsgd:clips=flat"},
            "unknown parameter of trainer dpsgd 'clips'; choose from clip, grad_sample, learning_",
        ),
        (
            {"trainer": "dpsgd:batch_size=4"},
            "unknown parameter of trainer dpsgd 'batch_size'; choose from clip, grad_sample",
        ),
        ({"optimizer": "sgd:lr=1"}, "unknown parameter of optimizer sgd 'lr'; choose from moment"),
        ({"optimizer": "adamw:fused=1"}, "fused of optimizer adamw must be true or false, not 1"),
        (
            {"optimizer": "sgd:momentum=-1"},
            "sgd:momentum=-1 cannot step: Invalid momentum value: -1",
        ),
        ({"optimizer": "torch.optim:LBFGS"}, "optimizer LBFGS cannot step: LBFGS.step() missing 1"),
        ({"optimizer": "torch.optim:Adan"}, "unknown class of torch.optim 'Adan'; choose from A"),
        ({"model": "simple:size=1"}, "unknown parameter of model simple 'size'; choose from none"),
        (
            {"workload": "transformer:depth=3"},
            "unknown parameter of workload transformer 'depth'; choose from seq_len, model_size",
        ),
        ({"workload": "transformer:seq_len=8"}, "seq_len is given twice, as 256 and as 8"),
        (
            {"trainer": "tests.core.test_case_parameters:Own:beta"},
            "with parameters as package.module:Class:NAME=VALUE",
        ),
        (
            {"trainer": "tests.core.test_case_parameters:Absent"},
            "unknown class of tests.core.test_case_parameters 'Absent'; choose from Own",
        ),
        *(
            ({"trainer": f"tests.core.test_case_parameters:Own:{given}"}, f"of trainer Own {said}")
            for given, said in {
                "beta=abc": "must be a number, not 'abc'",
                "beta=true": "must be a number, not True",
                "steps=1.5": "must be an integer, not 1.5",
                "nested=1": "must be true or false, not 1",
                "way=other": "'other'; choose from one, two",
                "maybe=none": "must be an integer, not 'none'",
                "max_grad_norm=nan": "must be a number, not 'nan'",
            }.items()
        ),
    ],
)
def test_wrong_parameter_is_refused_in_a_line(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: import_named(resolve(Case(**{**CELL, **options}))))


class Own:
    """A trainer with annotated parameters."""

    def __init__(
        self,
        model: object,
        *,
        beta: float = 0.5,
        steps: int = 1,
        nested: bool = False,
        way: Literal["one", "two"] = "one",
        maybe: int | None = None,
        name: str = "",
        unknown: NotDefinedHere | None = None,  # type: ignore[name-defined]  # noqa: F821
        free=None,  # type: ignore[no-untyped-def]
        max_grad_norm: float = 1.0,
    ) -> None:
        self.given = (beta, steps, nested, way, maybe, name, unknown, free)

    def train_step(self, batch: object) -> None:
        """Do nothing."""


def test_parameters_become_what_their_annotations_say() -> None:
    text = "beta=1,steps=2,nested=true,way=two,maybe=3,name=4,unknown=x,free=5"
    made = TRAINERS[f"tests.core.test_case_parameters:Own:{text}"](None)
    assert made.given == (1, 2, True, "two", 3, "4", "x", 5)


def parsed(arguments: list[str]) -> Case:
    return chosen_case(build_parser("step").parse_args(["step", *arguments]))


def test_transformers_options_are_parameters_of_the_workload() -> None:
    by_options = Case("dpsgd", 8, 128, "tiny", attention="dp_mha")
    said = "seq_len=128,model_size=tiny,attention=dp_mha"
    assert Case("dpsgd", 8, workload=f"transformer:{said}") == by_options
    assert Case("dpsgd", 8, set=said) == by_options
    assert parsed([f"--workload=transformer:{said}", "--trainer=dpsgd"]) == by_options
    assert parsed([*(f"--set={each}" for each in said.split(",")), "--trainer=dpsgd"]) == by_options


def test_workload_may_have_its_parameters_in_its_name() -> None:
    case = Case("dpsgd", 8, workload="layer:width=64", set={"length": 3})
    assert case == Case("dpsgd", 8, workload="layer", set="width=64,length=3")
    assert case.id == "dpsgd-bs8-layer,length=3,width=64-fp32"


@pytest.mark.parametrize("value", [" ", "two\nlines", "a,b", ""])
def test_parameter_that_no_command_line_could_say_is_refused(value: str) -> None:
    assert "a parameter is NAME=VALUE in printable text without commas" in refusal(
        lambda: Case("dpsgd", 8, workload="layer", set={"layer": value})
    )
