"""Where trainers were measured: words of the documents' queries (`bench/evidence.py`).

A place is a file, without ``h200-`` and ending, and what chooses a cell in it.
"""

from __future__ import annotations

PRIVATE = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
METHODS = (*PRIVATE, "lean", "ghost_lean", "mixed_ghost", "micro_batch", "book_keeping", "fused")
FP32 = [
    ("methods-256", "8x256", "fp32"),
    ("methods-1024", "8x1024", "fp32"),
    *(("cupti-grid1-1", cell, "fp32") for cell in ("16x256", "16x1024")),
]
ALL = [
    *FP32,
    ("methods-256", "8x256", "bf16"),
    ("methods-1024", "8x1024", "bf16"),
    *(("methods-tf32", cell, "tf32") for cell in ("8x256", "8x1024")),
    *(("methods-16x1024", "16x1024", p) for p in ("tf32", "bf16")),
]
SESSIONS = (
    *("methods-256", "methods-1024", "methods-tf32", "methods-16x1024"),
    *(f"{tool}-grid1-{n}" for tool in ("cupti", "ncu") for n in (1, 2, 3)),
    *("ncu-methods-256", "ncu-precisions", "ncu-precisions-16x1024"),
    *("account-fused-256", "account-fused-1024", "opacus-changes"),
)
"""Where the built-in model was measured, each of a clean commit."""

MODELS = (
    *(f"{name}-{length}" for name in ("gpt2", "llama", "bert") for length in (256, 512)),
    *("vit-32", "vit-64", "resnet-64"),
)
