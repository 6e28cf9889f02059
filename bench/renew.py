"""Renew the generated blocks of the documents, and the README's picture, from the committed runs.

    python -m bench.renew            # write them anew, after a measurement
    python -m bench.renew --check    # say which are not what the runs say; exit status 1 if any

A block stands between ``<!-- generated: NAME WORDS -->`` and ``<!-- end -->``; `bench.tables` or
`bench.rank_tables` has a function of that name, called with the words, that returns Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import bench.evidence_tables
import bench.rank_tables  # noqa: F401 - both register tables
from bench.cells import TABLES
from bench.runs import BOUNDS, ROOT, path_of, run
from dpbench.core.case import OPTIONAL_AXES, USUAL
from dpbench.results.outcome import LISTS, document_text
from dpbench.results.run import Run
from dpbench.results.schema import json_schema
from dpbench.show.view import TableOptions

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "bench/peers/README.md")
    ),
    *sorted(ROOT.glob("docs/**/*.md")),
]
RUN_SCHEMA = ROOT / "docs" / "run.schema.json"
DERIVED = ("ratios", "throughputs", "measured_over_logical")
PICTURE, PICTURED = ROOT / "docs" / "ratios.svg", "h200-methods-256"
TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc", "lean", "fused")
BLOCK = re.compile(r"(<!-- generated: ([^>\n]+) -->\n)(.*?)(<!-- end -->)", re.S)


def renewed(text: str) -> str:
    """The text of a page with each block as the runs say it.

    Raises:
        LookupError: no table has the name of a block, or a number is not there.
    """

    def block(found: re.Match[str]) -> str:
        name, *words = found[2].split()
        if name not in TABLES:
            raise LookupError(f"no table is called {name!r}")
        return f"{found[1]}{TABLES[name](*words)}\n{found[4]}"

    if text.count("<!-- generated:") != len(BLOCK.findall(text)):
        raise LookupError("a generated block has no end")
    return BLOCK.sub(block, text)


def outdated(pages: list[Path], *, write: bool) -> list[Path]:
    """The pages with blocks that are not what the runs say; written anew if asked for."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if (anew := renewed(text)) != text:
            found.append(page)
            if write:
                page.write_text(anew, encoding="utf-8")
    return found


def committed_runs() -> list[Path]:
    """The files of runs in the documents and of counts that tests compare."""
    return [
        p
        for p in (*(ROOT / "docs").glob("**/*.json"), BOUNDS)
        if '"rows": [' in p.read_text("utf-8")
    ]


def shortened(text: str) -> str:
    """A run without the lists that follow from its rows, and without axes at their default.

    It is about half as long, and reads the same.
    """
    document = {name: part for name, part in json.loads(text).items() if name not in DERIVED}
    for part in ("cases", *LISTS):
        for entry in document.get(part, ()):
            for axis in OPTIONAL_AXES:
                if entry.get(axis) == USUAL[axis]:
                    del entry[axis]
    return document_text(document)


def picture() -> str:
    """The README's picture: what its first table has, as bars."""
    from dpbench.show.picture import svg  # needs Matplotlib

    whole = run(path_of(PICTURED))
    outcomes = [each for each in whole.outcomes if each.case.trainer in TRAINERS]
    return svg([Run.of(whole.name, outcomes, whole.environment)], TableOptions())


def main() -> int:
    """Renew the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    pages = outdated(PAGES, write=not check)
    if not check:
        PICTURE.write_text(picture(), encoding="utf-8")
        RUN_SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
        for path in committed_runs():
            path.write_text(shortened(path.read_text(encoding="utf-8")), encoding="utf-8")
    for page in pages:
        print(f"{page.relative_to(ROOT)}: {'not what the runs say' if check else 'renewed'}")
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
