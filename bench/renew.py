"""Generate the documents' tables and the README's picture from the committed runs.

    python -m bench.renew            # write tables and picture, after a measurement
    python -m bench.renew --check    # name pages whose tables differ; then the exit status is 1

A table is between ``<!-- generated: NAME WORDS -->`` and ``<!-- end -->``. The function NAME of
`bench.tables`, `bench.rank_tables` or `bench.evidence_tables` is called with the words and returns
Markdown.
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
from bench.runs import BOUNDS, ROOT, path_of, run, text_of, write_packed
from dpbench.results.outcome import DERIVED, document_text
from dpbench.results.run import Run
from dpbench.results.schema import json_schema, parsed
from dpbench.show.view import TableOptions

TOP = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "bench/peers/README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted(ROOT.glob("docs/**/*.md"))]
RUN_SCHEMA = ROOT / "docs" / "run.schema.json"
PICTURE, PICTURED = ROOT / "docs" / "ratios.svg", "h200-methods-256"
TRAINERS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc", "fused")
BLOCK = re.compile(r"(<!-- generated: ([^>\n]+) -->\n)(.*?)(<!-- end -->)", re.S)


def renewed(text: str) -> str:
    """Return the text of a page with its tables generated anew.

    Raises:
        LookupError: no function has the name of a table, or a run lacks a number.
    """

    def block(found: re.Match[str]) -> str:
        name, *words = found[2].split()
        if name not in TABLES:
            raise LookupError(f"no function makes the table {name!r}")
        return f"{found[1]}{TABLES[name](*words)}\n{found[4]}"

    if text.count("<!-- generated:") != len(BLOCK.findall(text)):
        raise LookupError("a generated table has no end")
    return BLOCK.sub(block, text)


def outdated(pages: list[Path], *, write: bool) -> list[Path]:
    """Return the pages whose tables differ from the runs. With ``write``, renew these pages."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    found = {page: new for page, text in texts.items() if (new := renewed(text)) != text}
    if write:
        for page, new in found.items():
            page.write_text(new, encoding="utf-8")
    return [*found]


def committed_runs() -> list[Path]:
    """Return the files of runs in docs and its folders, and the file that test_bounds.py reads."""
    return [*(ROOT / "docs").glob("**/*.json.xz"), BOUNDS]


def shortened(text: str) -> str:
    """Return the JSON text of a run without lists that can be computed from the run's rows."""
    document = parsed(text.encode())
    if not {*DERIVED} & {*document}:
        return text
    return document_text({name: part for name, part in document.items() if name not in DERIVED})


def picture() -> str:
    """Return the README's picture as SVG. The bars show the run of the README's table."""
    from dpbench.show.picture import svg  # needs Matplotlib

    whole = run(path_of(PICTURED))
    outcomes = [each for each in whole.outcomes if each.case.trainer in TRAINERS]
    return svg([Run.of(whole.name, outcomes, whole.environment)], TableOptions())


def main() -> int:
    """Renew the documents, the schema and the committed runs, or only check the documents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    pages = outdated(PAGES, write=not check)
    if not check:
        PICTURE.write_text(picture(), encoding="utf-8")
        RUN_SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
        for path in committed_runs():
            if (short := shortened(text := text_of(path))) != text:
                write_packed(path, short)
    for page in pages:
        print(f"{page.relative_to(ROOT)}: {'differs from the runs' if check else 'renewed'}")
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
