"""Every number of the documents is that of the evidence that it names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench import documents, evidence
from bench.documents import DOCUMENTS
from bench.sources import Document, Figure, files_of, parse

ROOT = Path(__file__).parents[2]
EVIDENCE = documents.sums()


@cache
def parsed(name: str) -> tuple[str, Document]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text, parse(name, text)


def by_one_percent(figure: Figure) -> str:
    """The number changed by 1 %, or, where its digits do not show that, by one in the last."""
    digits = len(figure.text.partition(".")[2])
    value = float(figure.text)
    least = 10.0**-digits
    return figure.written(value + max(abs(value) * 0.01, least))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_number_has_a_source_and_is_what_the_source_says(name: str) -> None:
    _, document = parsed(name)
    assert [*document.problems, *documents.wrong(document)] == []


def test_the_evidence_is_that_from_which_the_documents_were_written() -> None:
    found = [parsed(name)[1] for name in DOCUMENTS]
    assert documents.changed_evidence(EVIDENCE, found) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_number_changed_by_a_hundredth_is_found_with_its_sentence(name: str) -> None:
    """All of a document at once: each must be reported, by the sentence as it reads then."""
    text, document = parsed(name)
    for figure in sorted(document.figures, key=lambda f: -f.start):
        end = figure.start + len(figure.text)
        text = f"{text[: figure.start]}{by_one_percent(figure)}{text[end:]}"
    falsified = parse(name, text)
    assert falsified.problems == ()
    assert len(falsified.figures) == len(document.figures)
    found = "\n".join(documents.wrong(falsified))
    assert [
        str(figure) for figure in falsified.figures if f"{figure}: its source" not in found
    ] == []


def shows_a_hundredth(figure: Figure) -> bool:
    """Whether a number has digits enough to show that one that it rests on is another."""
    least = 10.0 ** -len(figure.text.partition(".")[2])
    return abs(float(figure.text)) * 0.01 > least and "spearman(" not in figure.query


def falsified(figure: Figure) -> Iterator[str]:
    """The number, where one of those that it rests on is a hundredth more or less."""
    evidence.answer(figure.query)
    for reading in range(1, evidence.readings() + 1):
        for factor in (0.99, 1.01):
            with evidence.falsified(reading, factor):
                value = evidence.answer(figure.query)
            yield figure.written(value[0] if isinstance(value, list) else value)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_evidence_changed_by_a_hundredth_is_found(name: str) -> None:
    _, document = parsed(name)
    for figure in filter(shows_a_hundredth, document.figures):
        assert any(text != figure.text for text in falsified(figure)), figure


@pytest.mark.parametrize("file", sorted(EVIDENCE))
def test_another_file_of_evidence_is_found_with_the_sentences_that_rest_on_it(file: str) -> None:
    found = [parsed(name)[1] for name in DOCUMENTS]
    resting = [
        said
        for document in found
        for said in (*document.figures, *document.claims)
        if file in files_of(said.query)
    ]
    [problem] = documents.changed_evidence({**EVIDENCE, file: "other"}, found)
    assert problem.startswith(file)
    assert all(str(said) in problem for said in resting)


def test_a_number_without_a_source_is_found() -> None:
    said = "A step moves 12.5 GB at 8 × 256 with Opacus 1.6.0, as `--top 3` shows."
    [problem] = parse("README.md", said).problems
    assert problem == f"README.md: 12.5 has no source in “{said}”"


@pytest.mark.parametrize(
    "said",
    [
        "It moves 44.1 GB.",
        "The ratio is 4.52 × more.",
        "It is 1.5 times.",
        "11.34 B more.",
        "0.18 %",
    ],
)
def test_no_exemption_hides_what_was_measured(said: str) -> None:
    assert len(parse("README.md", said).problems) == 1


def test_a_table_without_a_source_is_found() -> None:
    table = "| | GB |\n|---|---|\n| dpsgd | 412.5 |\n"
    [problem] = parse("README.md", table).problems
    assert problem == "README.md: 1 numbers, 0 queries in column 2 of “| dpsgd | 412.5 |”"


def test_a_number_in_a_header_is_found() -> None:
    table = "| | 412.5 GB |\n|---|---|\n| dpsgd | - |\n"
    assert len(parse("README.md", table).problems) == 1


def test_a_sentence_of_findings_that_says_all_needs_a_query() -> None:
    said = "Ghost clipping is slower in all cells."
    [problem] = parse("docs/findings.md", said).problems
    assert problem == f"docs/findings.md: no query holds “{said}”"
    query = "max(ratios(ms, FP32, ['dpsgd_ghost'], 'dpsgd')) {} 1"
    holds, refuted = (
        parse("docs/findings.md", f"{said}\n<!-- = {query.format(sign)} -->") for sign in "><"
    )
    assert (holds.problems, documents.wrong(holds)) == ((), [])
    not_so = f"docs/findings.md: “{said}”: not so ({query.format('<')})"
    assert documents.wrong(refuted) == [not_so]


@pytest.mark.parametrize("query", ["12.5", "2 * 6.25", "True"])
def test_a_number_typed_into_its_source_is_no_evidence(query: str) -> None:
    [problem] = parse("README.md", f"It moves 12.5 GB.\n<!-- = {query} -->").problems
    assert f"{query!r} reads no evidence" in problem


@pytest.mark.parametrize(
    "query",
    [
        "__import__('os')",
        "gb.__globals__",
        "open('README.md')",
        "(lambda: 1)()",
        "[gb][0]('methods-256')",
        "f'{1}'",
        "1 if True else 2",
        "gb('methods-256', 'dpsgd')",
        "gb('methods-256', 'nobody')",
        "printed('account-dpsgd', 'no such line', 1)",
    ],
)
def test_what_is_outside_the_vocabulary_or_ambiguous_is_refused(query: str) -> None:
    with pytest.raises(evidence.QueryError):
        evidence.answer(query)


def test_one_command_renews_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "docs/findings.md"
    text, document = parsed(name)
    figure = document.figures[0]
    end = figure.start + len(figure.text)
    (tmp_path / "docs").mkdir()
    (tmp_path / name).write_text(
        f"{text[: figure.start]}{by_one_percent(figure)}{text[end:]}", encoding="utf-8"
    )
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "DOCUMENTS", (name,))
    monkeypatch.setattr(documents, "SUMS", tmp_path / "SHA256SUMS")
    monkeypatch.setattr("sys.argv", ["documents.py"])
    assert documents.main() == 0
    assert f"{len(document.figures)} numbers, 1 changed" in capsys.readouterr().out
    assert (tmp_path / name).read_text(encoding="utf-8") == text
    shutil.copy(documents.SUMS, tmp_path / "again")
    monkeypatch.setattr("sys.argv", ["documents.py", "--check"])
    assert documents.main() == 0
