"""The steps of a running loop under the PyTorch profiler: a trace a step, and its rows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from dpbench.case import Case
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.recorders import Recorder, on_cuda
from dpbench.instruments.torch_profiler.files import INSTRUMENT, prepare, write_summary
from dpbench.results.rows import Measurement
from dpbench.settings import Settings

if TYPE_CHECKING:
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

    @cached_property
    def listener(self) -> PhaseAnnotations:
        import torch

        from dpbench.process.profiled import PhaseAnnotations

        prepare(self.directory)
        return PhaseAnnotations(torch.device("cuda" if on_cuda() else "cpu"))

    def start_step(self) -> None:
        import torch

        from dpbench.process.profiled import profiler_of

        if torch._C._autograd._profiler_enabled():
            raise InstrumentError("the script runs the PyTorch profiler itself; there is only one")
        self._profiler = profiler_of(self.listener.on_cuda)
        self._profiler.start()
        self.held.callback(self._stop)
        super().start_step()

    def end_step(self) -> None:
        from dpbench.process.profiled import save

        super().end_step()
        self.close()
        save(self._profiler, self.directory, self.heard - 1)

    def rows(self, case: Case) -> list[Measurement]:
        if not self.heard:
            return []
        import torch

        on_cuda = self.listener.on_cuda
        record: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "torch": torch.__version__,
            "schedule": {"active": 1, "repeat": self.heard},
            "phase_peaks": self.listener.peaks if on_cuda else None,
        }
        return write_summary(case, record, self.directory).rows

    def _stop(self) -> None:
        if self.listener.on_cuda:  # what still runs belongs to this step
            import torch

            torch.cuda.synchronize()
        self._profiler.stop()
