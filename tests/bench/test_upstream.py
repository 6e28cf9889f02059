"""The diffs of docs/upstream are of the installed Opacus, and do what their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import upstream


def diff_of(name: str) -> dict[str, str]:
    """The part of a page's diff for each file."""
    (diff,) = upstream.blocks(name, "diff")
    parts = re.split(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", diff, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", upstream.names())
def test_a_diff_applies_to_the_installed_opacus(name: str, tmp_path: Path) -> None:
    upstream.patched(name, tmp_path)
    for file in diff_of(name):
        compile((tmp_path / file).read_text(encoding="utf-8"), file, "exec")


def test_all_diffs_together_have_the_lines_of_each(tmp_path: Path) -> None:
    """But for the norm of a bias, to which `norms` adds a bound."""
    upstream.patched("all", tmp_path)
    other = {
        'firsts = getattr(self.module, "first_outputs", [])': "firsts = self.module.first_outputs",
        "if firsts:  # none under FSDP, whose hooks are others": "if firsts:  # FSDP reduces no",
    }
    for name in {*upstream.names()} - {"all", "bias"}:
        for file, diff in diff_of(name).items():
            text = (tmp_path / file).read_text(encoding="utf-8")
            for line in re.findall(r"^\+ *(\S.*)", diff, re.M):
                assert other.get(line, line) in text, (name, line)


@pytest.mark.slow
@pytest.mark.parametrize("name", upstream.names())
def test_opacus_own_tests_of_gradients_pass_with_a_diff(name: str) -> None:
    outcomes = upstream.opacus_tests(name, upstream.READ_GRADIENTS[:3])
    assert list(outcomes.values()).count("passed") >= 20
    assert [test for test, outcome in outcomes.items() if outcome in ("failure", "error")] == []


def test_each_page_with_a_diff_is_in_the_index() -> None:
    index = (upstream.PAGES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\S+)\.md\)", index)) >= set(upstream.names())


# --- norms -----------------------------------------------------------------------------------


def test_an_update_of_opacus_exceeds_the_threshold() -> None:
    (test,) = upstream.blocks("norms", "python")
    page: dict[str, Any] = {}
    exec(test, page)
    with torch.random.fork_rng(), pytest.raises(AssertionError):
        page["test_an_update_keeps_the_threshold"]()


@pytest.mark.slow
def test_an_update_keeps_the_threshold_with_the_diff(tmp_path: Path) -> None:
    upstream.patched("norms", tmp_path)
    (test,) = upstream.blocks("norms", "python")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{test}\ntest_an_update_keeps_the_threshold()"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- sums ------------------------------------------------------------------------------------


def test_one_of_many_similar_examples_moves_a_sum_of_opacus_as_far_as_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (script,) = upstream.blocks("sums", "python")
    exec(script, {})
    page = (upstream.PAGES / "sums.md").read_text(encoding="utf-8")
    assert f"```\n{capsys.readouterr().out}```\n" in page


# --- strided ---------------------------------------------------------------------------------


def test_per_sample_gradients_of_strided_images_are_as_wrong_as_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (script,) = upstream.blocks("strided", "python")
    with torch.random.fork_rng():
        exec(script, {})
    page = (upstream.PAGES / "strided.md").read_text(encoding="utf-8")
    assert f"```\n{capsys.readouterr().out}```\n" in page


@pytest.mark.slow
def test_they_are_right_with_the_diff(tmp_path: Path) -> None:
    (script,) = upstream.blocks("strided", "python")
    done = upstream.with_copy("strided", "-c", script, stdout=subprocess.PIPE)
    assert re.findall(r" (\d.*)", done.stdout) == 3 * ["0.000 1.000"]
