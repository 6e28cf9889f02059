"""The steps of a running loop under the PyTorch profiler: a trace a step, and its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dpbench.case import Case
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.recorders import Recorder, on_cuda
from dpbench.instruments.torch_profiler.files import INSTRUMENT, prepare, write_summary
from dpbench.results.rows import Measurement
from dpbench.settings import Settings

if TYPE_CHECKING:
    from torch.profiler import profile

    from dpbench.process.profiled import PhaseAnnotations


class ProfileRecorder(Recorder):
    """Time, memory and copies by phase and operator, as of a case.

    The profiler is started and stopped around each step that counts, so that nothing else, such
    as an evaluation after the last of them, is in its sums.

    Attributes:
        directory: where the folder of the profile goes.
    """

    name: ClassVar[str] = INSTRUMENT

    def __init__(self, wanted: int | None = None) -> None:
        super().__init__(wanted)
        self.directory = Settings.profile_dir
        self._annotations: PhaseAnnotations | None = None
        self._profiler: profile | None = None  # while a step is recorded

    def start_step(self) -> None:
        import torch

        from dpbench.process.profiled import PhaseAnnotations, profiler_of

        if torch._C._autograd._profiler_enabled():
            raise InstrumentError("the script runs the PyTorch profiler itself; there is only one")
        if self._annotations is None:
            self._annotations = PhaseAnnotations(torch.device("cuda" if on_cuda() else "cpu"))
            prepare(self.directory)
        self._profiler = profiler_of(self._annotations.on_cuda)
        self._profiler.start()
        self._annotations.start_step()

    def switch(self, phase: str) -> None:
        if self._annotations:
            self._annotations.switch(phase)

    def end_step(self) -> None:
        from dpbench.process.profiled import save

        if self._annotations and self._profiler:
            recorded = self._profiler
            self._annotations.end_step()
            self.close()
            save(recorded, self.directory, self.heard)
        super().end_step()

    def rows(self, case: Case) -> list[Measurement]:
        if not (self.heard and self._annotations):
            return []
        import torch

        on_cuda = self._annotations.on_cuda
        record: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "torch": torch.__version__,
            "schedule": {"active": 1, "repeat": self.heard},
            "phase_peaks": self._annotations.peaks if on_cuda else None,
        }
        return write_summary(case, record, self.directory).rows

    def close(self) -> None:
        if self._profiler and self._annotations:
            if self._annotations.on_cuda:  # what still runs belongs to this step
                import torch

                torch.cuda.synchronize()
            self._profiler.stop()
            self._profiler = None
