"""Measures the cost of differentially private training in each phase of a step.

Names of this module are imported on first use, so that ``import dpbench`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "2.0.0"

_NAMES_BY_MODULE = {
    "dpbench.core.case": ("Case", "PHASES", "MODEL_SIZES", "ModelSize"),
    "dpbench.core.grid": ("Grid", "GRIDS"),
    "dpbench.core.errors": ("ConfigurationError", "DpbenchError", "InstrumentError"),
    "dpbench.core.metrics": ("METRICS", "Counters", "Metric", "Peak", "Share", "Sum", "Timed"),
    "dpbench.core.registry": ("MODELS", "OUTPUTS", "TRAINERS", "WORKLOADS"),
    "dpbench.private": ("Private", "make_private"),
    "dpbench.training.base": ("Batch", "TrainerBase"),
    "dpbench.training.standard": ("StandardTrainer",),
    "dpbench.training.dpsgd": (
        "DPFastGradientClippingTrainer",
        "DPGhostClippingTrainer",
        "DPSGDTrainer",
        "mark_phases",
    ),
    "dpbench.training.micro_batch": ("MicroBatchTrainer",),
    "dpbench.training.fused": ("FusedTrainer",),
    "dpbench.workloads.base": ("Workload",),
    "dpbench.workloads.transformer": ("SimpleBigModel", "get_random_dataloader"),
    "dpbench.training.phases": ("in_phase", "phase"),
    "dpbench.instruments.interface": ("Instrument",),
    "dpbench.launch.case_process": ("PendingMeasurement",),
    "dpbench.instruments.cupti.ranges": ("count_ranges",),
    "dpbench.instruments.in_process": ("InProcessInstrument",),
    "dpbench.child.recorder": ("Recorder",),
    "dpbench.core.settings": ("option",),
    "dpbench.instruments.observe": ("observe",),
    "dpbench.results.outcome": ("Outcome",),
    "dpbench.results.rows": ("Measurement",),
    "dpbench.results.report": ("CaseReport",),
    "dpbench.advice.choice": ("Advice", "advise"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dpbench' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
