"""Distances of gradients from the reference, for real, on the CPU."""

from __future__ import annotations

import pytest

from bench.distances import main


def test_each_trainer_stands_beside_the_furthest_of_opacus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main("bf16", ("dpsgd", "book_keeping"), ("transformer",))
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    lines = {line[0]: line[1:] for line in printed}
    assert lines["dpsgd"][1] == "1.00"
    assert 0.5 < float(lines["book_keeping"][1]) < 2
    assert 0 < float(lines["book_keeping"][0]) < 0.05
