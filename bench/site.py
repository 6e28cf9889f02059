"""Hooks with which MkDocs adds pages to the site, such as the README, and adapts links."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import dpbench

ROOT = Path(__file__).parents[1]

TOP = {
    "index.md": "README.md",
    "zh.md": "README.zh-CN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
"""Files in the repository's top folder, by the page of the site that shows the file."""

API = {
    "Cases and metrics": ("core",),
    "Private training": ("private",),
    "Trainers": ("training",),
    "Workloads": ("workloads",),
    "Instruments and results": ("instruments", "child", "launch", "results"),
    "Advice": ("advice",),
}
"""Packages whose public names a section shows, by section of the page about the Python API."""

LONG = ("GRIDS", "METRICS")
"""Names whose values are too long to show."""

OBJECT = """\
::: {module}.{name}
    options:
      heading: dpbench.{name}
      toc_label: {name}
      show_attribute_values: {value}
"""
"""Text that mkdocstrings replaces by the docstring of a public object."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
"""Matches the target of a Markdown link to this repository, without the part after ``#``."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set links to the repository that GitHub Actions names, or else to ``YOU/dpbench``."""
    config.repo_name = os.environ.get("GITHUB_REPOSITORY", "YOU/dpbench")
    config.repo_url = f"https://github.com/{config.repo_name}"
    owner, _, name = config.repo_name.partition("/")
    config.site_url = f"https://{owner}.github.io/{name}/"
    return config


def api_page() -> str:
    """Return the page of the Python API, with a placeholder for the docstring of each object."""
    lines = ["# Python API", "Everything here is imported from `dpbench`."]
    for section, packages in API.items():
        lines.append(f"## {section}")
        for module, names in dpbench._NAMES_BY_MODULE.items():
            if module.split(".")[1] in packages:
                for name in names:
                    value = name not in LONG
                    lines.append(OBJECT.format(module=module, name=name, value=value))
    return "\n\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages in `TOP` and the page of the Python API to the site."""
    contents = {page: (ROOT / source).read_text("utf-8") for page, source in TOP.items()}
    for page, content in {**contents, "api.md": api_page()}.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change a page's links so that they lead to pages of the site or to files on GitHub."""
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
