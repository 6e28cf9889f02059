"""``--dpbench-update``: bring a committed reference up to date, at the end, in the controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.errors import ConfigurationError, check_writable_file

if TYPE_CHECKING:
    from dpbench.plugin.manager import Manager
    from dpbench.results.outcome import Outcome


def reference_to_update(manager: Manager) -> Path | None:
    """The file that the session is to update; None if it is to update none.

    Raises:
        ConfigurationError: no file was named, it cannot be written, or both ways were asked for.
    """
    options = manager.options
    if not (options.dpbench_update or options.dpbench_update_new_only):
        return None
    if options.dpbench_update and options.dpbench_update_new_only:
        raise ConfigurationError("choose one of --dpbench-update and --dpbench-update-new-only")
    named = options.dpbench_compare
    if not named or named.isdecimal():
        raise ConfigurationError("--dpbench-update needs the file: --dpbench-compare=FILE")
    path = Path(manager.config.invocation_params.dir / named)
    check_writable_file(path)
    return path


def update(
    manager: Manager, path: Path, measured: Sequence[Outcome], *, complete: bool = True
) -> str:
    """Put what the session measured into a reference; says what changed.

    A reference stays the run that it was: which of its cases were written later, when and with
    what is listed beside its own environment and session. A new one is this session's run.

    Raises:
        ConfigurationError: the reference was made on another device, or is damaged.
        OSError: it cannot be written; it is as it was.
    """
    from dpbench.results.outcome import write_json
    from dpbench.results.reference import check_same_device, history, updated
    from dpbench.results.run import Run

    old = Run.load(path) if path.exists() else None
    if old is not None:
        check_same_device(old, measured)
    new_only = manager.options.dpbench_update_new_only
    result = updated(old.outcomes if old else (), measured, new_only=new_only)
    premise = manager.saving.premise
    if old is not None and result.written:
        updates = history(old.updates, result.written, premise)
        write_json(path, result.outcomes, old.environment, old.session, updates)
    elif result.written:
        session = manager.saving.session(complete)
        write_json(path, result.outcomes, premise.environment, session)
    return f"{path.name}: {result.rewritten} cases rewritten, {result.added} added"
