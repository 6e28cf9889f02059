"""Each number in the prose of a document stands in a block of the same page, or is a constant.

The reference has defaults and limits but no results, and is left out.
"""

from __future__ import annotations

import re

from bench.renew import BLOCK
from tests.bench.test_renew import TEXTS

CONSTANTS = {
    r"\d+ × \d+(?: tokens)?": "a cell: batch size × sequence length",
    r"\d+(?:,? (?:and|or|to) \d+)? tokens|W = \d+": "a length, a number of ranks",
    r"1\.34 B": "the parameters of the built-in model, which tests/workloads holds",
    r"grid's 16 cases": "the cases of grid1",
    r"about \d+ (?:minutes|MB)\b": "how long a command takes, or what it loads",
    r"(?:Opacus|torch|PyTorch|Python|CUDA|Compute|Transformers|driver|pandas|version)\s\d[\d.]*"
    r"(?:(?: to|,) \d[\d.]*)*": "a version",
    r"Apache-2\.0": "a name",
    r"gap of 7 %": "a result of a cited paper",
    r"1\.03 to 1\.17 times": "what tests/bench/test_claims.py reads",
    r"about 1\.4 times the bytes": "what tests/test_docs_readme.py counts",
    r"[Ff]indings?\s\d+(?:(?:,|\sand)\s\d+)*": "numbers of findings",
    r"^#+ \d+\.|^\*\*\d+\.": "the number of a section or an item",
    r"exit status (?:is )?\d|it is 1:": "an exit status",
    r"[Bb]elow 70 %|at (?:most )?1 %|less than 1 %|below 1\b|threshold is 1|becomes 1\b": "a limit",
    r"(?:of|for|with) 64(?: GPUs)?\b|\b0 tests?": "a number of ranks",
    r"\d+ examples": "how often a property is tried, by default",
    r"tries 1000|set to 0\b": "the same in the thorough profile; a default",
    r"\(W − 1\)/W": "a formula",
}
"""What is no result of a measurement or count, and why."""

NUMBER = re.compile(r"(?<![\w.])(?<!\w-)\d+(?:\.\d+)?(?!\w)")
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
"""What has no language was printed: tests print it again, or find it in docs/results."""

NO_PROSE = (
    *(FENCED.pattern, r"`[^`\n]+(?:\n[^`\n]+)?`", r"\]\([^)]*\)", r"<https?://[^>]*>"),
    r"<!--.*?-->",
)


def blank(pattern: str, text: str) -> str:
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.M | re.S)


def without_source(text: str) -> list[str]:
    """The numbers of a page's prose that no block of it has."""
    printed = [block for language, block in FENCED.findall(text) if not language]
    blocks = [block for _, _, block, _ in BLOCK.findall(text)] + printed
    shown = {number for block in blocks for number in NUMBER.findall(block)}
    prose = BLOCK.sub("", text)
    for pattern in (*NO_PROSE, *CONSTANTS):
        prose = blank(pattern, prose)
    return [number for number in NUMBER.findall(prose) if number not in shown]


def test_each_number_in_prose_has_its_block() -> None:
    pages = {*TEXTS} - {"docs/reference.md", "README.zh-CN.md"}
    assert {page: found for page in pages if (found := without_source(TEXTS[page]))} == {}


def test_no_constant_hides_a_number_that_may_be_a_result() -> None:
    for said in ("It moves 44.1 GB.", "The ratio is 4.52 × more.", "It is 1.5 times.", "0.18 %"):
        assert len(without_source(said)) == 1


def test_a_number_of_a_block_or_of_printed_text_may_be_repeated() -> None:
    block = "<!-- generated: step -->\n| 4.52 |\n<!-- end -->\n"
    assert without_source(f"{block}\n```\n31.88\n```\n4.52 and 31.88 times.") == []
    assert without_source(f"{block}\n```bash\nrun 31.88\n```\n4.53 and 31.88 times.") == [
        "4.53",
        "31.88",
    ]


def test_each_kind_of_constant_is_used() -> None:
    for pattern in CONSTANTS:
        assert any(re.search(pattern, text, re.M) for text in TEXTS.values()), pattern
