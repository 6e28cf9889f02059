"""One session: cases × instruments → a run. ``pytest`` and ``dpbench run`` both are one.

It measures each case once, however many processes ask; writes its files as it goes; goes on with
a run that broke off; and at its end compares, and says what is wrong.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import SCRIPT
from dpbench.comparison import Comparison, asked_for
from dpbench.errors import ConfigurationError
from dpbench.files import check_writable, in_words, is_stream, printable, write_text
from dpbench.results.rows import NO_HARDWARE
from dpbench.show.view import View

if TYPE_CHECKING:
    from dpbench.case import Case
    from dpbench.gpu import Gpu
    from dpbench.instruments.base import Instrument
    from dpbench.results.gate import CasesAsked
    from dpbench.results.outcome import Outcome, OutcomeStore
    from dpbench.results.run import Run
    from dpbench.settings import Settings
    from dpbench.show.layout import Table


DERIVE_SECONDS = 60.0
"""How often ratios and tables are written before a session's end."""


class Session:
    """A session, in each process that takes part in it.

    The first process begins and finishes it. Others (xdist workers) are given what it has `shared`.

    Args:
        settings: what was asked for.
        instruments: what measures a case, unless others are named; may be none.
        gpu: where, if on a GPU.
        workers: how many other processes there are.
    """

    def __init__(
        self,
        settings: Settings,
        instruments: Sequence[Instrument],
        gpu: Gpu | None,
        *,
        workers: int = 0,
    ) -> None:
        self.settings = settings
        self.instruments = list(instruments)
        self.gpu = gpu
        self.workers = workers
        self.grid = settings.chosen_grid()
        self.view = View.of(settings, self.grid.baseline)
        self.directory: Path | None = None
        """Where the session's processes leave their outcomes for each other."""
        self.path: Path | None = None
        """The run's file in the storage, whole at any moment."""
        self._held = ExitStack()
        """What keeps other sessions from that file."""
        self.began = self._derived = time.monotonic()  # the clock that nobody sets
        self.comparison = Comparison(settings, self.sources)
        self.regressions: list[dict[str, Any]] = []
        """What got worse by more than it may, as plain rows."""
        self.unjudged: list[dict[str, Any]] = []
        """What limits could not judge, as plain rows."""
        self.notes = self.comparison.notes
        self.problems: list[str] = []
        """Lines about how the session went; with a problem it has not succeeded."""
        self._tests: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        """Which tests asked for a case (id, what measured it), and what each added to it."""
        self.update_environment: Callable[[dict[str, Any]], object] = lambda environment: None
        self.update_document: Callable[[dict[str, Any]], object] = lambda document: None
        self.not_measured: Mapping[str, str] = {}
        """Why cases that were asked for have no outcome, by id."""
        self._file_error: OSError | None = None

    # --- before anything is measured ---------------------------------------------------------

    def begin(self) -> None:
        """Check the instruments, choose references, take a number in the storage."""
        if self.settings.html:
            from dpbench.show.html import check_libraries

            check_libraries()
        for instrument in self.instruments:
            instrument.check()
        self.comparison.begin()
        if self.settings.saves:  # last: takes a number only if all else is well
            self._open_file()

    @property
    def device(self) -> str | None:
        """What the instruments measure on; None without hardware."""
        if not any(instrument.hardware for instrument in self.instruments):
            return None
        return self.gpu.name if self.gpu and self.settings.device == "cuda" else "cpu"

    @property
    def sources(self) -> list[tuple[str, str]]:
        """Each (device, instrument) that the session can have rows of; tests may always count."""
        pairs = [
            (str(self.device) if i.hardware else NO_HARDWARE, i.name) for i in self.instruments
        ]
        pairs += [(NO_HARDWARE, "logical")] if self.settings.of_pytest else []
        return list(dict.fromkeys(pairs))

    @cached_property
    def begun(self) -> Run:
        """The session before its first case; asks git, so only where it is needed."""
        from dpbench.results.conditions import begun, environment

        tools = {name: version for i in self.instruments for name, version in i.versions.items()}
        described = environment(
            self.gpu if self.device else None,
            tools=tools,
            project=self.settings.directory.absolute(),
        )
        self.update_environment(described)
        return begun(described, self.grid, self.instruments, self.workers)

    def _open_file(self) -> None:
        """Take the next number in the storage, or an interrupted run's, and hold its file."""
        from dpbench.results.conditions import automatic_name, resumed
        from dpbench.results.run import Run
        from dpbench.results.storage import Storage

        settings, storage = self.settings, Storage(self.settings.storage)
        path = None
        if settings.resume:
            path, skipped = storage.interrupted(self.device)
            self.notes += skipped
        with ExitStack() as held:
            if path is not None:
                check_writable(path.parent)
                held.enter_context(storage.writing(path))  # before it is read
                run = Run.load(path)
                self.begun = resumed(run, self.begun)
                for outcome in run.outcomes:
                    if outcome.error is None:
                        self.store.keep(outcome)
            elif settings.save is None and not settings.autosave:
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
            else:
                name = automatic_name(self.begun) if settings.save is None else settings.save
                text = json.dumps(self._document((), complete=False))
                path = storage.allocate(name, self.device, text)
                held.enter_context(storage.writing(path))
            self.path, self._held = path, held.pop_all()

    # --- for other processes of the session --------------------------------------------------

    def shared(self) -> bytes:
        """What `join` needs, pickled."""
        writes = self.path or self.settings.files
        names = ["path", "began", *(["begun"] if writes else [])]
        own = {"directory": self.store.directory} | {name: getattr(self, name) for name in names}
        comparison = {name: vars(self.comparison)[name] for name in ("named", "candidates")}
        return pickle.dumps((own, comparison))

    def join(self, shared: bytes) -> None:
        """Take part in a session that another process has begun."""
        own, comparison = pickle.loads(shared)
        vars(self).update(own)
        vars(self.comparison).update(comparison)

    @cached_property
    def store(self) -> OutcomeStore:
        """The outcomes of all processes, in a directory that is made when it is needed."""
        from dpbench.results.outcome import OutcomeStore

        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="dpbench-"))
        return OutcomeStore(self.directory)

    # --- measuring ---------------------------------------------------------------------------

    def measure(self, case: Case, instruments: Sequence[Instrument] | None = None) -> Outcome:
        """The outcome of a case, by these instruments or the session's; it is written at once."""
        from dpbench.runner import measure

        chosen = self.instruments if instruments is None else instruments
        on_gpu = self.settings.device == "cuda" and any(i.hardware for i in chosen)
        checks = on_gpu and case.workload != SCRIPT and not self.settings.try_anyway
        gpu = self.gpu if checks else None  # what it must fit
        fresh: list[Outcome] = []

        def measure_now(case: Case) -> Outcome:
            fresh.append(measure(case, chosen, gpu=gpu))
            return fresh[0]

        outcome = self.store.once(case, measure_now, by=[i.name for i in chosen])
        if fresh:
            self.write()  # at once, so that a killed session keeps what it has
        return outcome

    def outcomes(self) -> list[Outcome]:
        """What the session has measured and counted, by any of its processes."""
        from dpbench.results.outcome import each_once

        known = [] if self.directory is None else self.store.outcomes()
        return [*map(self._with_tests, each_once(known))]

    def _with_tests(self, outcome: Outcome) -> Outcome:
        """An outcome with the tests that asked for it, beside those that a resumed run had."""
        asked = self._tests.get((outcome.case.id, "+".join(outcome.instruments)), ())
        tests, extra_info = list(outcome.tests), dict(outcome.extra_info)
        for test, added in asked:
            tests += [test] if test not in tests else []
            extra_info |= added
        return replace(outcome, tests=tuple(tests), extra_info=extra_info) if asked else outcome

    def note_test(self, case: str, by: str, test: dict[str, Any], added: dict[str, Any]) -> None:
        """A test asked for a case, by its id, and what measured it, and added to it."""
        self._tests.setdefault((case, by), []).append((test, added))

    # --- files -------------------------------------------------------------------------------

    def write(self, *, complete: bool = False, last: bool = False) -> None:
        """Bring the run and the files up to date; at the last also the page, and pipes.

        What follows from the rows is worked out seldom before that: it takes as long as dozens of
        cases that are counted, and a killed session needs its rows.
        """
        files = self.settings.files
        if not last:
            files = {n: path for n, path in files.items() if n != "html" and not is_stream(path)}
        derive = last or time.monotonic() - self._derived > DERIVE_SECONDS
        if not ((self.path or files) and self.outcomes()):
            return
        from dpbench.results.outcome import write_document
        from dpbench.show.export import write_renderings

        with self.store.lock():
            outcomes = self.outcomes()
            document = self._document(outcomes, complete, derive=derive)
            self.update_document(document)
            if self.path:
                self._file_error = None
                try:
                    write_document(self.path, document)
                except OSError as error:
                    self._file_error = error
            with self.reporting_problems():
                if "json" in files:
                    write_document(files["json"], document)
            with self.reporting_problems():
                if derive:
                    asked = 0 if complete else document["session"]["cases_asked"]
                    missing = max(0, asked - len({outcome.case for outcome in outcomes}))
                    write_renderings(outcomes, self.view, missing=missing, **files)
                    self._derived = time.monotonic()
            with self.reporting_problems():
                if "html" in files:
                    self._write_page(files["html"], document)

    def _document(
        self, outcomes: Sequence[Outcome], complete: bool, *, derive: bool = False
    ) -> dict[str, Any]:
        """The session so far; it says ``interrupted`` until it is over."""
        from dpbench.results.outcome import COMPLETE, INTERRUPTED, document

        began = deepcopy(self.begun.session)  # a hook may change it
        session = began | {
            "cases_asked": max(began["cases_asked"], self._cases_of(outcomes)),
            "seconds": round(began["seconds"] + time.monotonic() - self.began, 1),
            "status": COMPLETE if complete else INTERRUPTED,
            "regressed": bool(self.regressions or self.unjudged),
            "regressions": list(self.regressions),
            "unjudged": list(self.unjudged),
            "not_measured": dict(self.not_measured),
        }
        return document(outcomes, self.begun.environment, session, derive=derive)

    def _cases_of(self, outcomes: Sequence[Outcome]) -> int:
        """How many cases are asked for, as far as is known, or are of the grid and measured."""
        measured = {outcome.case for outcome in outcomes}.intersection(self.grid.cases())
        return len(measured.union(case for case, _ in self.comparison.asked))

    @contextmanager
    def reporting_problems(self) -> Iterator[None]:
        """Let what cannot be written keep nothing else from being done."""
        try:
            yield
        except ConfigurationError as error:
            self.problem(str(error))
        except OSError as error:
            self.problem(in_words(error))

    def problem(self, text: str) -> None:
        """Something that the session must not hide; said once."""
        if printable(text) not in self.problems:
            self.problems.append(printable(text))

    # --- the end -----------------------------------------------------------------------------

    def finish(self, *, complete: bool, limited: CasesAsked | None = None) -> None:
        """Compare, write everything for the last time, let go of the file.

        Args:
            complete: whether every case that was asked for has an outcome, or a reason why not.
            limited: what the command line's limits are for, if not for all that is asked for.
        """
        outcomes = self.outcomes()
        with self.reporting_problems():
            self._compare(outcomes, self.comparison.asked if limited is None else limited, complete)
        if self.path is not None:  # a run that it resumes may have been asked for more
            complete = complete and self._cases_of(outcomes) >= self.begun.cases_asked
        self.write(complete=complete, last=True)
        if self.path is not None:
            self._let_go_of(self.path)

    def _write_page(self, path: Path, document: dict[str, Any]) -> None:
        """Write the page of charts; with ``--dpbench-histogram`` beside the reference."""
        from dpbench.show.html.data import Material, labelled
        from dpbench.show.html.page import render

        shown: list[tuple[str, Mapping[str, Any]]] = [(path.stem, document)]
        if self.settings.histogram is not None and self.settings.compares:
            before = self.comparison.reference
            shown[:0] = [(before.name, before.document)] if before.sources else []
        write_text(path, render(Material(labelled(shown), self.view.expected)))

    def _compare(self, outcomes: Sequence[Outcome], limited: CasesAsked, complete: bool) -> None:
        """Show the session beside its reference, and hold to limits what they are for."""
        comparison = self.comparison
        compares = self.settings.compares or comparison.named or self.unjudged  # tests may have
        if not (compares and (outcomes or comparison.limits)):
            return
        run, limits = self.as_run(outcomes), comparison.limits
        asked = [*comparison.asked, *limited, *asked_for(outcomes)]
        comparison.show(comparison.judge(run, limits, asked))
        verdict = comparison.judge(run, limits, limited)
        self.regressions += [row for row in verdict.regressions if row not in self.regressions]
        if limits and not complete:
            self.problem(
                f"the session ended early, so {self.settings.option('compare_fail')} has not "
                f"judged all that was asked for"
            )
            return
        unjudged = [vars(missing) for missing in verdict.unjudged]
        self.unjudged += [row for row in unjudged if row not in self.unjudged]
        for missing in verdict.unjudged:
            self.problem(f"{missing}{comparison.remedy}")

    def as_run(self, outcomes: Sequence[Outcome]) -> Run:
        """The session so far, to be compared."""
        from dpbench.results.run import Run

        return Run.of("this session", outcomes, self.begun.environment, self.begun.session)

    def _let_go_of(self, path: Path) -> None:
        """Let go of the run's file, and say what is saved; one in which no case stands goes."""
        from dpbench.results.run import Run

        cases, holds = 0, ""
        with self._held, suppress(ConfigurationError, OSError):  # gone, or out of reach
            cases = len(Run.load_head(path).document.get("cases", ()))
            holds = f"; the file holds {cases} case{'s' if cases > 1 else ''}"
            if not cases:
                holds = "; nothing is saved"
                path.unlink()
        if self._file_error is not None:
            self.problem(f"{in_words(self._file_error)}{holds}")
        elif cases:
            self.notes.append(f"saved {_shown(path)}")

    def summary(self) -> list[Table]:
        """Every table of the session, the comparison's last."""
        from dpbench.show.export import summary_tables

        outcomes = self.outcomes()
        return [*summary_tables(outcomes, self.view), *self.comparison.tables]

    @property
    def failed(self) -> bool:
        """Whether a case failed, something got worse, or there is a problem."""
        broken = any(o.error and not o.skipped for o in self.outcomes())
        return bool(broken or self.regressions or self.problems)

    def close(self) -> None:
        """Remove the outcomes that its processes shared."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _shown(path: Path) -> Path:
    """The path from here, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
