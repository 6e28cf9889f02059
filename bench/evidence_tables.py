"""Make the documents' tables about diffs to Opacus, about other libraries and about run files."""

from __future__ import annotations

import re
import tomllib
from functools import partial
from statistics import median

from bench.cells import Place, by_length, by_trainer, cost, gb, joined, markdown, ms, table
from bench.runs import RESULTS, file_of, printed, value
from bench.tables import WORDS

CHANGES: dict[str, list[str]] = WORDS["changes"]


# --- diffs to Opacus ------------------------------------------------------------------------------


@table
def saved(folder: str = "", *pages: str) -> str:
    """Return how many logical GB the changes of pages save in a step, by default all `CHANGES`.

    Args:
        folder: path from the document to docs/upstream, with a slash at its end.
        pages: names of pages.
    """
    rows = []
    for page in pages or CHANGES:
        what, *trainers = CHANGES[page]
        for trainer in trainers:
            before, after = (printed("upstream.txt", name, trainer) for name in ("Opacus", page))
            numbers = (f"{b - a:.1f}" for b, a in zip(before[1:], after[1:], strict=True))
            rows.append([f"[{page}]({folder}{page}.md): {what}", trainer, *numbers])
    return markdown(["change", "of", "GB saved at 8 × 256, fp32", "bf16"], rows)


@table
def diff(page: str, *trainers: str) -> str:
    """Return the logical GB of a step with the installed Opacus and with the diff of a page."""
    rows = []
    for trainer in trainers:
        _, *before = printed("upstream.txt", "Opacus", trainer)
        _, *after = printed("upstream.txt", page, trainer)
        rows.append([trainer, *(f"{n:.1f}" for n in (before[0], after[0], before[1], after[1]))])
    return markdown(["", "fp32", "with it", "bf16", "with it"], rows)


@table
def diff_ranks(*pages: str) -> str:
    """Return what `bench/upstream_ranks.py` printed for Opacus and for the diffs of these pages."""
    rows = []
    for page in ("Opacus", *pages):
        # The counts of checks are left out: the file is older than the check "tokens alike".
        update, sent, noise, alike, *_ = printed("upstream-ranks.txt", page)
        rows.append([page, f"{update:.1f}", sent, noise, alike])
    return markdown(["", "update differs by", "sent GB", "noise GB", "r of one seed"], rows)


# --- other libraries, and files -------------------------------------------------------------------


@table
def peers() -> str:
    """Return the logical bytes of a step with other libraries, with Opacus and with dpbench."""
    names = ("dpsgd", "backpack", "dpsgd_ghost", "fastdp", "fastdp:origin_params=embedding")
    rows = []
    for trainer in ("standard", *names, "fused"):
        row = [f"`{trainer}`"]
        for file in ("counted-peers-two-layers", "counted-peers"):
            logical = partial(value, file, "logical_bytes")
            moved, standard = logical(trainer=trainer), logical(trainer="standard")
            row += [f"{moved / 1e9:.1f}", f"{moved / standard:.2f}"]
        rows.append(row)
    return markdown(["trainer", "GB, two layers", "÷ standard", "GB, `1b`", "÷ standard"], rows)


@table
def peers_measured() -> str:
    """Return the cost of private training by other libraries on an H200."""
    places = {place.shown: place for place in by_length("peers", ("tf32", "bf16"))}
    names = ("fastdp", "fastdp:origin_params=embedding", "fused", JAX)
    return by_trainer(places, names, cell=lambda p, t: jax_cost(p) if t == JAX else cost(p, t))


JAX = "jax-privacy"


def jax_cost(place: Place) -> str:
    """Return time and DRAM bytes of a step of jax-privacy, divided by those of ``standard``."""
    if place.precision != "tf32":
        return "-"
    text = (RESULTS / f"h200-jax-{place.cell.partition('x')[2]}.txt").read_text("utf-8")
    seconds, read, written = (
        median(map(float, re.findall(rf"cupti +step +{name} +(\S+)", text)))
        for name in ("step_time_seconds", "dram_read_bytes", "dram_write_bytes")
    )
    time, moved = 1e3 * seconds / ms(place, "standard"), (read + written) / 1e9
    return f"{joined((time, moved / gb(place, 'standard')))}, -"


@table
def evidence() -> str:
    """Return the names of the files in docs/results, and the command that made each file."""
    kinds = tomllib.loads((RESULTS / "evidence.toml").read_text(encoding="utf-8"))
    files = {file_of(name): f"dpbench run {o} --json …" for name, o in kinds["measured"].items()}
    files |= kinds["counted"] | kinds["printed"] | kinds["recorded"]
    rows = ([f"`{file}`", f"`{command}`"] for file, command in files.items())
    return markdown(["file", "command"], rows)
