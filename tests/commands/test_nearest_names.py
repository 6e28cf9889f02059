"""A mistyped name is answered with the nearest, whatever it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main

GRID1 = str(Path(__file__).parents[1] / "data/saved/grid1.json")
RUN = ["run", "--instrument=logical", "--batch-size=2", "--seq-len=8"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ([*RUN, "--trainer=dpsdg"], "dpsgd"),
        ([*RUN, "--trainer=dpsgd:clp=per_layer"], "clip"),
        ([*RUN, "--workload=resnt"], "resnet"),
        ([*RUN, "--precision=bf-16"], "bf16"),
        ([*RUN, "--grid=gird1"], "grid1"),
        ([*RUN, "--columns=dram_byte"], "dram_bytes"),
        ([*RUN, "--group-by=devise"], "device"),
        ([*RUN, "--expect=dram_ratoi:2-5"], "dram_ratio"),
        ([*RUN, "--kernels-phase=cilp"], "clip"),
        ([*RUN, "--output=run.htm"], ".html"),
        (["run", "--instrument=logcial"], "logical"),
        (["run", "--grid=mine.toml"], "batch_size"),
        (["compare", GRID1, GRID1, "--fail=dram_bytes@bakward:5%"], "backward"),
        (["advise", "--gpu=h20"], "h200"),
        (["smoke", "--workload=layer", "--set=layer=lineer"], "linear"),
    ],
    ids=lambda words: " ".join(words[-2:]) if isinstance(words, list) else words,
)
def test_the_nearest_is_named(
    words: list[str],
    nearest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "mine.toml").write_text("trainer = 'dpsgd'\nbatchsize = 2\nseq_len = 8\n")
    assert main(words) != 0
    said = capsys.readouterr()
    assert f"did you mean {nearest}?" in " ".join((said.err + said.out).split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["exec", "--compare-fial=logical_bytes:1%", "train.py"], "--compare-fail"),
        (["list", "--storge=runs"], "--storage"),
    ],
)
def test_the_nearest_option_is_named_below_the_usage_of_the_command(
    words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    said = capsys.readouterr().err
    assert said.startswith(f"usage: dpbench {words[0]} ")
    assert f"did you mean {nearest}?" in said
