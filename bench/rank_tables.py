"""The tables of several GPUs: what ranks were measured to move, send and wait for."""

from __future__ import annotations

from bench.runs import of_rank, path_of, run, value
from bench.tables import (
    COUNTED_RANKS,
    SENT,
    TABLES,
    Place,
    gb,
    joined,
    markdown,
    ms,
    peak,
    ratio,
    table,
)
from dpbench.results.rows import STEP

__all__ = ["TABLES"]

PAYLOAD, WITH_PROTOCOL = "nvlink_payload_sent_bytes", "nvlink_sent_bytes"

PLACES = {
    "ddp": [
        Place(f"ranks-ddp-{length}", f"8x{length}", precision)
        for precision in ("fp32", "bf16")
        for length in (256, 1024)
    ],
    "fsdp2": [
        Place(f"ranks-fsdp2-{length}", f"8x{length}", precision)
        for precision in ("fp32", "bf16")
        for length in (256, 1024)
    ],
    "lora": [Place("ranks-lora", "8x1024", "bf16")],
    "h100": [
        Place(file, "8x256", precision)
        for file in ("h100-ranks-ddp-256", "h100-ranks-fsdp2-256")
        for precision in ("fp32", "bf16")
    ],
}
"""Where trainers were measured on two GPUs; a cell has the batch of both."""

TRAINERS = {
    "ddp": ("dpsgd", "dpsgd_ghost", "lean", "fused"),
    "fsdp2": ("dpsgd_ghost", "ghost_lean", "fused"),
    "lora": ("dpsgd", "dpsgd_ghost", "lean", "fused"),
    "h100": ("dpsgd", "dpsgd_ghost", "lean", "ghost_lean", "fused"),
}
"""The private trainers of each."""


def cell(place: Place, trainer: str) -> str:
    """Time, bytes of both ranks and peak memory of one, of standard or ÷ it; how busy they were."""
    if trainer not in {*run(path_of(place.file)).frame.trainer}:
        return "-"
    metrics = ms, gb, peak
    if trainer == "standard":
        numbers = joined((metric(place, trainer) for metric in metrics), 1)
    else:
        numbers = joined(ratio(metric, place, trainer) for metric in metrics)
    busy = value(place.file, "gpu_busy_share", trainer=trainer, **place.axes)
    return f"{numbers}; {busy:.0%}"


def head(parallel: str, place: Place) -> str:
    """What a column says of its place."""
    if parallel == "h100":
        return f"{'FSDP2' if 'fsdp2' in place.file else 'DDP'}, {place.precision}"
    return f"4 × {place.cell.partition('x')[2]} a rank, {place.precision}"


@table
def ranks_measured(parallel: str, *trainers: str) -> str:
    """Time, bytes of both ranks, peak memory of one: of standard, and of the others ÷ it; busy."""
    rows = []
    for trainer in ("standard", *(trainers or TRAINERS[parallel])):
        rows.append([trainer, *(cell(place, trainer) for place in PLACES[parallel])])
    rows[0][0] = "standard: ms, GB, GB"
    heads = (head(parallel, place) for place in PLACES[parallel])
    return markdown(["time, bytes, memory; busy", *heads], rows)


@table
def ranks_sent() -> str:
    """GB that a rank sends at 4 × 256 and fp32: counted, and measured in two ways."""
    rows = []
    for parallel in ("ddp", "fsdp2"):
        place = PLACES[parallel][0]
        for trainer in ("standard", *TRAINERS[parallel]):
            axes = {"trainer": trainer, "parallel": parallel}
            counted = value(COUNTED_RANKS, SENT, gpus=2, **axes)
            payload, all_of_it = (
                value(place.file, metric, trainer=trainer, **place.axes)
                for metric in (PAYLOAD, WITH_PROTOCOL)
            )
            shown = (f"{n / 1e9:.3f}" for n in (counted, payload))
            shares = f"{payload / counted:.4f}", f"{all_of_it / payload:.2f}"
            rows.append([f"{parallel} {trainer}", *shown, *shares])
    heads = ["", "counted", "payload measured", "payload ÷ counted", "with headers ÷ payload"]
    return markdown(heads, rows)


PROFILES = {
    "ddp": ("ranks-profile-ddp", "ranks-ddp-256", ("standard", *TRAINERS["ddp"])),
    "fsdp2": ("ranks-profile-fsdp2", "ranks-fsdp2-256", ("standard", "ghost_lean", "fused")),
}
"""Files of a profile and of counted bytes, and the trainers."""


@table
def ranks_apart() -> str:
    """What the two ranks do differently at 4 × 256 and fp32: "rank 0, rank 1"."""

    def both(file: str, *metrics: str, phase: str = STEP, scale: float = 1e3) -> str:
        axes = {"trainer": trainer, "precision": "fp32", "parallel": parallel}
        sums = (sum(of_rank(file, m, rank, phase, **axes) for m in metrics) for rank in (0, 1))
        return joined((scale * number for number in sums), 1)

    rows = []
    for parallel, (profile, counted, trainers) in PROFILES.items():
        for trainer in trainers:
            drawn = "dram_read_bytes", "dram_write_bytes"
            noisy = trainer not in ("standard", "fused")
            noise = both(counted, *drawn, phase="noise", scale=1e-9) if noisy else "-"
            times = "communication_seconds", "exposed_communication_seconds"
            rows.append([f"{parallel} {trainer}", noise, *(both(profile, time) for time in times)])
    return markdown(["rank 0, rank 1", "noise GB", "in collectives ms", "exposed ms"], rows)
