"""What a number in the documents may be computed from: the vocabulary of their queries.

A query is one Python expression of the names in `VOCABULARY`, numbers, strings, arithmetic,
comparisons, ``and``, ``or``, ``not``, lists and comprehensions; nothing else is evaluated, so that
no attribute, subscript or other name can be reached. A *file* is named without ``h200-`` and
ending, ``"methods-256"`` for ``docs/results/h200-methods-256.json``; *words* choose rows of it:

- a trainer, a precision, a phase (without one, the step), a model (``"dropout"``);
- a cell, ``"8x256"``: batch size × sequence length;
- of several ranks how they share a step and their number, ``"ddp"``, ``"gpus=64"``.

They must leave one number: the mean over counted steps, or the median of timed ones.

Of (file, words) ``gb`` and ``logical`` are DRAM bytes and counted bytes, in GB of 10⁹ bytes,
``ms`` is time, ``peak`` peak memory in GB, ``busy`` the share of the time in which the GPU was
busy, in %, ``sent`` what a rank sends, in GB; the other functions say themselves what they are.
``PRIVATE``, ``TRAINERS``, ``METHODS`` are Opacus's three trainers, with ``"standard"``, and with
dpbench's; ``FP32``, ``ALL``, ``FOUR``, ``MODELS``, and of these ``LANGUAGE``, are where trainers
were measured, each a file and words, and ``SESSIONS`` the files of the built-in model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from bench.bounds import BOUNDS, of_24_layers
from bench.places import ALL, FP32, METHODS, MODELS, PRIVATE, SESSIONS
from dpbench.case import ALL_PHASES
from dpbench.results.frame import of_one_instrument, summarise
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
AGAINST = "logical-against-measured"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?")


class QueryError(ValueError):
    """A query that is outside the vocabulary, or whose words do not leave one number."""


# --- what is read: each number of evidence passes `_read` once -----------------------------------


class _Reads:
    """Which files a query has read, and, for tests, the one reading that is falsified."""

    files: set[str]
    count = 0
    falsified: int | None = None
    factor = 1.0


_reads = _Reads()
_reads.files = set()


def _read(file: str, value: float) -> float:
    _reads.files.add(file)
    _reads.count += 1
    return value * _reads.factor if _reads.count == _reads.falsified else value


@contextmanager
def falsified(reading: int, factor: float) -> Iterator[None]:
    """While it lasts, the queries' ``reading``-th number of evidence, from 1, is another."""
    _reads.falsified, _reads.factor = reading, factor
    try:
        yield
    finally:
        _reads.falsified = None


@cache
def _summary(path: Path) -> dict[str, list[tuple[frozenset[str], float]]]:
    """By metric, the words that describe each number, and the number."""
    summary = of_one_instrument(summarise(_run(path).frame))
    found: dict[str, list[tuple[frozenset[str], float]]] = {}
    measured = summary[(summary.metric != "peak_memory_bytes") | (summary.device != NO_HARDWARE)]
    for row in measured.to_dict("records"):
        cell = f"{row['batch_size']}x{row['seq_len']}"
        layers = f"layers={row['model_size'].split('x')[-2]}" if "x" in row["model_size"] else ""
        ranks = (row["parallel"], f"gpus={row['gpus']}")
        words = (row["trainer"], row["precision"], row["model"], row["phase"], cell, layers, *ranks)
        found.setdefault(row["metric"], []).append((frozenset(words), row["value"]))
    return found


@cache
def _one(path: Path, metric: str, said: tuple[str, ...]) -> float:
    words = {*" ".join(said).replace(",", " ").split()}
    if not words & {*ALL_PHASES}:
        words.add(STEP)
    values = [value for known, value in _summary(path).get(metric, []) if known >= words]
    if len(values) != 1:
        raise QueryError(f"{path.name} has {len(values)} {metric} of {' '.join(said)}")
    return values[0]


def _lines(file: str, start: str) -> tuple[str, list[str]]:
    """The file's name, and its lines that begin so, without what draws a table."""
    [path] = [RESULTS / n for n in (f"{file}.txt", f"{file}.md") if (RESULTS / n).exists()]
    lines = path.read_text(encoding="utf-8").splitlines()
    flat = [" ".join(re.sub(r"[|\\]", " ", line).split()) for line in lines]
    return path.name, [line for line in flat if f"{line} ".startswith(f"{start} ")]


# --- the vocabulary ------------------------------------------------------------------------------


def number(file: str, metric: str, *words: str) -> float:
    """A metric of a run, in its base unit."""
    return _read(run_of(file).name, _one(run_of(file), metric, words))


@cache
def _run(path: Path) -> Run:
    return Run.load(path)


def run_of(file: str) -> Path:
    """The file of a run, measured or counted."""
    counted_here = RESULTS / f"{file}.json"
    return counted_here if counted_here.exists() else RESULTS / f"h200-{file}.json"


def scaled(metric: str, scale: float) -> Callable[..., float]:
    """`number` of one metric, in another unit."""
    return lambda file, *words: number(file, metric, *words) * scale


def counted(trainer: str, cell: str, *words: str) -> float:
    """Counted GB of the 1b model at fp32: of a phase, of an operator."""
    return _read(BOUNDS.name, of_24_layers("bytes", trainer, cell, words)) / 1e9


def calls(trainer: str, cell: str, *words: str) -> float:
    """How often operators are called there."""
    return _read(BOUNDS.name, of_24_layers("calls", trainer, cell, words))


def flops(trainer: str, cell: str, *words: str) -> float:
    """Their operations."""
    return _read(BOUNDS.name, of_24_layers("flops", trainer, cell, words))


def collectives(file: str, *words: str) -> float:
    """How often a rank sends, in a phase or in the step."""
    counts = _run(run_of(file)).document["operators"]
    sending = [(row, f"gpus={row['gpus']}") for row in counts if row["collective_bytes"]]
    found = [row["calls"] for row, ranks in sending if {*words} <= {ranks, *row.values()}]
    if not found:
        raise QueryError(f"{file} has no collectives of {' '.join(words)}")
    return _read(run_of(file).name, float(sum(found)))


def kernels(file: str, *words: str) -> float:
    """GB that kernels of a name, or of a category, moved: of a case, in a phase."""
    return _of_kernels(file, words, "read_bytes", "write_bytes") / 1e9


def kernels_ms(file: str, *words: str) -> float:
    """The time that they took."""
    return _of_kernels(file, words, "seconds") * 1e3


def _of_kernels(file: str, words: tuple[str, ...], *columns: str) -> float:
    rows = _run(run_of(file)).document["kernels"]
    if not (found := [row for row in rows if {*words} <= {*row.values()}]):
        raise QueryError(f"{file} has no kernels of {' '.join(words)}")
    return _read(run_of(file).name, sum(row[column] for row in found for column in columns))


def printed(file: str, start: str, n: int) -> float:
    """Number ``n``, from 1, behind the words with which a line of a printed file begins."""
    counted_here = (RESULTS / f"{file}.txt").exists()
    name, found = _lines(file if counted_here else f"h200-{file}", start)
    known = [NUMBER.findall(line[len(start) :]) for line in found]
    numbers = {of_line[n - 1] for of_line in known if len(of_line) >= n}
    if len(numbers) != 1:
        raise QueryError(f"{name} has {len(found)} lines that begin with {start!r}")
    return _read(name, float(numbers.pop()))


def over(file: str, case: str, n: int) -> float:
    """Of a case of a file: 1 measured GB, 2 counted GB, then ratios by phase, step and peak."""
    text = (RESULTS / f"h200-{AGAINST}.txt").read_text(encoding="utf-8")
    table = text.partition(f"h200-{file}.json: ")[2].partition("\n\nh200-")[0]
    rows = [line.split() for line in table.splitlines() if line.startswith(f"{case}  ")]
    if len(rows) != 1:
        raise QueryError(f"h200-{AGAINST}.txt has {len(rows)} rows {case!r} of {file}")
    return _read(f"h200-{AGAINST}.txt", float(rows[0][len(case.split()) :][n - 1]))


def ceiling(of: str) -> float:
    """What a copy reaches, in GB/ms (``"copy"``), or matrix products at a precision, in FLOP/ms."""
    known = json.loads((RESULTS / "h200-ceilings.json").read_text(encoding="utf-8"))["ceilings"]
    of = of.split()[-1]
    value = known["bandwidth"] * 1e-12 if of == "copy" else known["flops"][of] * 1e-3
    return _read("h200-ceilings.json", value)


def ratios(
    what: Callable[..., float],
    where: list[tuple[str, ...]],
    trainers: tuple[str, ...],
    divisor: str = "standard",
) -> list[float]:
    """``gb`` or another of each trainer ÷ that of the divisor, everywhere."""
    return [what(*place, t) / what(*place, divisor) for place in where for t in trainers]


def more(file: str, *words: str) -> float:
    """Ms that a step takes more than its cell's standard one; the trainer is the last word."""
    ms = VOCABULARY["ms"]
    return float(ms(file, *words) - ms(file, *words[:-1], "standard"))


def idle(file: str, *words: str) -> float:
    """The part of `more` in which the GPU did nothing, in %."""
    ms, busy = VOCABULARY["ms"], VOCABULARY["busy"]
    cases = words, (*words[:-1], "standard")
    private, standard = (ms(file, *case) * (100 - busy(file, *case)) for case in cases)
    return float((private - standard) / more(file, *words))


def seen(what: Callable[..., float], *words: str) -> list[float]:
    """``gb`` or another of one case, in each of the sessions that have measured it."""
    found = []
    for file in SESSIONS:
        with suppress(QueryError):
            found.append(what(file, *words))
    return found


def device(file: str) -> str:
    """Where a run was measured."""
    return str(_run(run_of(file)).devices[0])


def commit(file: str) -> str:
    """The commit whose checkout, without changes, measured it; else nothing."""
    code = _run(run_of(file)).environment["code"]
    return "" if code["dirty"] else str(code["commit"])


def status(file: str) -> str:
    """Whether its session was complete."""
    return _run(run_of(file)).status


def wrote(path: str, text: str) -> bool:
    """Whether a file of the installed Opacus has this text."""
    spec = find_spec("opacus")
    return text in (Path(str(spec and spec.origin)).parent / path).read_text(encoding="utf-8")


def item(values: list[float], place: int) -> float:
    """One of several, from 0."""
    return values[place]


def spearman(first: list[float], second: list[float]) -> float:
    """The rank correlation."""
    return float(pd.Series(first).rank().corr(pd.Series(second).rank()))


FUNCTIONS = (
    *(abs, all, len, max, median, min, sum, spearman, item),
    *(number, counted, calls, flops, collectives, kernels, kernels_ms, printed, over, ceiling),
    *(ratios, more, idle, seen, device, commit, status, wrote),
)

VOCABULARY: dict[str, Any] = {
    "gb": scaled("dram_bytes", 1e-9),
    "logical": scaled("logical_bytes", 1e-9),
    "sent": scaled("collective_bytes", 1e-9),
    "ms": scaled("step_time_seconds", 1e3),
    "peak": scaled("peak_memory_bytes", 1e-9),
    "busy": scaled("gpu_busy_share", 100),
    "TRAINERS": ("standard", *PRIVATE),
    "PRIVATE": PRIVATE,
    "METHODS": METHODS,
    "FP32": FP32,
    "SESSIONS": SESSIONS,
    "ALL": ALL,
    "FOUR": [(file, p) for file in ("methods-256", "methods-1024") for p in ("fp32", "bf16")],
    "MODELS": [(name,) for name in MODELS],
    "LANGUAGE": [(name,) for name in MODELS if name.endswith(("256", "512"))],
    **{function.__name__: function for function in FUNCTIONS},
}

_ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Tuple, ast.List),
    *(ast.Call, ast.Starred, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.GeneratorExp, ast.ListComp, ast.comprehension),
)


@cache
def _compiled(query: str) -> Any:
    try:
        tree = ast.parse(query.strip(), mode="eval")
    except SyntaxError as error:
        raise QueryError(f"{query!r}: {error.msg}") from None
    nodes = list(ast.walk(tree))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if not isinstance(node, _ALLOWED):
            raise QueryError(f"{query!r} has a {type(node).__name__}, which no query may have")
        if isinstance(node, ast.Name) and node.id not in {*VOCABULARY, *bound}:
            raise QueryError(f"{query!r}: {node.id} is not in the vocabulary")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise QueryError(f"{query!r} calls what has no name")
    return compile(tree, "<query>", "eval")


def answer(query: str) -> float | bool | list[float]:
    """What a query comes to: a number, several, or whether a claim holds.

    Raises:
        QueryError: it is outside the vocabulary, or chooses no number or several.
    """
    code = _compiled(query)
    _reads.files, _reads.count = set(), 0
    value: float | bool | list[float] = eval(code, {"__builtins__": {}, **VOCABULARY})
    return value


def files_read() -> frozenset[str]:
    """The names of the files that the last `answer` has read."""
    return frozenset(_reads.files)


def readings() -> int:
    """How many numbers of evidence the last `answer` has read."""
    return _reads.count
