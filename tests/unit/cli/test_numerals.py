# SPDX-License-Identifier: Apache-2.0
"""Numbers in options and variables: of every parser and every variable of ours, so that a new one is covered too."""

from __future__ import annotations

import argparse
import importlib

import pytest

from anyaccel import env
from anyaccel.cli import COMMANDS
from anyaccel.errors import UsageError
from anyaccel.numerals import parse_integer, parse_number

NO_NUMBERS = ["", "1_0", "１０", "٣", " 10 ", "10\n", "+10", "0x10", "1e", "--1", "1-", "9" * 5000, "ten"]
NO_WHOLE_ONES = [*NO_NUMBERS, "1.0", "1e3", "-"]
NO_DECIMAL_ONES = [*NO_NUMBERS, "1_0.5", "nan", "NaN", "inf", "-inf", "infinity", "1e999", ".", "1.2.3", "1,5"]


def numeric_options() -> list[tuple[str, argparse.Action]]:
    """Every option and argument of every command that takes a number."""
    return [
        (command, action)
        for command in COMMANDS
        for action in importlib.import_module(f"anyaccel.cli.{command}").build_parser()._actions
        if action.type in (int, float)
    ]


OPTIONS = numeric_options()


def test_the_commands_have_options_with_numbers() -> None:
    assert {command for command, _ in OPTIONS} >= {"run", "bind", "topo", "generate", "chat", "bench", "quantize"}
    callables = [
        action.type
        for command in COMMANDS
        for action in importlib.import_module(f"anyaccel.cli.{command}").build_parser()._actions
        if isinstance(action.type, type) and action.type not in (int, float)
    ]
    assert not callables  # of a type that nobody has made strict


@pytest.mark.parametrize(("command", "action"), OPTIONS, ids=[f"{c}-{a.dest}" for c, a in OPTIONS])
def test_an_option_takes_numbers_only(command: str, action: argparse.Action) -> None:
    parser = importlib.import_module(f"anyaccel.cli.{command}").build_parser()
    name = action.option_strings[0]
    for text in NO_WHOLE_ONES if action.type is int else NO_DECIMAL_ONES:
        with pytest.raises(UsageError, match=name):
            parser.parse_args([f"{name}={text}"])
    good = str(next(iter(action.choices))) if action.choices else "8"
    words = {
        "bench": ["llm"],
        "quantize": ["a", "b"],
        "generate": ["text"],
        "run": ["x.py"],
        "embed": ["--model", "x"],
        "rerank": ["query", "--model", "x"],
    }.get(command, [])
    assert getattr(parser.parse_args([f"{name}={good}", *words]), action.dest) == int(good)


def test_the_alias_of_deepspeeds_command_takes_numbers_only() -> None:
    from anyaccel.compat.deepspeed.launcher.runner import parse_args

    for name in ("num_nodes", "num_gpus", "master_port", "node_rank", "ssh_port"):
        assert getattr(parse_args([f"--{name}=7", "x.py"]), name) == 7
        with pytest.raises(SystemExit):
            parse_args([f"--{name}=1_0", "x.py"])


PARSERS = (env._positive_float, env._positive_int, env._whole_number)
VARIABLES = [variable for variable in env.ALL if variable.parse in PARSERS]


@pytest.mark.parametrize("variable", VARIABLES, ids=[variable.name for variable in VARIABLES])
def test_a_variable_takes_numbers_only(variable: env.EnvVar[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in filter(None, NO_DECIMAL_ONES if variable.parse is env._positive_float else NO_WHOLE_ONES):
        monkeypatch.setenv(variable.name, text)
        with pytest.raises(UsageError, match=f"{variable.name}="):
            variable.get()
    monkeypatch.setenv(variable.name, "12")
    assert variable.get() == 12


def test_every_variable_that_is_a_number_is_looked_at() -> None:
    numbers = {variable.name for variable in env.ALL if isinstance(variable.default, int | float)}
    numbers -= {variable.name for variable in env.ALL if isinstance(variable.default, bool)}
    assert numbers <= {variable.name for variable in VARIABLES}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
def test_a_variable_of_a_launch_takes_numbers_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel import comm

    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    for variable, value in good.items():
        monkeypatch.setenv(variable, value)
    for text in filter(None, NO_WHOLE_ONES):
        monkeypatch.setenv(name, text)
        with pytest.raises(UsageError, match=f"{name}="):
            comm.get_local_rank() if name == "LOCAL_RANK" else comm.init_distributed()


def test_what_is_a_number() -> None:
    assert [parse_integer(text) for text in ("0", "007", "-3", "12345678901234567890")] == [
        0,
        7,
        -3,
        12345678901234567890,
    ]
    assert [parse_number(text) for text in ("0", "-.5", "1e-3", "2.", "1E+2")] == [0, -0.5, 0.001, 2, 100]
