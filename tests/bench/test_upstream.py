"""The diffs of docs/upstream are of the installed Opacus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import upstream


@pytest.mark.parametrize("name", upstream.names())
def test_a_diff_applies_to_the_installed_opacus(name: str, tmp_path: Path) -> None:
    upstream.patched(name, tmp_path)
    page = (upstream.PAGES / f"{name}.md").read_text(encoding="utf-8")
    for file in re.findall(r"^\+\+\+ b/(\S+)", page, re.M):
        compile((tmp_path / file).read_text(encoding="utf-8"), file, "exec")
    assert "```diff" in page


def test_each_page_with_a_diff_is_in_the_index() -> None:
    index = (upstream.PAGES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\S+)\.md\)", index)) >= set(upstream.names())
