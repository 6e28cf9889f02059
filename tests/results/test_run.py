"""A saved run is read whole or not at all."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import write_text
from dpbench.results.conditions import environment
from dpbench.results.kernels import KernelCount, OperatorCount
from dpbench.results.outcome import INTERRUPTED, Outcome, document, document_text
from dpbench.results.rows import READ, SCHEMA, STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.schema import parsed
from dpbench.results.summary import to_frame

CASE = Case("dpsgd", batch_size=8, seq_len=256)
ROWS = tuple(
    Measurement(CASE, "ncu", phase, "dram_read_bytes", value, "B", 0, "NVIDIA H200", "ncu 2025.3")
    for phase, value in ((STEP, 5.0), ("clip", 2.0))
)
KERNEL = KernelCount(0, "clip", "void norm()", 3, 1.0, 2.0, 3.0, 0.5)
OPERATOR = OperatorCount("clip", "aten.clone", 1, 2, 3, 4)
OUTCOMES = [
    Outcome(CASE, ROWS, 1.5, instruments=("ncu",), kernels=(KERNEL,)),
    Outcome(CASE, (), 0.5, instruments=("logical",), operators=(OPERATOR,)),
    Outcome(
        Case("standard", 8, 256),
        (),
        2.0,
        error="CaseOutOfMemory",
        message="too big",
        instruments=("ncu",),
    ),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "0001_before.json"
    session = {"status": INTERRUPTED, "regressed": True}
    write_text(path, document_text(document(OUTCOMES, environment(), session)))
    return path


def test_run_is_what_was_saved(saved: Path) -> None:
    run = Run.load(saved)
    assert run.name == "0001_before"
    assert list(run.outcomes) == OUTCOMES
    pd.testing.assert_frame_equal(run.frame, to_frame(ROWS), check_dtype=False)
    assert (run.status, run.regressed) == (INTERRUPTED, True)
    assert run.sources == (("NVIDIA H200", "ncu"),)


SAVED = sorted((Path(__file__).parents[1] / "data/saved").glob("*.json"))


def _sorted(row: dict[str, object]) -> str:
    return str(sorted(row.items()))


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_rows_of_a_saved_run_are_those_of_its_outcomes(path: Path) -> None:
    run = Run.load(path)
    rows = [row.as_row() for outcome in run.outcomes for row in outcome.rows]
    assert sorted(map(_sorted, rows)) == sorted(map(_sorted, run.document["rows"]))
    assert [outcome.seconds for outcome in run.outcomes] == [
        case["seconds"] for case in run.document["cases"]
    ]


def test_what_kernels_and_operators_did_is_in_one_outcome_of_a_case(tmp_path: Path) -> None:
    outcomes = (
        Outcome(CASE, ROWS, 1.5, instruments=("ncu",), kernels=(KERNEL,)),
        Outcome(CASE, (), 0.5, instruments=("logical",), operators=(OPERATOR,)),
        Outcome(CASE, (), 0.5, instruments=("timing",)),
    )
    path = tmp_path / "run.json"
    write_text(path, document_text(document(outcomes, environment())))
    assert Run.load(path).outcomes == outcomes


def test_trainer_that_this_process_does_not_know_is_read(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"dpsgd"', '"someone_elses"'))
    assert {outcome.case.trainer for outcome in Run.load(saved).outcomes} == {
        "someone_elses",
        "standard",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read: Input data was truncated"),
        ('{"schema": 2, "rows": [{"tra', "cannot be read: Input data was truncated"),
        ("[1, 2]", "cannot be read: Expected `object`, got `array`"),
        ("[" * 100_000, "cannot be read"),
        (b"\xff\xfe", "cannot be read: JSON is malformed"),
        (json.dumps({"schema": SCHEMA}), "cannot be read: Object missing required field `"),
        ('{"schema": true, "rows": []}', "Expected `int`, got `bool` - at `$.schema`"),
        (json.dumps({"schema": SCHEMA + 1}), f"this dpbench reads {SCHEMA}; upgrade dpbench"),
        (
            json.dumps({"schema": READ[0] - 1}),
            f"schema {READ[0] - 1}, this dpbench reads {SCHEMA}",
        ),
    ],
    ids=["empty", "cut off", "a list", "deep", "binary", "no rows", "no schema", "newer", "older"],
)
def test_file_that_is_no_run_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "0007_bad.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        Run.load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["rows"][1].pop("metric"),
        lambda data: data["rows"][1].update(value="5"),
        lambda data: data["rows"][1].update(value=None),
        lambda data: data["rows"][1].update(value=float("nan")),
        lambda data: data["rows"][1].update(value=True),
        lambda data: data["rows"][1].update(value=-5),
        lambda data: data["rows"][1].update(repeat="a"),
        lambda data: data["rows"][1].update(repeat=-1),
        lambda data: data["rows"][1].update(metric=5),
        lambda data: data.update(environment=[]),
        lambda data: data["rows"][1].update(batch_size=-8),
        lambda data: data["rows"][1].update(device=None),
        lambda data: data["rows"].append(3),
        lambda data: data["cases"][0].pop("seq_len"),
        lambda data: data["cases"][0].update(precision="fp3"),
        lambda data: data["session"].update(status="half"),
        lambda data: data["session"].update(grid=None),
        lambda data: data["session"].update(cases_asked="two"),
        lambda data: data["session"].update(settings={"ncu": 5}),
        lambda data: data["environment"].update(versions=[]),
        lambda data: data["environment"].update(gpu="H200"),
        lambda data: data["cases"][0].update(trainer=["dpsgd"]),
        lambda data: data["cases"][0].update(model_size=5),
        lambda data: data["operators"][0].pop("flops"),
        lambda data: data["rows"][1].update(value=10**400),
        lambda data: data["rows"][1].update(unit="GB"),
        lambda data: data["rows"][1].update(phase="clap"),
        lambda data: data["rows"].append({**data["rows"][1], "value": 3.0}),
        lambda data: data["rows"].append({**data["rows"][1]}),
        lambda data: data["rows"][1].update(metric="my_balance_bytes"),
        lambda data: data["cases"].append({**data["cases"][0]}),
        lambda data: data["metrics"][0].update(shown=["never"]),
        lambda data: data["metrics"][0].update(by="ncu"),
        lambda data: data["metrics"][0].update(colour="red"),
        lambda data: data["metrics"][0].update(how={"kind": "Guess"}),
        lambda data: data["metrics"][0].update(how={"kind": "Counters", "chips": 5}),
    ],
)
def test_damage_anywhere_in_a_file_is_found_when_it_is_loaded(
    saved: Path, damage: Callable[[Any], object]
) -> None:
    data = parsed(saved.read_bytes())
    damage(data)
    saved.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=r"0001_before\.json cannot be read"):
        Run.load(saved)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("cases.0.seconds", "long"),
        ("cases.0.error", 5),
        ("cases.0.message", None),
        ("cases.0.instruments", 5),
        ("cases.0.instruments", "ncu"),
        ("cases.1.notes", {}),
        ("cases.1.extra_info", []),
        ("cases.1", None),
        ("rows.1", 3),
        ("rows", {}),
        ("rows.1.value", "5"),
        ("rows.1.rank", -1),
        ("rows.1.gpus", "two"),
        ("operators.0.flops", None),
        ("devices", "H200"),
        ("session.cases_asked", 10**30),
        ("session.cases_asked", -1),
        ("session.cases_asked", True),
        ("session.status", []),
        ("session.regressed", "no"),
        ("session.seconds", "2"),
        ("environment.gpu", "H200"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_place(
    saved: Path, place: str, value: object
) -> None:
    data = parsed(saved.read_bytes())
    *around, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    part = data
    for name in around:
        part = part[name]
    part[last] = value
    saved.write_text(json.dumps(data))
    named = "$" + "".join(f"[{p}]" if p.isdecimal() else f".{p}" for p in place.split("."))
    with pytest.raises(ConfigurationError) as caught:
        Run.load(saved)
    assert str(caught.value).endswith(f" - at `{named}`")
    assert len(str(caught.value).splitlines()) == 1


def test_refusal_says_which_row_is_wrong(saved: Path) -> None:
    data = parsed(saved.read_bytes())
    data["rows"].append({**data["rows"][1], "value": 3.0})
    saved.write_text(json.dumps(data))
    words = r"ncu has a second value, 3\.0, for dram_read_bytes@clip of dpsgd-bs8-seq256-1b-fp32"
    with pytest.raises(ConfigurationError, match=words):
        Run.load(saved)


def test_counters_and_metrics_of_others_are_read_as_they_are(saved: Path) -> None:
    data = parsed(saved.read_bytes())
    row = data["rows"][1]
    others = [
        {**row, "metric": "sm__cycles_active.avg", "unit": "cycle"},
        {**row, "metric": "my_balance_bytes", "value": -3.0},
        {**row, "metric": "memory_growth_bytes", "value": -3.0},
    ]
    data["rows"] += others
    data["metrics"].append({"name": "my_balance_bytes", "how": {"kind": "Peak"}, "signed": True})
    data["speed_of_light"] = [{"phase": "clip"}]  # a project's hook has added it
    saved.write_text(json.dumps(data))
    run = Run.load(saved)
    assert len(run.frame) == len(run.document["rows"]) == len(ROWS) + len(others)


@pytest.mark.parametrize(
    ("place", "entry", "words"),
    [
        ("cases", {}, "dpsgd-bs8-seq256-1b-fp32 by ncu twice"),
        ("rows", {"phase": "noise", "metric": "my_bytes"}, "ncu has an undefined metric for my_by"),
        ("rows", {}, "ncu has a second value, 5.0, for dram_read_bytes@step"),
        ("rows", {"paralel": "ddp"}, "Object contains unknown field `paralel` - at `$.rows["),
        (
            "metrics",
            {"name": "x", "how": {"kind": "Guess"}},
            "Invalid value 'Guess' - at `$.m",
        ),
    ],
)
def test_what_a_document_may_not_have_is_named_in_a_line(
    saved: Path, place: str, entry: dict[str, Any], words: str
) -> None:
    data = parsed(saved.read_bytes())
    data[place].append(data[place][0] | entry)
    saved.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError) as caught:
        Run.load(saved)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json cannot be read: No such"):
        Run.load(tmp_path / "absent.json")


def test_a_case_that_was_measured_and_counted_is_two_outcomes(tmp_path: Path) -> None:
    case = Case("dpsgd", batch_size=8, seq_len=256)
    both = [
        Outcome(
            case,
            (Measurement(case, name, "step", "peak_memory_bytes", 5.0, "B", 0, "any", "tool"),),
            1.5,
            instruments=(name,),
        )
        for name in ("timing", "logical")
    ]
    write_text(tmp_path / "run.json", document_text(document(both, environment())))
    assert list(Run.load(tmp_path / "run.json").outcomes) == both


def test_parts_are_one_run_in_which_each_case_stands_once() -> None:
    tested = {"tests": ({"test": "test_it", "params": {}},), "extra_info": {"seen": 1}}
    again = replace(OUTCOMES[0], rows=(replace(ROWS[0], value=9.0),), **tested)
    fails = OUTCOMES[2]
    row = replace(ROWS[0], case=fails.case)
    succeeds = Outcome(fails.case, (row,), 3.0, instruments=fails.instruments)
    merged = Run.merge(
        [
            Run.of("first", OUTCOMES, session={"status": INTERRUPTED, "seconds": 5.0}),
            Run.of("second", [again, succeeds], session={"seconds": 2.0, "regressed": True}),
        ]
    )
    assert list(merged.outcomes) == [replace(OUTCOMES[0], **tested), OUTCOMES[1], succeeds]
    assert (merged.name, merged.status, merged.regressed) == ("second", INTERRUPTED, True)
    assert (merged.session["seconds"], merged.cases_asked, len(merged.frame)) == (7.0, 2, 3)
    assert list(Run.merge([merged, merged]).outcomes) == list(merged.outcomes)


@pytest.fixture
def packed(saved: Path) -> Path:
    """The saved run, as ``xz`` compresses it."""
    path = saved.with_name(f"{saved.name}.xz")
    path.write_bytes(lzma.compress(saved.read_bytes()))
    return path


def test_a_compressed_run_is_read_as_the_run_and_has_its_name(saved: Path, packed: Path) -> None:
    plain, run = Run.load(saved), Run.load(packed)
    assert (run.name, run.document) == (plain.name, plain.document)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-20], "it is not one complete xz file; write it again with xz"),
        (lambda data: data + data, "it is not one complete xz file"),
        (lambda data: data[:40] + b"x" * 20 + data[60:], "Corrupt input data"),
    ],
)
def test_a_damaged_compressed_run_is_named_in_a_line(
    packed: Path, spoil: Callable[[bytes], bytes], words: str
) -> None:
    packed.write_bytes(spoil(packed.read_bytes()))
    with pytest.raises(ConfigurationError, match=words) as error:
        Run.load(packed)
    assert str(error.value).startswith(f"run file {packed} cannot be read: ")
    assert "\n" not in str(error.value)


def test_a_small_file_that_unpacks_to_very_much_is_refused(tmp_path: Path) -> None:
    bomb, packer = tmp_path / "bomb.json.xz", lzma.LZMACompressor(preset=0)
    parts = [packer.compress(bytes(2**24)) for _ in range(17)]
    bomb.write_bytes(b"".join([*parts, packer.flush()]))
    with pytest.raises(ConfigurationError, match="it unpacks to more than 268 MB; unpack it with"):
        Run.load(bomb)
