"""What the instruments that run a case under Nsight Compute have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.instruments.base import CaseFailed, Instrument, check_place
from dpbench.instruments.child import Child, step_command
from dpbench.instruments.ncu.program import diagnose, ncu_version
from dpbench.instruments.ncu.range_report import NothingProfiled, report_path
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.process.schedule import Steps
from dpbench.results.rows import Measurement

EVERY_PHASE = f"regex:{NVTX_DOMAIN}@.*"
"""The NVTX filter that lets through whatever dpbench marked."""


@dataclass(frozen=True)
class NcuInstrument(Instrument):
    """Re-executes a case under Nsight Compute and reads its report.

    One active step is enough: from step to step DRAM bytes differ by less than 0.2 %, and each
    further one adds seconds and, at 400 bytes a kernel launch, megabytes to the report.

    Args:
        directory: where reports and logs go, one folder a configuration.
        path: the ``ncu`` program.
        steps: warm-up and active steps.
        timeout: seconds after which a case is ended.
    """

    replay: ClassVar[str]
    """ncu's replay mode."""

    folder: ClassVar[str] = ""
    """Where the reports lie below a configuration's folder."""

    directory: Path
    path: str
    steps: Steps = Steps(warmup=1, active=1)
    timeout: float = 1800.0

    def check(self) -> None:
        check_place(self.directory, on_gpu=True)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"ncu": ncu_version(self.path)}

    def report(self, case: Case) -> Path:
        return self.directory / report_path(case, self.folder)

    def command_under_ncu(
        self, case: Case, collect: list[str], include: Iterable[str] = (EVERY_PHASE,)
    ) -> list[str]:
        """The whole argument list for one case, caches and clocks left alone.

        Args:
            case: what to run.
            collect: options that say what to collect, and of which kernels.
            include: NVTX filters; a range or kernel is profiled if one of them fits.
        """
        return [
            self.path,
            *("--config-file", "off"),  # a stray config.ncu-cfg would change the run
            *("--replay-mode", self.replay),
            *("--cache-control", "none"),
            *("--clock-control", "none"),
            *("--import-sass", "no"),  # 60 times smaller reports
            "--nvtx",
            *(text for each in include for text in ("--nvtx-include", each)),
            *collect,
            "--force-overwrite",
            *("--export", str(self.report(case))),
            *step_command(case, self.steps, device="cuda", nvtx=True),
        ]

    def launch(self, case: Case, command: list[str]) -> Child:
        """Start a command of `command_under_ncu`."""
        report = self.report(case)
        report.unlink(missing_ok=True)  # or a failed run would leave the last one's numbers
        log = report.with_suffix(".log")
        return Child(command, case=case, log=log, timeout=self.timeout, read=self.read)

    @abstractmethod
    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process with `record_of`, and make rows of its report."""

    def record_of(self, process: Child) -> dict[str, Any]:
        """Wait for a process; returns the record that it printed, its report written."""
        case, log = process.case, process.log
        try:
            record = process.record()
        except CaseFailed as error:
            said = diagnose(case, log)
            # A process that failed by itself leaves nothing to profile; that it failed counts.
            raise error if said is None or isinstance(said, NothingProfiled) else said from None
        if not self.report(case).exists():
            raise diagnose(case, log) or NothingProfiled(f"{case.id}: ncu left no report", log=log)
        return record

    def tool(self, record: Mapping[str, Any]) -> str:
        """The versions behind the rows of a record."""
        return f"ncu {ncu_version(self.path)}, torch {record['torch']}"
