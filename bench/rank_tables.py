"""Make tables about several GPUs: cost of steps, sent bytes, and time in collectives."""

from __future__ import annotations

from contextlib import suppress
from operator import truediv

from bench.cells import Place, busy, by_length, by_trainer, cost, joined, markdown, metric, table
from bench.runs import collectives, of_rank, value
from dpbench.results.rows import STEP

SENT = "collective_bytes"
COUNTED_RANKS = "counted-ranks"
"""Name of the run in which one of 2, 8, 64 or 1024 ranks was counted."""

payload = metric("nvlink_payload_sent_bytes")
"""Bytes of messages that a rank sends, without headers, counted by NVML."""

packets = metric("nvlink_sent_bytes")
"""Bytes that a rank sends, with headers and replies, counted by CUPTI."""


PLACES = {
    "ddp": by_length("ranks-ddp"),
    "fsdp2": by_length("ranks-fsdp2"),
    "ddp_lora": [*by_length("ranks-ddp"), Place("ranks-lora", "8x1024", "bf16")],
    "8b": [Place("ranks-8b-4096", precision="bf16")],
}
"""Runs on two GPUs, by table. The batch size in a cell is the sum over both ranks."""

TRAINERS = dict.fromkeys(PLACES, ("dpsgd", "dpsgd_ghost", "fused"))
TRAINERS |= {"fsdp2": ("dpsgd_ghost", "fused"), "8b": ("fused",)}
"""Private trainers in the rows of each table."""


def head(place: Place) -> str:
    """Return the heading of the column for a `Place`."""
    if not place.cell:
        return f"FSDP2, 1 × {place.file.rpartition('-')[2]} a rank, {place.precision}"
    lora = "LoRA, " if place.file == "ranks-lora" else ""
    return f"{lora}4 × {place.cell.partition('x')[2]} a rank, {place.precision}"


@table
def ranks_measured(parallel: str, *trainers: str) -> str:
    """Return time, DRAM bytes, peak memory and busy share of steps on two GPUs."""

    def shown(place: Place, trainer: str) -> str:
        numbers = cost(place, trainer)
        return numbers if numbers == "-" else f"{numbers}; {busy(place, trainer):.0%}"

    places = {head(place): place for place in PLACES[parallel]}
    corner = "time, bytes, memory; busy"
    return by_trainer(places, trainers or TRAINERS[parallel], corner, shown)


@table
def ranks_sent() -> str:
    """Return the GB that a rank sends in a step of 4 × 256 a rank at fp32, counted and measured."""
    rows = []
    for parallel in ("ddp", "fsdp2"):
        place = PLACES[parallel][0]
        for trainer in ("standard", *TRAINERS[parallel]):
            counted = value(COUNTED_RANKS, SENT, gpus=2, trainer=trainer, parallel=parallel)
            sent = payload(place, trainer)
            shares = f"{sent / counted:.4f}", f"{packets(place, trainer) / sent:.2f}"
            shown = f"{counted / 1e9:.3f}", f"{sent / 1e9:.3f}"
            rows.append([f"{parallel} {trainer}", *shown, *shares])
    heads = ["", "counted", "payload measured", "payload ÷ counted", "with headers ÷ payload"]
    return markdown(heads, rows)


PROFILED = {"ddp": ("standard", *TRAINERS["ddp"]), "fsdp2": ("standard", "fused")}
"""Trainers that the PyTorch profiler recorded on two ranks."""


@table
def ranks_apart() -> str:
    """Return, for both ranks at 4 × 256 and fp32, bytes of the noise and times in collectives."""

    def both(file: str, *metrics: str, phase: str = STEP, scale: float = 1e3) -> str:
        axes = {"trainer": trainer, "precision": "fp32", "parallel": parallel}
        sums = (sum(of_rank(file, m, rank, phase, **axes) for m in metrics) for rank in (0, 1))
        return joined((scale * number for number in sums), 1)

    rows = []
    for parallel, trainers in PROFILED.items():
        counters, profile = f"ranks-{parallel}-256", f"ranks-profile-{parallel}"
        for trainer in trainers:
            drawn = "dram_read_bytes", "dram_write_bytes"
            noisy = trainer not in ("standard", "fused")
            noise = both(counters, *drawn, phase="noise", scale=1e-9) if noisy else "-"
            times = "communication_seconds", "exposed_communication_seconds"
            rows.append([f"{parallel} {trainer}", noise, *(both(profile, time) for time in times)])
    return markdown(["rank 0, rank 1", "noise GB", "in collectives ms", "exposed ms"], rows)


@table
def ranks() -> str:
    """Return counted numbers of one rank: sent GB, collectives, and GB of the phase ``noise``."""
    rows = []
    for parallel, trainer in ((p, t) for p in ("ddp", "fsdp2") for t in ("standard", *TRAINERS[p])):
        axes = {"trainer": trainer, "parallel": parallel}
        sent = [value(COUNTED_RANKS, SENT, gpus=gpus, **axes) for gpus in (8, 64, 1024)]
        standard = value(COUNTED_RANKS, SENT, gpus=64, trainer="standard", parallel=parallel)
        noise = "-"
        with suppress(LookupError):
            noise = f"{value(COUNTED_RANKS, 'logical_bytes', 'noise', gpus=64, **axes) / 1e9:.2f}"
        shown = (f"{number / 1e9:.2f}" for number in sent)
        calls = f"{collectives(COUNTED_RANKS, gpus=64, **axes):.0f}"
        rows.append([f"{parallel} {trainer}", *shown, sent[1] / standard, calls, noise])
    heads = ["", "8 GPUs", "64 GPUs", "1024 GPUs", "÷ standard", "collectives", "noise GB"]
    return markdown(heads, rows)


LLAMA_8B = (
    "hidden_size=4096,intermediate_size=14336,model_type=llama,num_attention_heads=32,"
    "num_hidden_layers=32,num_key_value_heads=8,seq_len={},vocab_size=128256"
)
GPUS_8B = 2, 4, 8, 64
CELLS_8B = {
    "FSDP2, 1 × 4096": ("fsdp2", 4096, "dpsgd_ghost", "fused"),
    "FSDP2, 1 × 16384": ("fsdp2", 16384, "dpsgd_ghost", "fused"),
    "DDP and LoRA, 1 × 4096": ("ddp", 4096, "dpsgd", "fused"),
}
"""Kind of parallel training, length of a sequence, and private trainers, by cell of a rank."""


def of_8b(parallel: str, seq_len: int, gpus: int, trainer: str) -> list[float]:
    """Return counted bytes of one rank of Llama 8B: moved in a step, at its peak, and sent."""
    cell = {"set": LLAMA_8B.format(seq_len), "parallel": parallel, "gpus": gpus, "trainer": trainer}
    metrics = "logical_read_bytes", "logical_write_bytes", "peak_memory_bytes", SENT
    read, written, peak, sent = (of_rank("counted-8b", metric, 0, **cell) for metric in metrics)
    return [read + written, peak, sent]


@table
def ranks_8b() -> str:
    """Return logical bytes, peak memory and sent bytes of a step of one rank of Llama 8B."""
    rows = []
    for name, (parallel, length, *trainers) in CELLS_8B.items():
        standard, *private = (
            [of_8b(parallel, length, gpus, trainer) for gpus in GPUS_8B]
            for trainer in ("standard", *trainers)
        )
        shown = [joined((number / 1e9 for number in each), 1) for each in standard]
        rows.append([f"{name}: standard, GB", *shown])
        for trainer, counted in zip(trainers, private, strict=True):
            pairs = zip(counted, standard, strict=True)
            rows.append([trainer, *(joined(map(truediv, *pair)) for pair in pairs)])
    heads = (f"{gpus} GPUs" for gpus in GPUS_8B)
    return markdown(["logical bytes, peak memory, sent", *heads], rows)
