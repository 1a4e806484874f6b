# SPDX-License-Identifier: Apache-2.0
"""`anyaccel completion`: what a shell needs to complete anyaccel's commands and options.

shtab makes the script of the commands' own parsers, and the shell reads no more: completing starts no Python.
"""

from __future__ import annotations

import argparse
import importlib

from anyaccel.cli._parser import Parser
from anyaccel.launch.runners import RUNNERS

_EXAMPLES = """\
  bash   anyaccel completion bash > ~/.local/share/bash-completion/completions/anyaccel
  zsh    anyaccel completion zsh > ~/.zfunc/_anyaccel        # with fpath+=~/.zfunc before compinit
  fish   anyaccel completion fish > ~/.config/fish/completions/anyaccel.fish
  this shell only
      source <(anyaccel completion bash)

  anyaccel completion fish | source"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "completion", "Print a script that completes anyaccel's commands and options in a shell.", _EXAMPLES
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


def main(argv: list[str]) -> int:
    """Print the completion script."""
    options = build_parser().parse_args(argv)
    import shtab

    print(shtab.complete(_command(), options.shell))
    return 0


def _command() -> argparse.ArgumentParser:
    """All subcommands as one parser, as shtab wants them."""
    from anyaccel.cli import COMMANDS

    command = argparse.ArgumentParser("anyaccel")
    command.add_argument("--version", action="version", help="print the version")
    subcommands = command.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, text in COMMANDS.items():
        parser = importlib.import_module(f"anyaccel.cli.{name}").build_parser()
        for action in parser._actions:
            _complete(action)
        subcommands.add_parser(name, help=text, parents=[parser], add_help=False)
    return command


def _complete(action: argparse.Action) -> None:
    """Offer the values of an option that accepts others too, and file names for what has no list of values."""
    import shtab

    if "--launcher" in action.option_strings:
        action.choices = tuple(RUNNERS)
    elif action.nargs != 0 and action.choices is None:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
