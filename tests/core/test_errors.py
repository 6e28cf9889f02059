"""What dpbench says when it cannot do what was asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dpbench.core.errors import ConfigurationError, DpbenchError, unknown
from dpbench.core.files import (
    check_is_file,
    check_writable,
    check_writable_file,
)


@pytest.mark.parametrize(("error", "exit_code"), [(DpbenchError, 1), (ConfigurationError, 2)])
def test_exit_code_tells_bad_input_from_failure(error: type[DpbenchError], exit_code: int) -> None:
    assert error.exit_code == exit_code


def test_configuration_error_is_a_dpbench_error() -> None:
    assert issubclass(ConfigurationError, DpbenchError)


def test_unknown_name_comes_with_the_known_ones() -> None:
    error = unknown("colour", "gren", ["red", "green"])
    assert isinstance(error, ConfigurationError)
    assert str(error) == "unknown colour 'gren'; choose from red, green; did you mean green?"


def test_of_many_names_only_the_nearest_come() -> None:
    names = [f"counter_{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    shown = str(unknown("metric", "dram_byte", ["dram_bytes", "l2_bytes", *names]))
    assert (
        shown == "unknown metric 'dram_byte'; choose from dram_bytes, …; did you mean dram_bytes?"
    )
    assert "counter_a, counter_b" in str(unknown("metric", "???", names))


def test_of_near_names_one_with_the_same_first_word_is_meant() -> None:
    shown = str(unknown("ratio", "l2_ratio", ["flops_ratio", "dram_ratio", "l2_served_ratio"]))
    assert shown.endswith("did you mean l2_served_ratio?")


def test_unknown_name_comes_with_a_hint() -> None:
    assert str(unknown("colour", "x", ["red"], "or RRGGBB")).endswith("red (or RRGGBB)")


def test_unknown_name_with_a_line_break_stays_on_one_line() -> None:
    assert "\n" not in str(unknown("colour", "gre\nen", ["red"]))


def test_writable_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    directory = tmp_path / "reports" / "today"
    check_writable(directory)
    assert list(directory.iterdir()) == []


def test_writable_directory_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("earlier")
    check_writable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


@pytest.mark.parametrize("below", [".", "deeper"])
def test_directory_that_is_a_file_is_refused_by_name(tmp_path: Path, below: str) -> None:
    directory = tmp_path / "file" / below
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        check_writable(directory)
    assert str(caught.value).startswith(f"directory {directory} cannot be written: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("check", [check_is_file, check_writable_file])
def test_a_path_at_which_one_cannot_look_is_refused_by_name(
    check: Callable[[Path], object], tmp_path: Path
) -> None:
    """As below a directory that may not be entered, which root never sees."""
    path = tmp_path / ("n" * 300)
    with pytest.raises(ConfigurationError, match=rf"^{re.escape(str(path))}: File name too long$"):
        check(path)
