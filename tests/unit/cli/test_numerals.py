# SPDX-License-Identifier: Apache-2.0
"""Numbers in options and variables: of every parser and every variable of ours, so that a new one is covered too."""

from __future__ import annotations

import argparse
import importlib

import pytest

from anyaccel import env
from anyaccel.cli import COMMANDS
from anyaccel.cli._parser import size
from anyaccel.errors import UsageError
from anyaccel.numerals import parse_bytes, parse_integer, parse_number

NO_NUMBERS = ["", "1_0", "１０", "٣", " 10 ", "10\n", "+10", "0x10", "1e", "--1", "1-", "9" * 5000, "ten"]
NO_WHOLE_ONES = [*NO_NUMBERS, "1.0", "1e3", "-"]
NO_DECIMAL_ONES = [*NO_NUMBERS, "1_0.5", "nan", "NaN", "inf", "-inf", "infinity", "1e999", ".", "1.2.3", "1,5"]


NO_SIZES = [*NO_NUMBERS, "1.0", "1e3", "-", "8 gigabytes", "8G", "1e3GB", "-8GB", " 8GB", "8  GB", "GB", "8GBB", "8GB "]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("8000000000", 8_000_000_000),
        ("512MB", 512_000_000),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5TiB", 3 << 39),
        ("0.5kB", 500),
        ("64KiB", 65536),
        ("7B", 7),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 8GiB"):
        parse_bytes(text)


def test_every_option_of_bytes_takes_sizes() -> None:
    found = {}
    for command in COMMANDS:
        for action in importlib.import_module(f"anyaccel.cli.{command}").build_parser()._actions:
            if action.dest in ("memory", "size") or action.dest.endswith("_bytes"):
                found[command, action.dest] = action.type
    assert {("generate", "memory"), ("serve", "cache_bytes"), ("quantize", "size")} <= found.keys()
    assert set(found.values()) == {size}
    parser = importlib.import_module("anyaccel.cli.serve").build_parser()
    options = parser.parse_args(["--memory", "64GiB", "--cache-disk-bytes", "1 GB", "--cache-bytes", "5"])
    assert (options.memory, options.cache_disk_bytes, options.cache_bytes) == (64 << 30, 10**9, 5)
    with pytest.raises(UsageError, match="--memory: '8G' is not a size such as 8GiB, 512MB or 8000000000"):
        parser.parse_args(["--memory", "8G"])


@pytest.mark.parametrize("variable", [env.ANYACCEL_SHM_BYTES, env.ANYACCEL_PACKED_CACHE_BYTES])
def test_variables_of_bytes_take_sizes(variable: env.EnvVar[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable.name, "3MiB")
    assert variable.get() == 3 << 20
    monkeypatch.setenv(variable.name, "3 megs")
    with pytest.raises(UsageError, match=variable.name):
        variable.get()


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


PARSERS = (env._positive_float, env._positive_int, env._size, env._positive_size)
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
