"""Outputs: functions that turn runs into the content of a file.

An output is a function of runs and `TableOptions` that returns text or bytes. `OUTPUTS` has an
output for each supported file extension. A session writes one run to a file. ``dpbench show`` can
write several runs to one file, but some outputs refuse several runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.core.errors import ConfigurationError, DpbenchError, own_line
from dpbench.core.files import in_words, write_bytes
from dpbench.core.registry import OUTPUTS
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import COLUMNS
from dpbench.results.run import Run

if TYPE_CHECKING:
    from dpbench.show.view import TableOptions

Output = Callable[[Sequence[Run], "TableOptions"], str | bytes]


def write_output(kind: str, path: Path, runs: Sequence[Run], view: TableOptions) -> None:
    """Write runs to a file with the output ``kind``. If the output fails, the file stays unchanged.

    Raises:
        ConfigurationError: the file cannot be written, or an output from outside dpbench failed.
    """
    output: Output = OUTPUTS[kind]
    try:
        content = output(runs, view)
        write_bytes(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ConfigurationError(in_words(error)) from error
    except Exception as error:
        if isinstance(error, DpbenchError) or OUTPUTS.is_builtin(kind):
            raise
        why = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
        raise ConfigurationError(f"{path}: the output {kind!r} failed: {why}") from error


def json_document(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the document of one run as JSON text. Raise an error for several runs."""
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ConfigurationError(f"a JSON file can have one run only, not {names}: name one run")
    return runs[0].text


def markdown_tables(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the tables of each run. For an interrupted run, a line counts the missing cases."""
    from dpbench.show.export import summary_tables
    from dpbench.show.layout import as_markdown

    text = ""
    for run in runs:
        missing = run.cases_asked - len({outcome.case for outcome in run.outcomes})
        if run.status != COMPLETE and missing > 0:
            text += f"Not complete: {missing} of the requested cases are missing.\n\n"
        text += as_markdown(summary_tables(run, view))
    return text


def labels_text(labels: Mapping[str, str]) -> str:
    """Write the labels of a trainer on one line, e.g. ``clips flat``."""
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def csv_rows(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the long table as CSV, with exact numbers and each trainer's labels.

    The long table has no ratios, because a ratio is computed over all steps, and each row is about
    one step. An apostrophe is put before a text that a spreadsheet would run as a formula, as
    OWASP's "CSV Injection" advises.
    """
    import pandas as pd

    rows = [row for run in runs for row in run.document["rows"]]
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    labels = {outcome.case.trainer: labels_text(outcome.labels) for outcome in outcomes}
    frame["labels"] = frame.trainer.map(labels)
    return frame.map(_no_formula).to_csv(index=False, lineterminator="\n")


def _no_formula(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(tuple("=+-@\t\r")) else cell
