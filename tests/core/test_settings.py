"""Every option is declared once, for pytest and for the commands."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.settings import Settings, declare
from dpbench.instruments import declare_built_in
from dpbench.instruments.counters import CounterOptions

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def read(*arguments: str, of_pytest: bool = False, directory: Path = Path()) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    declare(parser.add_argument, of_pytest=of_pytest)
    declare_built_in(parser.add_argument, of_pytest=of_pytest)
    return Settings.read(parser.parse_args(arguments), of_pytest=of_pytest, directory=directory)


def declared(*, of_pytest: bool) -> set[str]:
    names: set[str] = set()
    for declaring in (declare, declare_built_in):
        declaring(lambda *options, **_: names.update(options), of_pytest=of_pytest)
    return names


def test_every_option_of_the_reference_is_there() -> None:
    named = set(re.findall(r"`(--(?:dpbench|ncu)[a-z-]*)", REFERENCE.read_text(encoding="utf-8")))
    assert named <= declared(of_pytest=True)
    assert len(named) > 20


def test_commands_have_the_options_of_pytest_without_its_prefix() -> None:
    renamed = {"--ncu-kernels": "--kernels", "--ncu-kernels-phase": "--kernels-phase"}
    renamed |= {"--ncu-kernels-top": "--top"}
    of_pytest = {
        renamed.get(name, name.replace("--dpbench-", "--")) for name in declared(of_pytest=True)
    }
    of_commands = declared(of_pytest=False)
    assert of_commands - {"--shard"} <= of_pytest
    assert of_pytest - of_commands == {
        *("--ncu", "--cupti", "--no-timing", "--compare-across"),
        *("--only", "--skip", "--disable"),
    }


@pytest.mark.parametrize("of_pytest", [False, True])
def test_what_is_not_given_is_the_default(of_pytest: bool) -> None:
    settings = read(of_pytest=of_pytest)
    assert replace(settings, own={}) == Settings(of_pytest=of_pytest)
    assert settings.of(CounterOptions) == CounterOptions()


def test_a_path_begins_where_pytest_was_started(tmp_path: Path) -> None:
    given = ("--dpbench-json=run.json", "--ncu-dir=/x", "--dpbench-profile-dir=traces")
    settings = read(*given, of_pytest=True, directory=tmp_path)
    assert settings.own["profile_dir"] == tmp_path / "traces"
    assert settings.files == {"--dpbench-json": ("json", tmp_path / "run.json")}
    assert (settings.ncu_dir, settings.storage) == (Path("/x"), tmp_path / ".dpbench")


def test_an_option_is_named_as_its_user_writes_it() -> None:
    assert Settings(of_pytest=True).option("kernels_phase") == "--ncu-kernels-phase"
    assert Settings().option("kernels_phase") == "--kernels-phase"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save=a", "--autosave"], "--autosave chooses the name of the run: omit --save"),
        (["--json=/dev/null/x"], "directory /dev/null cannot be written"),
        (["--json=x", "--csv=./x"], "--json and --csv name the same file, 'x'"),
        (["--compare=x", "--json=x"], "--json would overwrite the reference run x"),
    ],
)
def test_what_contradicts_itself_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read(*arguments).check()
