"""Tests that the Chinese README has the commands, tables, links and numbers of the English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```\w*\n.*?^```$", re.M | re.S)
TABLE = re.compile(r"^<!-- generated: .*?<!-- end -->$", re.M | re.S)
LINK = re.compile(r"\]\(([^)]*)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)*")

CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
ADVICE = (ROOT / "docs/guide.md").read_text(encoding="utf-8").partition("## What should I do?")[2]
ADVICE = ADVICE.partition("\n## ")[0]


def prose(text: str) -> str:
    for pattern in (FENCE, TABLE, LINK):
        text = pattern.sub("", text)
    return text


def test_it_has_the_blocks_and_tables_of_the_english_readme() -> None:
    [advise] = FENCE.findall(ADVICE)
    blocks = FENCE.findall(CHINESE)
    blocks.remove(advise)
    assert blocks == FENCE.findall(ENGLISH)
    assert TABLE.findall(CHINESE) == TABLE.findall(ENGLISH)


@pytest.mark.parametrize("pattern", [NUMBER, re.compile(r"`[^`\n]+(?:\n[^`\n]+)?`")])
def test_its_prose_has_the_same_numbers_and_code(pattern: re.Pattern[str]) -> None:
    both = prose(ENGLISH) + prose(ADVICE)
    assert sorted(pattern.findall(prose(CHINESE))) == sorted(pattern.findall(both))


def test_it_has_the_links_of_the_english_readme() -> None:
    assert {*LINK.findall(CHINESE)} - {"README.md"} == {*LINK.findall(ENGLISH)} - {
        "README.zh-CN.md"
    }
