"""Check what works on this machine, before you spend time on measuring.

doctor checks packages, directories, GPU and Nsight Compute, and reads counters with Nsight Compute
and CUPTI. To calibrate the counters, it copies, fills and reads data of known size. The counted
bytes of DRAM, of L2 and of global loads and stores must be within 1 %, and a table shows them. Each
line is ok, warning or failed, and a second line often names a remedy. The exit code is 1 if a check
failed. Reports and logs of the measured processes stay in the folder doctor of --ncu-dir.

With --chip, doctor only lists the metrics that CUPTI counts on a chip, the counters behind them,
and the number of steps that they need.

Examples:
  dpbench doctor
  dpbench doctor --chip GA100
  dpbench doctor --json
  dpbench doctor --ncu-path /opt/nvidia/nsight-compute/2025.3.1/ncu
"""

from __future__ import annotations

import argparse
import json

from dpbench.commands.machine import checks
from dpbench.commands.machine.calibration import FAILED, Diagnosis, table
from dpbench.core.settings import Settings, declare, own_values
from dpbench.instruments import declare_built_in
from dpbench.instruments.cupti.chip import describe
from dpbench.instruments.cupti.library import load_library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    declare_built_in(parser.add_argument, "ncu_path")
    declare(parser.add_argument, "ncu_dir")
    declare(parser.add_argument, "timeout", default=120)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help="list what CUPTI counts on a chip such as GA100, without a GPU",
    )


def run(options: argparse.Namespace) -> int:
    """Print each finding as soon as a check has made it."""
    if options.chip:
        print(describe(load_library(), options.chip))
        return 0
    settings = Settings(ncu_dir=options.ncu_dir, timeout=options.timeout, own=own_values(options))
    findings = []
    for finding in checks.examine(settings):
        findings.append(finding)
        if not options.json:
            print(as_line(finding), flush=True)
    failed = any(finding.status == FAILED for finding in findings)
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [vars(f) for f in findings]}, indent=1))
    elif calibration := table(findings):
        print(f"\n{calibration.as_text()}")
    return 1 if failed else 0


def as_line(finding: Diagnosis) -> str:
    """Format a finding for a terminal, with its remedy on a second line."""
    start = f"{finding.status:8}{finding.check:21}"
    remedy = f"\n{'> ':>{len(start)}}{finding.remedy}" if finding.remedy else ""
    return f"{start}{finding.detail}{remedy}"
