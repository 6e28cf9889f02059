"""What counting by CUPTI costs, whether it leaks, and whether it agrees with ncu and nsys.

On a GPU machine, each by itself; the exit status is 1 if one of its bounds does not hold:

    python bench/cupti.py cost                            # a counted case against a plain one
    python bench/cupti.py leak                            # 200 steps, counted one by one
    python bench/cupti.py grid by_cupti.json              # Grid 1 in one go
    python bench/cupti.py grid by_cupti.json --saved      # the same of a run that was saved
    python bench/cupti.py agree by_cupti.json by_ncu.json # of saved runs; needs no GPU
    python bench/cupti.py nsys by_both.json               # busy shares of a run by cupti and nsys
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from dpbench import Case
from dpbench.case import AXES, PHASES
from dpbench.instruments.case_process import Child, log_lines, step_command
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.process.messages import Steps, is_record
from dpbench.results.frame import summarise, to_frame
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run

MOST_COST = 1.15
"""A counted case against a plain process with as many steps."""

MOST_GRID = 1.2
"""A grid's time against that of its steps alone."""

MOST_GROWTH, MOST_SLOWER = 32e6, 0.02
"""By how many bytes, and by which part of its step time, a process may change as it counts."""

TOLERANCES = {
    "dram_bytes": 0.005,
    "l2_total_bytes": 0.01,
    "global_load_bytes": 0.01,
    "global_store_bytes": 0.01,
}
"""By how much CUPTI's numbers may differ from ncu's."""

MOST_LEFT_OVER = 0.0005
"""By how much the phases' DRAM bytes together may differ from the whole step's."""

MOST_POINTS = 3.0
"""By how many percentage points nsys's busy share of a step may differ from CUPTI's."""

RECORDED = Path(__file__).parents[1] / "docs/results/h200-ncu-grid1-1.json"
"""Grid 1 under ncu, on an NVIDIA H200."""


def holds(what: str, value: float, most: float) -> bool:
    """Print a number beside its bound; returns whether it is within."""
    print(f"{what}: {value:.4g}, at most {most:g}: {'ok' if value <= most else 'NO'}")
    return value <= most


# --- what a counted case costs -------------------------------------------------------------------


def cost(options: argparse.Namespace) -> bool:
    """A counted case against a plain process with the same steps, in turn."""
    case = Case(options.trainer, 8, 256, options.model_size)
    ratios = []
    print(f"{case.id}; seconds of a whole process")
    print(f"{'counted':>9} {'plain':>9} {'steps':>9} {'counting':>9} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        counting = Cupti(Path(folder))
        for _ in range(options.pairs):
            counted, record = seconds(counting.command(case), case, folder)
            further = further_steps(record)
            steps = Steps(counting.steps.warmup, counting.steps.active + further)
            plain, of_plain = seconds(step_command(case, steps, device="cuda"), case, folder)
            each = median(sum(step.values()) for step in of_plain["phase_seconds"])
            ratios.append(counted / plain)
            of_steps = each * (steps.warmup + steps.active)
            beside = record["spent_seconds"]["after"] - each * further
            figures = " ".join(f"{value:9.2f}" for value in (counted, plain, of_steps, beside))
            print(f"{figures} {ratios[-1]:7.3f}", flush=True)
    return holds("median ratio", median(ratios), MOST_COST)


def seconds(command: list[str], case: Case, folder: str) -> tuple[float, dict[str, Any]]:
    """Wall time of a case's process, and its record."""
    start = time.monotonic()
    child = Child(command, case=case, log=Path(folder, "log"), timeout=600, read=lambda _: [])
    record = child.record()
    return time.monotonic() - start, record


def further_steps(record: dict[str, Any]) -> int:
    """How many steps were counted, after those that were timed."""
    return int(record["passes"] * len(record["counted"]))


# --- whether it leaks ----------------------------------------------------------------------------


def leak(options: argparse.Namespace) -> bool:
    """Memory and step time of a process that counts many steps one by one."""
    import torch

    from dpbench import count_ranges
    from dpbench.process.build import build, pick_device
    from dpbench.process.step import alone

    case = Case("dpsgd", 16, 1024, "medium")  # waits for its kernels, not for its launches
    device = pick_device("cuda")
    with alone(device, case.id):
        trainer, [batch] = build(case, device, 1)

        def step_seconds() -> float:
            start = time.perf_counter()
            trainer.train_step(batch)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        seen = []
        for _ in range(options.steps):
            with count_ranges(by_phase=False, max_ranges=4) as counts:
                trainer.train_step(batch)
            counted = counts[STEP]["range_time_seconds"]
            free, total = torch.cuda.mem_get_info()
            plain = step_seconds()
            seen.append((resident_bytes(), total - free, counted, plain))
    part = max(len(seen) // 5, 1)
    first, last = (pd.DataFrame(some).median() for some in (seen[part : 2 * part], seen[-part:]))
    print(f"{case.id}, {len(seen)} counted steps; medians of the second fifth and of the last")
    for name, scale, before, after in zip(
        ("host memory MB", "GPU memory MB", "counted step ms", "plain step ms"),
        (1e-6, 1e-6, 1e3, 1e3),
        first,
        last,
        strict=True,
    ):
        print(f"{name:16} {before * scale:12.3f} {after * scale:12.3f}")
    grown, slower = last - first, last / first - 1
    return all(
        [
            holds("host bytes more", grown[0], MOST_GROWTH),
            holds("GPU bytes more", grown[1], MOST_GROWTH),
            holds("counted step slower", slower[2], MOST_SLOWER),
            holds("plain step slower", slower[3], MOST_SLOWER),
        ]
    )


def resident_bytes() -> float:
    """The memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


# --- a grid in one go ----------------------------------------------------------------------------


def grid(options: argparse.Namespace) -> bool:
    """A grid by CUPTI, with two workers, against the sum of its steps and against ncu."""
    if not options.saved:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--cupti", "-n", "2"]
        suite = Path(__file__).parents[1] / "tests/gpu/test_io_cost.py"
        files = [f"--dpbench-json={options.by_cupti}", f"--ncu-dir={logs_of(options.by_cupti)}"]
        subprocess.run([*command, *files, *options.more, str(suite)], check=True)
    by_cupti, by_ncu = Run.load(options.by_cupti), Run.load(options.ncu)
    print("seconds; of a case with the wait for its GPU")
    print(f"{'case':34} {'steps':>6} {'of steps':>10} {'by cupti':>8} {'by ncu':>9}")
    of_ncu = {outcome.case: outcome.seconds for outcome in by_ncu.outcomes}
    all_steps = 0.0
    for outcome in by_cupti.outcomes:
        if outcome.error:
            print(f"{outcome.case.id:34} {outcome.message}")
            continue
        steps = step_seconds_of(by_cupti, outcome.case)
        all_steps += sum(steps)
        beside = f"{of_ncu[outcome.case]:9.1f}" if outcome.case in of_ncu else f"{'-':>9}"
        taken = f"{len(steps):6} {sum(steps):10.1f} {outcome.seconds:8.1f}"
        print(f"{outcome.case.id:34} {taken} {beside}")
    whole, under_ncu = (float(run.session["seconds"]) for run in (by_cupti, by_ncu))
    print(f"{'session':34} {'':6} {all_steps:10.1f} {whole:8.1f} {under_ncu:9.1f}")
    show_spent(by_cupti, spent_seconds(logs_of(options.by_cupti)), whole)
    complete = by_cupti.status == "complete" and not any(o.error for o in by_cupti.outcomes)
    if not complete:
        print("not every case was measured: NO")
    return holds("session ÷ its steps", whole / all_steps, MOST_GRID) and complete


def logs_of(by_cupti: Path) -> Path:
    """The folder with the cases' logs, beside a run's file."""
    return by_cupti.with_name(f"{by_cupti.stem}-logs")


def spent_seconds(folder: Path) -> dict[str, dict[str, float]]:
    """What the process of each case did with its time, by the case's id, from its log."""
    found = {}
    for log in folder.rglob("*.cupti.log"):
        for line in filter(is_record, log_lines(log)):
            record = json.loads(line[line.index("{") :])
            if "spent_seconds" in record:
                found[Case(**record["case"]).id] = record["spent_seconds"]
    return found


def show_spent(run: Run, spent: dict[str, dict[str, float]], whole: float) -> None:
    """Print where a session's time went, for the cases whose logs are there.

    A process imports before it waits for the GPU, and ends after it has given that back.
    """
    rows = {o.case.id: (o.seconds, spent[o.case.id]) for o in run.outcomes if o.case.id in spent}
    if not rows:
        return
    parts = [*next(iter(spent.values()))]
    print(
        f"\n{'seconds that a process spent':34} {'apart':>8}" + "".join(f"{p:>10}" for p in parts)
    )
    for name, (seconds, of_case) in rows.items():
        figures = "".join(f"{of_case[part]:10.2f}" for part in parts)
        print(f"{name:34} {seconds - sum(of_case.values()):8.2f}{figures}")
    held = sum(sum(of.values()) - of["waiting"] for _, of in rows.values())
    print(f"of {whole:.1f} s no case held the GPU for {whole - held:.1f}\n")


def step_seconds_of(run: Run, case: Case) -> list[float]:
    """The seconds of each step that a case took: warm-up, timed and counted ones."""
    steps = run.session["settings"]["cupti"]["steps"]
    rows = [row for row in run.document["rows"] if Case.from_row(row) == case]
    timed = [r["value"] for r in rows if (r["metric"], r["phase"]) == ("step_time_seconds", STEP)]
    counted = [r for r in rows if r["metric"] == "range_time_seconds"]
    by_phase = sum(row["value"] for row in counted if row["phase"] != STEP)
    whole = [row["value"] for row in counted if row["phase"] == STEP]
    return [*[median(timed)] * steps["warmup"], *timed, by_phase, *whole]


# --- agreement with ncu --------------------------------------------------------------------------


def agree(options: argparse.Namespace) -> bool:
    """CUPTI's bytes beside ncu's, case by case, from two saved runs or one with both."""
    runs = {"cupti": Run.load(options.by_cupti), "ncu": Run.load(options.by_ncu)}
    cupti, ncu = (
        values(run.frame[run.frame.instrument == name], TOLERANCES) for name, run in runs.items()
    )
    cases = [case for case in cupti if case in ncu]
    if not cases:
        print("no case was counted by both")
        return False
    print(f"{'case':40}" + "".join(f"{m.rpartition('_')[0]:>14}" for m in TOLERANCES) + "  phases")
    worst = dict.fromkeys([*TOLERANCES, "phases"], 0.0)
    for case in cases:
        off = {m: cupti[case][m, STEP] / ncu[case][m, STEP] - 1 for m in TOLERANCES}
        dram = {phase: v for (m, phase), v in cupti[case].items() if m == "dram_bytes"}
        off["phases"] = sum(v for phase, v in dram.items() if phase != STEP) / dram[STEP] - 1
        worst = {name: max(worst[name], abs(value)) for name, value in off.items()}
        figures = [f"{off[m]:+14.3%}" for m in TOLERANCES] + [f"{off['phases']:+8.3%}"]
        print(f"{case:40}{''.join(figures)}")
    bounds = {**TOLERANCES, "phases": MOST_LEFT_OVER}
    kept = [holds(f"{name} off", worst[name], most) for name, most in bounds.items()]
    return all(kept)


def nsys(options: argparse.Namespace) -> bool:
    """Busy shares by Nsight Systems beside CUPTI's, from a saved run by both.

    Of a phase each is of its own time; of a step both are of the time of steps that nothing counted
    or recorded, which CUPTI's process took.
    """
    rows = Run.load(options.by_both).document["rows"]
    found = summarise(to_frame(map(Measurement.from_row, rows)))
    found["case"] = [Case.from_row(row).id for row in found.to_dict("records")]
    found = found[found.phase.isin([*PHASES, STEP])]
    table = found.pivot_table("value", ["case", "phase"], "metric", sort=False)
    if not {"timeline_busy_share", "gpu_busy_share"}.issubset(table):
        print("no case was measured by both")
        return False
    is_step = table.index.get_level_values("phase") == STEP
    of_step = table.timeline_busy_seconds / table.step_time_seconds
    table["nsys"] = table.timeline_busy_share.mask(is_step, of_step)
    shares = table[["nsys", "gpu_busy_share"]].rename(columns={"gpu_busy_share": "cupti"}).dropna()
    shares["points"] = (shares.nsys - shares.cupti).abs() * 100
    print(shares.to_string(float_format="{:.3f}".format))
    steps = shares.xs(STEP, level="phase").points
    kept = [holds(f"{case}, points", points, MOST_POINTS) for case, points in steps.items()]
    return all(kept)


Values = dict[tuple[str, str], float]
"""By metric and phase."""


def values(frame: pd.DataFrame, metrics: Iterable[str]) -> dict[str, Values]:
    """The values of each case, by its id; of cases that have all the metrics."""
    summary = summarise(frame)
    found: dict[str, Values] = {}
    for row in summary[summary.metric.isin([*metrics])].to_dict("records"):
        case = Case(**{axis: row[axis] for axis in AXES})
        found.setdefault(case.id, {})[row["metric"], row["phase"]] = row["value"]
    return {
        case: values
        for case, values in found.items()
        if all((metric, STEP) in values for metric in metrics)
    }


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def add(command: Callable[[argparse.Namespace], bool]) -> argparse.ArgumentParser:
        added = commands.add_parser(command.__name__, help=command.__doc__)
        added.set_defaults(command=command)
        return added

    of_cost = add(cost)
    of_cost.add_argument("--trainer", default="dpsgd")
    of_cost.add_argument("--model-size", default="1b")
    of_cost.add_argument("--pairs", type=int, default=3)
    add(leak).add_argument("--steps", type=int, default=200)
    of_grid = add(grid)
    of_grid.add_argument("by_cupti", type=Path)
    of_grid.add_argument("--saved", action="store_true", help="measure nothing, read the file")
    of_grid.add_argument("--ncu", type=Path, default=RECORDED, help="the same grid under ncu")
    of_grid.add_argument("more", nargs="*", help="options of pytest, after --")
    of_agree = add(agree)
    of_agree.add_argument("by_cupti", type=Path)
    of_agree.add_argument("by_ncu", type=Path)
    add(nsys).add_argument("by_both", type=Path)
    options = parser.parse_args(arguments)
    return 0 if options.command(options) else 1


if __name__ == "__main__":
    sys.exit(main())
