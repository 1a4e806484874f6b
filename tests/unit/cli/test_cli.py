# SPDX-License-Identifier: Apache-2.0
"""The command line is an interface: a change of its options has to be meant."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from anyaccel.cli import COMMANDS, main
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError

FROZEN = json.loads((Path(__file__).parents[2] / "data" / "cli_options.json").read_text())


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


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_dtypes_have_the_names_that_torch_and_transformers_give_them(command: str) -> None:
    parser = importlib.import_module(f"anyaccel.cli.{command}").build_parser()
    needed = {"generate": ["prompt"], "chat": [], "bench": ["llm"]}[command]
    for spelling in ("fp16", "half", "float16", "torch.float16"):
        assert parser.parse_args([*needed, "--dtype", spelling]).dtype in ("fp16", ["fp16"])
    with pytest.raises(UsageError, match="invalid choice: 'int3'"):
        parser.parse_args([*needed, "--dtype", "int3"])
    if command != "bench":
        assert parser.parse_args([*needed, "--kv-cache", "float32"]).kv_cache == "fp32"


def test_the_group_size_has_one_name() -> None:
    quantize = importlib.import_module("anyaccel.cli.quantize").build_parser()
    for name in ("--group-size", "--group_size", "--group"):  # the last is the old name
        assert quantize.parse_args(["model", "out", name, "64"]).group_size == 64
    generate = importlib.import_module("anyaccel.cli.generate").build_parser()
    assert generate.parse_args(["prompt", "--group-size", "64"]).group_size == 64


@pytest.mark.parametrize("number", [2**31, 99999999999999, 10**40])
def test_a_number_that_no_kernel_can_hold_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--top-k", str(number)]) == 2
    expected = f"anyaccel: error: --top-k {number}: must be 0 (off) or above, and below 2**31\n"
    assert capsys.readouterr().err == expected


def test_two_dashes_can_be_the_value_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("test", "A test.", "anyaccel test")
    parser.add_argument("--text")
    parser.add_argument("--kind", choices=["a", "b"])
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--text=--", "x"]).text == "--"
    assert parser.parse_args(["--text", "a", "--", "--x"]).words == ["--x"]
    with pytest.raises(UsageError, match="invalid choice: '--'"):
        parser.parse_args(["--kind=--"])
    assert main(["generate", "hi", "--model=--", "--max-new-tokens", "1"]) == 2
    assert "--model --: no such folder or file" in capsys.readouterr().err
