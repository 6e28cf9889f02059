"""Tests that each document and public name is on the site, and that links work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the extra docs is not installed")

import dpbench
from bench.site import ROOT, TOP


@pytest.fixture(scope="session")  # a worker that steals tests comes back to it
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a missing link target or heading raises an error."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra docs is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setenv("GITHUB_REPOSITORY", "someone/dpbench")
        into = tmp_path_factory.mktemp("site")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(into)))
    return into


def folder_of(document: str) -> str:
    return re.sub(r"(?:(?<=/)README|^index|(?<=[^/]))\.md$", "", document)


def text_of(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_each_document_is_a_page(site: Path) -> None:
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")}
    for document in {*documents, *TOP}:
        assert "<h1" in text_of(site, folder_of(document))


def test_each_page_of_the_navigation_is_built(site: Path) -> None:
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(listed) == len({*listed}) > len(TOP)
    for document in listed:
        assert "<h1" in text_of(site, folder_of(document))


def test_each_public_name_is_on_the_page_of_the_python_api(site: Path) -> None:
    api = text_of(site, "api")
    named = re.findall(r"<h3[^>]*>\s*dpbench\.(\w+)", api)
    assert sorted(named) == sorted(name for name in dpbench.__all__ if name != "__version__")
    assert "<code>noise_multiplier</code>" in api
    assert "σ" in api


def test_links_to_other_files_lead_to_the_repository(site: Path) -> None:
    at = "https://github.com/someone/dpbench/blob/main/"
    assert f'"{at}docs/results/upstream.txt"' in text_of(site, "upstream/kept")
    assert 'href="../contributing/#add-a-trainer"' in text_of(site, "guide")


def test_tables_behind_a_comment_are_tables(site: Path) -> None:
    findings = text_of(site, "findings")
    assert findings.count("<table>") == 9
    assert "|---" not in findings


def test_committed_runs_are_not_copied(site: Path) -> None:
    assert [*(site / "results").glob("*")] == [site / "results/index.html"]
    runs = {path.name for path in (ROOT / "docs/results").iterdir()}
    assert not runs & {path.name for path in site.rglob("*")}
