"""Hooks of MkDocs: pages of the top folder, and links and blocks as Python-Markdown takes them."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

TOP = {
    "index.md": "README.md",
    "zh.md": "README.zh-CN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
"""Pages of the site that stand in the repository's top folder."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
"""The target of a link or picture, without what follows ``#``; none of other sites."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository that GitHub builds, or to a placeholder as in the guide."""
    config.repo_name = os.environ.get("GITHUB_REPOSITORY", "YOU/dpbench")
    config.repo_url = f"https://github.com/{config.repo_name}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder."""
    for page, source in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site, or else to files of the repository."""
    here = PurePosixPath(TOP.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def linked(found: re.Match[str]) -> str:
        path = os.path.normpath(here / found[0])
        pages = {source: page for page, source in TOP.items()}
        uri = pages.get(path, path.removeprefix("docs/"))
        there = files.get_file_from_path(uri)
        if there and there.inclusion.is_included():
            return os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)
        exists = (ROOT / path).exists()
        return f"{config.repo_url}/blob/main/{path}" if exists else found[0]

    return re.sub(r"^(<!--.*?-->)$", r"\n\1\n", LINK.sub(linked, markdown), flags=re.M | re.S)
