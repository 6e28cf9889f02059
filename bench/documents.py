"""The numbers of the documents, computed again from the evidence that they name.

    python bench/documents.py            # write each number anew, after a new measurement
    python bench/documents.py --check    # only say which are wrong, or have no source

How a number names its source says `bench/sources.py`; `bench/evidence.py` has the words.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.evidence import RESULTS, ROOT
from bench.sources import Claim, Document, Figure, files_of, parse

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/guide.md",
    "docs/findings.md",
    "docs/several-gpus.md",
    "docs/results/README.md",
    "bench/peers/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/upstream").glob("*.md")),
)
SUMS = RESULTS / "SHA256SUMS"
A_LOT = 0.5
"""A number that a measurement changes by more may be another query's: they go by their order."""


def sums() -> dict[str, str]:
    """The checksum of each file of evidence."""
    files = sorted(p for p in RESULTS.iterdir() if p.name not in ("README.md", SUMS.name))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def recorded_sums() -> dict[str, str]:
    """Those of the files from which the documents were written."""
    lines = SUMS.read_text(encoding="utf-8").splitlines() if SUMS.exists() else []
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def changed_evidence(now: dict[str, str], documents: list[Document]) -> list[str]:
    """A line for each file that is not the one from which the documents were written."""
    problems = []
    then = recorded_sums()
    for file in sorted({*now, *then}):
        if now.get(file) != then.get(file):
            all_said: list[Figure | Claim] = []
            for document in documents:
                all_said += [*document.figures, *document.claims]
            said = [one for one in all_said if file in files_of(one.query)]
            rest = "".join(f"\n  {one}" for one in said) or " no sentence"
            problems.append(f"{file} has changed, on which rest:{rest}")
    return problems


def wrong(document: Document) -> list[str]:
    """A line for each number that is not its source's, each claim that does not hold."""
    figures = [f"{f}: its source has {f.renewed}" for f in document.figures if f.text != f.renewed]
    return [*figures, *(f"{c}: not so ({c.query})" for c in document.claims if not c.holds)]


def renewed(text: str, document: Document) -> str:
    """The text with each number as its source has it."""
    for figure in sorted(document.figures, key=lambda f: -f.start):
        end = figure.start + len(figure.text)
        text = f"{text[: figure.start]}{figure.renewed}{text[end:]}"
    return text


def main() -> int:
    """Renew the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    problems = []
    documents = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        document = parse(name, text)
        if not check:
            anew = renewed(text, document)
            changed = sum(f.text != f.renewed for f in document.figures)
            print(f"{name}: {len(document.figures)} numbers, {changed} changed")
            for f in document.figures:
                if abs(float(f.renewed) - float(f.text)) > A_LOT * abs(float(f.text)):
                    print(f"  by much: {f.text} is {f.renewed} now; does its query say the same?")
            path.write_text(anew, encoding="utf-8")
            document = parse(name, anew)
        documents.append(document)
        problems += [*document.problems, *wrong(document)]
    if check:
        problems += changed_evidence(sums(), documents)
    else:
        lines = [f"{digest}  {name}\n" for name, digest in sums().items()]
        SUMS.write_text("".join(lines), encoding="utf-8")
    print("\n".join(problems) or "every number is that of its source")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
