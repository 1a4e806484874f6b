# SPDX-License-Identifier: Apache-2.0
"""The command line is an interface: a change of its options has to be meant."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from anyaccel.cli import COMMANDS, main

FROZEN = json.loads((Path(__file__).parents[1] / "data" / "cli_options.json").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_what_they_were(command: str) -> None:
    """To change them on purpose, change tests/data/cli_options.json too, and say so in the changelog."""
    parser = importlib.import_module(f"anyaccel.cli.{command}").build_parser()
    shown = sorted(
        name
        for action in parser._actions
        for name in action.option_strings or [action.dest]
        if action.help != "==SUPPRESS=="
    )
    assert shown == FROZEN[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"  anyaccel {command}" in text


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import anyaccel

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"anyaccel {anyaccel.__version__}\n"


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert "unknown command 'genrate'" in capsys.readouterr().err
