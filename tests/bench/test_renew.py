"""The generated blocks of the documents are what the committed runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.cells import TABLES, cost
from bench.measure import PLAN
from bench.renew import (
    BLOCK,
    DERIVED,
    PAGES,
    RUN_SCHEMA,
    committed_runs,
    outdated,
    renewed,
    shortened,
)
from bench.runs import RESULTS, ROOT, path_of, run, text_of, value
from bench.tables import METHODS
from dpbench.commands.cli import main
from dpbench.results.run import Run
from dpbench.results.schema import json_schema, parsed

TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}


def test_the_example_for_pandas_prints_a_ratio_of_finding_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = TEXTS["docs/results/README.md"]
    found = re.search(r"```python\n(.+?# (\S+)\n)```", page, re.S)
    assert found
    assert main(["show", str(path_of("methods-256")), "--output", "run.csv"]) == 0
    capsys.readouterr()
    exec(found[1], {})
    assert capsys.readouterr().out == f"{found[2]}\n"
    assert cost(METHODS[2], "dpsgd").startswith(f"{found[2]}, ")


def test_no_page_is_outdated() -> None:
    assert outdated(PAGES, write=False) == []


def test_each_table_stands_in_a_page() -> None:
    used = {words.split()[0] for text in TEXTS.values() for _, words, _, _ in BLOCK.findall(text)}
    assert used == {*TABLES}


def test_a_changed_number_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    right = renewed("Before.\n<!-- generated: phases -->\n<!-- end -->\nAfter.\n")
    page.write_text(re.sub(r"\d\.\d", "9999.9", right, count=1), encoding="utf-8")
    assert outdated([page], write=False) == [page]
    assert outdated([page], write=True) == [page]
    assert page.read_text(encoding="utf-8") == right
    assert outdated([page], write=True) == []


@pytest.mark.parametrize(
    "text",
    [
        "<!-- generated: no_table -->\n<!-- end -->",
        "<!-- generated: phases -->\n",
        "<!-- generated: ranks_measured nobody -->\n<!-- end -->",
    ],
)
def test_a_block_that_cannot_be_made_is_refused(text: str) -> None:
    with pytest.raises(LookupError):
        renewed(text)


@pytest.mark.parametrize("axes", [{}, {"trainer": "nobody"}])
def test_what_is_not_one_number_is_refused(axes: dict[str, str]) -> None:
    with pytest.raises(LookupError, match="dram_bytes"):
        value("methods-256", "dram_bytes", **axes)


BEGUN_BY_A_SCRIPT = (
    "9057f434d4e4a460634a523793b47902836079edbced574b091cca2ec33166ed",
    "449cbd387a4517923d141a85187958f3dd540a7ddec71cebf221bee752c27278",
)
"""Digests of the only changes, see docs/results/README.md: an untracked script."""


def test_committed_runs_are_complete_and_of_clean_commits() -> None:
    for path in RESULTS.glob("*.json.xz"):
        known = run(path)
        code = known.environment["code"]
        assert (known.status, len(code["commit"])) == ("complete", 40), path
        assert code["dirty"] is False or code["changes"] in BEGUN_BY_A_SCRIPT, path


def test_each_file_of_evidence_is_listed() -> None:
    listed = re.findall(r"^\| `([^`]+)`", TEXTS["docs/results/README.md"], re.M)
    here = {path.name for path in RESULTS.iterdir()} - {"README.md", "evidence.toml", "runs"}
    assert {*listed} == here


def test_measurements_that_pages_name_can_be_made() -> None:
    for text in TEXTS.values():
        for names in re.findall(r"python -m bench\.measure((?: [a-z][\w-]*)+)", text):
            assert {*names.split()} <= {*PLAN}


def test_committed_runs_hold_nothing_that_follows_from_their_rows() -> None:
    for path in committed_runs():
        text = text_of(path)
        assert not [name for name in DERIVED if f'"{name}":' in text], path


def test_a_shortened_run_is_the_same_run() -> None:
    text = Run.load(ROOT / "tests/data/saved/grid1.json").with_derived().text
    whole, less = parsed(text.encode()), parsed(shortened(text).encode())
    assert {name for name in whole if name not in less} == {*DERIVED}
    assert less == {name: whole[name] for name in less}


def test_the_published_schema_is_that_of_what_is_read() -> None:
    assert json.loads(RUN_SCHEMA.read_text(encoding="utf-8")) == json.loads(
        json.dumps(json_schema())
    )
