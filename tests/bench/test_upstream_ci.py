"""The workflow that is proposed to Opacus: it passes as Opacus is, and fails if that moves more."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.upstream import PAGES, blocks, patched

REFERENCE = PAGES / "opacus-layers.json"
[WORKFLOW] = blocks("ci", "yaml")
COUNT, VERIFY = re.findall(r"dpbench (?:run|verify) (?:--\S+ \S+\s+)+", WORKFLOW)
LINEAR = ("--workload", "layer:layer=linear", "--trainer", "standard", "--trainer", "dpsgd")


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    _, *words = shlex.split(command)
    words = [str(REFERENCE) if word == "benchmarks/bytes.json" else word for word in words]
    path = os.pathsep.join([str(folder), str(PAGES.parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "dpbench", *words, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_workflow_passes_with_opacus_as_it_is(tmp_path: Path) -> None:
    counted = run(COUNT, tmp_path)
    assert counted.returncode == 0, counted.stderr
    verified = run(VERIFY, tmp_path)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.slow
def test_a_copy_of_a_layers_gradients_fails_and_is_named_with_its_line(tmp_path: Path) -> None:
    patched("", tmp_path)
    linear = tmp_path / "opacus/grad_sample/linear.py"
    text = linear.read_text()
    line = "        ret[layer.weight] = gs\n"
    assert text.count(line) == 1
    linear.write_text(text.replace(line, line.replace("gs", "gs.clone()")))
    failed = run(
        COUNT,
        tmp_path,
        "--workload",
        "layer:layer=linear",
        "--trainer",
        "standard",
        "--trainer",
        "dpsgd",
    )
    assert failed.returncode == 1
    [said] = [each for each in failed.stderr.splitlines() if "logical_bytes@step of dpsgd-" in each]
    page = (PAGES / "ci.md").read_text(encoding="utf-8")
    assert said in page
