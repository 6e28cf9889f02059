"""Tests that the Chinese README has the commands, links and numbers of the English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```\w*\n.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)]*)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)*")

CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")


def prose(text: str) -> str:
    for pattern in (FENCE, LINK):
        text = pattern.sub("", text)
    return text


def test_it_has_the_blocks_of_the_english_readme() -> None:
    assert FENCE.findall(CHINESE) == FENCE.findall(ENGLISH)


@pytest.mark.parametrize("pattern", [NUMBER, re.compile(r"`[^`\n]+(?:\n[^`\n]+)?`")])
def test_its_prose_has_the_same_numbers_and_code(pattern: re.Pattern[str]) -> None:
    assert sorted(pattern.findall(prose(CHINESE))) == sorted(pattern.findall(prose(ENGLISH)))


def test_it_has_the_links_of_the_english_readme() -> None:
    assert {*LINK.findall(CHINESE)} - {"README.md"} == {*LINK.findall(ENGLISH)} - {
        "README.zh-CN.md"
    }
