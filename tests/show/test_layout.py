"""How a table looks in a terminal and in Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.show.layout import Table, escaped, gigabytes

GB = 1e9
SMALL = Table(
    "Title", ["trainer", "DRAM\nread"], [["dpsgd", "12.0"], ["standard", "-"]], ("Note.",)
)


def test_text_is_title_table_and_notes() -> None:
    assert SMALL.as_text().splitlines() == [
        "Title",
        "",
        "trainer      DRAM",
        "             read",
        "---------  ------",
        "dpsgd        12.0",
        "standard        -",
        "Note.",
    ]


def test_markdown_is_a_heading_a_github_table_and_notes() -> None:
    heading, blank, head, rule, *body = SMALL.as_markdown().splitlines()
    assert (heading, blank) == ("### Title", "")
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["trainer", "DRAM read"]
    assert set(rule) <= set("|-:")
    assert [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body[:2]
    ] == SMALL.cells
    assert body[2:] == ["", "Note."]


def test_numbers_stay_as_they_were_written() -> None:
    table = Table("Title", ["trainer", "GB"], [["dpsgd", "12.50"], ["1e5", "0010"]])
    for rendered in (table.as_text(), table.as_markdown()):
        assert all(text in rendered for text in ("12.50", "1e5", "0010"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.34e9, "12.3"),
        (9.876e9, "9.88"),
        (1e9, "1.00"),
        (0.1234e9, "0.1234"),
        (12.3e6, "0.0123"),
    ],
)
def test_gigabytes_have_three_digits_or_more(value: float, text: str) -> None:
    assert gigabytes(value) == text


@settings(deadline=None, max_examples=50)
@given(st.floats(1.0, 1e14))
def test_gigabytes_are_right_to_a_percent(value: float) -> None:
    assert float(gigabytes(value)) * GB == pytest.approx(value, rel=0.01)


# --- too wide --------------------------------------------------------------------------------


def wide(columns: int) -> Table:
    """A table of two rows whose cells are all different."""
    headers = ["trainer", *(f"DRAM\ncol{i}" for i in range(columns))]
    cells = [[name, *(f"{name[0]}{i}.5" for i in range(columns))] for name in ("dpsgd", "standard")]
    return Table("Title", headers, cells, ("Note.",))


@settings(deadline=None, max_examples=25)
@given(columns=st.integers(1, 25), width=st.integers(24, 120))
def test_wider_table_goes_on_below_and_loses_nothing(columns: int, width: int) -> None:
    table = wide(columns)
    lines = table.as_text(width).splitlines()
    assert max(map(len, lines)) <= width
    blocks = sum(line.startswith("trainer") for line in lines)
    shown = [line.split() for line in lines if line.startswith(("dpsgd", "standard"))]
    assert sum(cells[0] == "dpsgd" for cells in shown) == blocks
    for line in table.cells:
        assert [c for cells in shown if cells[0] == line[0] for c in cells[1:]] == line[1:]


def test_long_titles_and_notes_are_wrapped() -> None:
    table = Table("title " * 20, ["a", "b"], [["1", "2"]], ("note " * 40,))
    assert max(map(len, table.as_text(60).splitlines())) <= 60


# --- names from outside ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a|b", r"a\|b"),
        ("*bold* `code` [link]", r"\*bold\* \`code\` \[link\]"),
        ("_private_", r"\_private\_"),
        ("back\\slash & &amp;", r"back\\slash \& \&amp;"),
        ("two\nlines", "two lines"),
        ("lts__t_sectors.sum", "lts__t_sectors.sum"),
    ],
)
def test_markdown_shows_a_name_as_it_is(name: str, text: str) -> None:
    assert escaped(name) == text


def test_name_with_a_bar_or_a_newline_does_not_break_a_markdown_table() -> None:
    table = Table("a|b\n# c", ["model", "GB"], [["x|y\nz", "1"], ["plain", "2"]], ("n|m",))
    lines = table.as_markdown().splitlines()
    assert lines[0] == r"### a\|b # c"
    rows = [line for line in lines if line.startswith("|")]
    unescaped = [line.replace(r"\|", "").count("|") for line in rows]
    assert unescaped == [3, 3, 3, 3]
    assert lines[-1] == r"n\|m"
