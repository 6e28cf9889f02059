"""The numbers of a document, and the sources beside them.

A source is an HTML comment, which no reader sees, of queries (`bench/evidence.py`) between
semicolons. After text, ``<!-- = gb("methods-256", "fused", "fp32"); … -->`` has one for each number
since the comment before it or the start of the paragraph, in their order; a query that says true
or false is a claim of the same text. Before a table, ``<!-- =table`` has a line
``COLUMNS: QUERIES`` for columns such as ``2`` or ``3-6``, in which ``{1}``, ``{2}`` stand for what
the row has in these columns (or, where it has nothing there, the row above), ``{head}`` for the
column's header, and ``{row}`` for the row's own part of a line ``rows: …; …``, of which ``3 x …``
are three rows'.

A number is written with the digits that it has. What is no result needs no source: `EXEMPT` says
why. In findings a sentence that says all, every, only, never or at most needs a claim, or a query
with ``max`` or ``min``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from bench.evidence import QueryError, answer, files_read
from dpbench.errors import ConfigurationError

CLAIMS_IN = ("docs/findings.md",)
EXEMPT = {
    r"32 × \(?`lts__": "the bytes of a sector",
    r"`\w+` (?:18, 34 or 50 )?\((?:50|224|1000|512|128|20000|256)\)": "a default",
    r"```.*?```": "a block: tests/test_docs.py runs it, or finds its lines in what was printed",
    r"`[^`\n]+(?:\n[^`\n]+)?`": "code: names, options, commands",
    r"\]\([^)]*\)": "where a link goes",
    r"<!--(?! =).*?-->": "a comment without a source",
    r"<https?://[^>]*>": "an address",
    r"^#+ \d+\. ": "the number of a section",
    r"^ *\d+\. ": "the number of an item",
    r"[Ff]indings? \d+(?:(?:,| and) \d+)*": "the number of a finding",
    r"(?<![\d.])\d+\s×\s\d+(?=\s|[],;:.)|])": "a cell: batch size × sequence length",
    r"(?:batch|sequence|length)(?:\ssize)?\s(?:of\s)?\d+(?:(?:,|\sand|\sor|\sto)\s\d+)*": "a cell",
    r"(?<![\d.])\d+(?:,?\s(?:and|or|to)\s\d+)?\stokens": "a cell's sequence length",
    r"(?:Opacus|torch|PyTorch|Python|CUDA|Compute|Transformers|driver|schema|pandas) \d[\d.]*"
    r"(?: to \d[\d.]*)?": "a version",
    r"Apache-2\.0|GPT-2 124M|Llama 1\.1B|BERT-base|ViT-B/16|ResNet-50": "a name",
    r"(?<![\d.])1\.34 B": "the parameters of the built-in model, which tests/workloads holds",
    r"(?<![\d.])\d+ images": "a batch",
    r"\b1 GB is 10⁹|GB of 10⁹|dropout of 0\.1": "a unit, or a parameter",
    r"\bGrid [12]\b": "a name",
    r"\b31\.88 times the bytes|\b32\sexamples": "what tests/test_docs.py prints again",
    r"exit status (?:is )?[01](?!\.?\d)|it is 1, and the output": "an exit status",
    r"(?:below|less than) 70 %|more than 1 % (?:of the step|off)|\b12 turns": "a limit of the code",
    r"at most 2 % of a step": "a limit that bench/exec.py holds",
    r"(?:Below|dropout\sto)\s0\b(?!\.)": "a constant",
    r"\b20 examples|tries 1000": "how often a property is tried, by default",
}
"""What is no result of a measurement or count, and why."""

WRONG = (ConfigurationError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a query may end in; its sentence is named."""

NUMBER = re.compile(r"(?<![\w.])(?<!\w-)[+-]?\d+(?:\.\d+)?")
SOURCE = re.compile(r"<!-- =(table\b)?(.*?)-->", re.S)
QUANTIFIED = re.compile(r"\b(?:all|every|only|never|always|at most)\b", re.I)
SENTENCE = re.compile(r"(?:[^.:]|[.:](?! |\n|$))+(?:[.:]|$)", re.S)


@dataclass(frozen=True)
class Figure:
    """A number of a document, where it stands, and what it is computed from."""

    document: str
    start: int
    text: str
    sentence: str
    query: str

    @property
    def renewed(self) -> str:
        """The number as its source has it now, with its own digits and sign."""
        return self.written(values(self.query)[0])

    def written(self, value: float) -> str:
        digits = len(self.text.partition(".")[2])
        sign = "+" if self.text[0] == "+" else ""
        text = f"{value:{sign}.{digits}f}"
        return text.removeprefix("-") if float(text) == 0 else text

    def __str__(self) -> str:
        return f"{self.document}: {self.text} in “{as_line(self.sentence)}”"


@dataclass(frozen=True)
class Claim:
    """What a sentence says that is no number."""

    document: str
    sentence: str
    query: str

    @property
    def holds(self) -> bool:
        return evaluated(self.query)[0] is True

    def __str__(self) -> str:
        return f"{self.document}: “{as_line(self.sentence)}”"


@dataclass(frozen=True)
class Document:
    """What a document says, and what is wrong with the way it says where that comes from."""

    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    problems: tuple[str, ...]


@cache
def evaluated(query: str) -> tuple[float | bool | list[float], frozenset[str]]:
    """What a query comes to, and the files that it reads."""
    return answer(query), files_read()


def values(query: str) -> tuple[float, ...]:
    """The numbers to which a query comes, mostly one."""
    value, _ = evaluated(query)
    return tuple(map(float, value)) if isinstance(value, list) else (float(value),)


def files_of(query: str) -> frozenset[str]:
    """The files that a query reads."""
    return evaluated(query)[1]


def split(queries: str) -> list[str]:
    """The queries of a source."""
    return [" ".join(query.split()) for query in queries.split(";") if query.strip()]


def each_number(query: str) -> list[str]:
    """A query for each of the numbers to which this one comes.

    Raises:
        QueryError: it comes to numbers that it has not from evidence.
    """
    if not files_of(query) and "len(" not in query:
        raise QueryError(f"{query!r} reads no evidence")
    count = len(values(query))
    return [query] if count == 1 else [f"item({query}, {place})" for place in range(count)]


def without_exempt(text: str) -> str:
    """The text with blanks for what needs no source, each character where it was."""
    for pattern in EXEMPT:
        text = re.sub(
            pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.M | re.S
        )
    return text


def as_line(text: str) -> str:
    """A sentence as it is named: without comments, on one line."""
    return " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())


def label(cell: str) -> str:
    """What a row or header says, as words of a query."""
    cell = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    return re.sub(r"[`*]", "", cell).replace(" × ", "x").strip()


class _Parser:
    """Reads a document paragraph by paragraph; what it is not sure of is a problem."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, self.plain = name, text, without_exempt(text)
        self.figures: list[Figure] = []
        self.claims: list[Claim] = []
        self.problems: list[str] = []

    def wrong(self, what: object, said: str) -> None:
        self.problems.append(f"{self.name}: {what} “{as_line(said)}”")

    def paragraph(self, start: int, end: int) -> None:
        """Lines between blank ones: text with its sources, then perhaps a table with its own."""
        sources = list(SOURCE.finditer(self.plain, start, end))
        table = sources.pop() if sources and sources[-1][1] else None
        rows = re.search(r"^ *\|", self.plain[start:end], re.M)
        text_end = table.start() if table else start + rows.start() if rows else end
        for source in sources:
            self.passage(start, source)
            start = source.end()
        for number in NUMBER.finditer(self.plain, start, text_end):
            said = self.sentence(start, text_end, number.start())
            self.wrong(f"{number[0]} has no source in", said)
        for said in self.quantified(start, text_end):
            self.wrong("no query holds", said)
        if rows:
            self.table(text_end, end, self.text[slice(*table.span(2))] if table else "")

    def passage(self, start: int, source: re.Match[str]) -> None:
        """Text and the source behind it, with a query for each of its numbers, and claims."""
        end = source.start()
        whole = self.text[start:end]
        queries: list[str] = []
        held = 0
        for query in split(self.text[slice(*source.span(2))]):
            try:
                if isinstance(evaluated(query)[0], bool) and "(" in query:
                    self.claims.append(Claim(self.name, whole, query))
                    held += 1
                else:
                    queries += each_number(query)
                    held += bool(re.search(r"\b(?:max|min)\(", query))
            except WRONG as error:
                self.wrong(f"{error} for", whole)
                return
        self.give(queries, start, end, whole, "")
        said = self.quantified(start, end)
        if len(said) > held:
            self.wrong(f"{len(said)} claims, {held} queries of them in", whole)

    def table(self, start: int, end: int, source: str) -> None:
        """A table, and the lines of its source: of a column, or ``rows``."""
        of_column: dict[int, str] = {}
        of_row: list[str] = []
        for columns, said in re.findall(r"^([\w-]+): (.*(?:\n  .*)*)", source, re.M):
            if columns == "rows":
                for times, row in re.findall(r"\s*(?:(\d+) x )?([^;]+)", said):
                    of_row += [row.strip()] * int(times or 1)
            else:
                first, _, last = columns.partition("-")
                of_column |= dict.fromkeys(range(int(first), int(last or first) + 1), said)
        lines = list(re.compile(r"^ *\|.*$", re.M).finditer(self.plain, start, end))
        heads = [label(cell) for cell in self.text[slice(*lines[0].span())].split("|")]
        self.give([], *lines[0].span(), self.text[slice(*lines[0].span())], " in the header")
        words: dict[str, str] = {}
        for index, line in enumerate(lines[2:]):
            words["row"] = of_row[index] if index < len(of_row) else ""
            bars = [line.start() + found.start() for found in re.finditer(r"\|", line[0])]
            for column, (left, right) in enumerate(pairwise(bars), 1):
                words |= {"head": heads[column]}
                if said := label(self.text[left + 1 : right]):
                    words[str(column)] = said
                query = of_column.get(column, "")
                for word in ("row", "head", *map(str, range(1, column))):
                    query = query.replace(f"{{{word}}}", words.get(word, ""))
                whole = self.text[slice(*line.span())]
                self.cell(query, left + 1, right, whole, f" in column {column}")

    def cell(self, query: str, start: int, end: int, whole: str, where: str) -> None:
        if not NUMBER.search(self.plain, start, end):
            return
        try:
            queries = [one for part in split(query) for one in each_number(part)]
        except WRONG as error:
            self.wrong(f"{error} for", whole)
            return
        self.give(queries, start, end, whole, where)

    def give(self, queries: list[str], start: int, end: int, whole: str, where: str) -> None:
        """Give the numbers of a place these queries, in their order."""
        numbers = list(NUMBER.finditer(self.plain, start, end))
        if len(numbers) != len(queries):
            self.wrong(f"{len(numbers)} numbers, {len(queries)} queries{where} of", whole)
            return
        for number, query in zip(numbers, queries, strict=True):
            said = whole if where else self.sentence(start, end, number.start())
            figure = Figure(self.name, number.start(), number[0], as_line(said), query)
            self.figures.append(figure)

    def sentence(self, start: int, end: int, place: int) -> str:
        """The sentence in which something stands."""
        for found in SENTENCE.finditer(self.text, start, end):
            if found.start() <= place < found.end():
                return found[0]
        return self.text[start:end]

    def quantified(self, start: int, end: int) -> list[str]:
        """The sentences of findings that say all, every, only, never or at most."""
        said = [found[0] for found in SENTENCE.finditer(self.plain, start, end)]
        said = [one for one in said if QUANTIFIED.search(one) and not one.strip().startswith("#")]
        return said if self.name in CLAIMS_IN else []


def parse(name: str, text: str) -> Document:
    """Find the numbers of a document and give each its query."""
    parser = _Parser(name, text)
    for found in re.finditer(r"(?:^.*\S.*\n?)+", parser.plain, re.M):
        parser.paragraph(*found.span())
    return Document(tuple(parser.figures), tuple(parser.claims), tuple(parser.problems))
