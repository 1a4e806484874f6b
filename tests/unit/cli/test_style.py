# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows: its width, colours only where they belong, and the name that was meant."""

from __future__ import annotations

import io
import os
import re

import pytest

from anyaccel.cli import COMMANDS, main
from anyaccel.cli._style import styled, terminal_width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "stream", "coloured"),
    [
        ({"TERM": "xterm"}, Terminal(), True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({}, Terminal(), False),
        ({"TERM": "xterm"}, io.StringIO(), False),
    ],
)
def test_colours_are_for_terminals(
    variables: dict[str, str], stream: io.StringIO, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert styled("error:", "error", stream) == ("\033[1;31merror:\033[0m" if coloured else "error:")


def test_the_width_is_that_of_the_terminal_unless_columns_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda number=1: os.terminal_size((61, 20)))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width() == 61
    monkeypatch.setenv("COLUMNS", "wide")
    assert terminal_width() == 61
    monkeypatch.setenv("COLUMNS", "90")
    assert terminal_width() == 90

    def no_terminal(number: int = 1) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    monkeypatch.delenv("COLUMNS")
    assert terminal_width() == 80


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_sixty_columns(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples stay as they are, since they are to be copied."""
    monkeypatch.setenv("COLUMNS", "60")
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
    text = capsys.readouterr().out.partition("examples:")[0]
    assert [line for line in text.splitlines() if len(line) > 60 and not re.search(r"\{\S{20}", line)] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["genrate"], "unknown command 'genrate' (did you mean generate?); commands: "),
        (["run", "--bind_core_to_rank", "x.py"], "--bind_core_to_rank (did you mean --bind_cores_to_rank?); see "),
        (["report", "--xyz"], "unrecognized arguments: --xyz; see "),
    ],
)
def test_a_name_that_is_nearly_right(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
