"""``--dpbench-save``, ``--dpbench-autosave``, ``--dpbench-resume``: the session's own run file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from dpbench.plugin.manager import Manager
    from dpbench.results.outcome import Outcome
    from dpbench.results.session import Premise, RunFile

KEY = "dpbench_saving"
"""Where an xdist worker finds what its controller decided."""


class Saving:
    """The session's premise and, if it is saved, its file, in each process that runs tests.

    The controller takes a number in the storage before anything is measured; whichever process
    measures a case writes it there.

    Raises:
        ConfigurationError: the storage cannot be written, or there is nothing to resume.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.options = manager.options
        self.file: RunFile | None = None
        self.failure: OSError | None = None
        """Why the file is not up to date."""
        self.notes: list[str] = []
        """What the summary says about saving."""
        self.kept: list[Outcome] = []
        """Outcomes of the session that this one resumes."""
        self.partial = False
        """Whether the tests ask for fewer cases than those of the session that this one resumes, or
        were never collected."""
        if manager.is_worker:
            self._take_over(manager.config.workerinput[KEY])  # type: ignore[attr-defined]
        elif manager.runs_tests:
            self._begin()

    @cached_property
    def premise(self) -> Premise:
        """What the session measures, with what and where; asks git, so only where it is needed."""
        from dpbench.instruments.ncu.ranges import Ncu, ncu_version
        from dpbench.results.outcome import environment
        from dpbench.results.session import Premise

        manager = self.manager
        paths = [i.path for i in manager.instruments if isinstance(i, Ncu)]
        found = environment(
            manager.gpu,
            ncu=ncu_version(paths[0]) if paths else None,
            project=manager.config.invocation_params.dir,
        )
        workers = getattr(self.options, "numprocesses", None) or 0
        return Premise.now(found, manager.grid, manager.instruments, workers)

    @property
    def is_asked_for(self) -> bool:
        """Whether the session has a file of its own."""
        return bool(
            self.options.dpbench_save is not None
            or self.options.dpbench_autosave
            or self.options.dpbench_resume
        )

    def _begin(self) -> None:
        named = self.options.dpbench_save is not None
        if named and self.options.dpbench_autosave:
            raise ConfigurationError("--dpbench-autosave names the run itself: drop --dpbench-save")
        if not self.is_asked_for:
            return
        from dpbench.results.session import RunFile
        from dpbench.results.storage import Storage

        storage = Storage(storage_directory(self.manager))
        device = self.manager.gpu.name if self.manager.gpu else None
        if self.options.dpbench_resume:
            run, self.notes = storage.interrupted(device)
            if run is not None:
                self.file, self.kept = RunFile.resume(storage, run, self.premise)
                self.premise = self.file.premise
                self.partial = True
                return
            if not (named or self.options.dpbench_autosave):
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
        name = self.options.dpbench_save
        self.file = RunFile.create(storage, name, device, self.premise)

    def expect(self, cases: Collection[str]) -> None:
        """The session's tests ask for these cases of the grid, by id."""
        kept = {outcome.case.id for outcome in self.kept}
        asked = len({*cases, *(case.id for case in self.manager.grid.cases() if case.id in kept)})
        if self.file is not None:
            self.partial = asked < self.file.premise.cases_asked
            asked = max(asked, self.file.premise.cases_asked)
            self.file.premise = replace(self.file.premise, cases_asked=asked)
        if self.file is not None or self.options.dpbench_json:
            self.premise = replace(self.premise, cases_asked=asked)

    def for_worker(self) -> dict[str, Any]:
        """What `_take_over` needs, as plain types."""
        writes = self.file or self.options.dpbench_json
        return {
            "file": str(self.file.path) if self.file else None,
            "premise": dict(vars(self.premise)) if writes else None,
        }

    def _take_over(self, given: Mapping[str, Any]) -> None:
        if given["premise"] is None:
            return
        from dpbench.results.session import Premise, RunFile

        self.premise = Premise(**given["premise"])
        if given["file"]:
            self.file = RunFile(Path(given["file"]), self.premise)

    def write(self, outcomes: Sequence[Outcome], complete: bool = False) -> None:
        """Bring the session's file up to date; `end` says if that did not succeed at last."""
        if self.file is None or not outcomes:
            return
        comparing = self.manager.comparing
        try:
            self.file.write(
                outcomes,
                complete=complete,
                regressions=comparing.regressions,
                unjudged=comparing.unjudged,
            )
            self.failure = None
        except OSError as error:  # what the file held is still there
            self.failure = error

    def session(self, complete: bool = False) -> dict[str, Any]:
        """The ``session`` part of any document that is written now."""
        status = "complete" if complete else "interrupted"
        comparing = self.manager.comparing
        return self.premise.session(status, comparing.regressions, comparing.unjudged)

    def end(self, outcomes: Sequence[Outcome]) -> None:
        """Let go of the file; one in which nothing stands is removed.

        Raises:
            ConfigurationError: it could not be written.
        """
        if self.file is None:
            return
        if self.failure is not None:
            raise ConfigurationError(self.file.give_up(self.failure)) from self.failure
        if outcomes:
            self.file.close()
            self.notes.append(f"saved {_shown(self.file.path)}")
        else:
            self.file.discard()


def storage_directory(manager: Manager) -> Path:
    """Where runs are saved and references found."""
    return Path(manager.config.invocation_params.dir / manager.options.dpbench_storage)


def _shown(path: Path) -> Path:
    """The path from here, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
