# SPDX-License-Identifier: Apache-2.0
"""`anyaccel completion`: what a shell needs to complete anyaccel's commands and options.

What is printed is made of the commands' own parsers and is all that the shell reads: completing starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass

from anyaccel.cli._parser import Parser

_EXAMPLES = """\
  bash   anyaccel completion bash > ~/.local/share/bash-completion/completions/anyaccel
  zsh    anyaccel completion zsh > ~/.zfunc/_anyaccel        # with fpath+=~/.zfunc before compinit
  fish   anyaccel completion fish > ~/.config/fish/completions/anyaccel.fish
  this shell only
      source <(anyaccel completion bash)
"""
# The values to offer for options that accept others too, and so have no choices in the parser.
_VALUES = {"--launcher": ("ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")}


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    takes_value: bool
    values: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class _Command:
    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]  # the choices of positional arguments; empty for file names


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "completion",
        "Print a script that completes anyaccel's commands and options in a shell.",
        _EXAMPLES + "\n  anyaccel completion fish | source",
    )
    parser.add_argument("shell", choices=tuple(_WRITERS), help="the shell")
    return parser


def main(argv: list[str]) -> int:
    """Print the completion script."""
    options = build_parser().parse_args(argv)
    sys.stdout.write(_WRITERS[options.shell](_commands()))
    return 0


def _commands() -> list[_Command]:
    from anyaccel.cli import COMMANDS

    found = []
    for name, text in COMMANDS.items():
        parser: argparse.ArgumentParser = importlib.import_module(f"anyaccel.cli.{name}").build_parser()
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        options = tuple(_option(parser, action) for action in shown if action.option_strings)
        words = tuple(str(choice) for action in shown if not action.option_strings for choice in (action.choices or ()))
        found.append(_Command(name, text, options, words))
    return found


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> _Option:
    values = tuple(map(str, action.choices or ())) or _VALUES.get(action.option_strings[0], ())
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return _Option(tuple(action.option_strings), action.nargs != 0, values, " ".join(text.split()))


# Shells ---------------------------------------------------------------------------------------------------


def _bash(commands: list[_Command]) -> str:
    values, options, words = [], [], []
    for command in commands:
        options.append(f"    {command.name}) options={_quoted(_spellings(command.options))} ;;")
        if command.words:
            words.append(f"    {command.name}) words={_quoted(command.words)} ;;")
        for option in command.options:
            if option.takes_value:
                pattern = "|".join(f"{command.name}:{name}" for name in option.names)
                values.append(f"    {pattern}) values={_quoted(option.values or ('',))}; takes=1 ;;")
    names = _quoted([*(command.name for command in commands), "--help", "--version"])
    return "\n".join(
        [
            "# Completion of anyaccel for bash; printed by `anyaccel completion bash`.",
            "_anyaccel() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}"',
            '  local command="${COMP_WORDS[1]}" values="" options="" words="" takes=""',
            "  COMPREPLY=()",
            "  if ((COMP_CWORD == 1)); then",
            f'    mapfile -t COMPREPLY < <(compgen -W {names} -- "$current")',
            "    return",
            "  fi",
            '  case "$command:$before" in',
            *values,
            "  esac",
            '  case "$command" in',
            *options,
            "  esac",
            '  case "$command" in',
            *(words or ["    *) ;;"]),
            "  esac",
            '  if [[ -n "$takes" ]]; then',
            '    [[ -n "$values" ]] && mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")',
            '    [[ -z "$values" ]] && mapfile -t COMPREPLY < <(compgen -f -- "$current")',
            '  elif [[ "$current" == -* ]]; then',
            '    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")',
            '  elif [[ -n "$words" ]]; then',
            '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
            "  else",
            '    mapfile -t COMPREPLY < <(compgen -f -- "$current")',
            "  fi",
            "  return 0",
            "}",
            "complete -o filenames -F _anyaccel anyaccel",
            "",
        ]
    )


def _zsh(commands: list[_Command]) -> str:
    lines = [
        "#compdef anyaccel",
        "# Completion of anyaccel for zsh; printed by `anyaccel completion zsh`.",
        "_anyaccel() {",
        "  local -a commands",
        "  commands=(",
        *(f"    {_quoted([_zsh_text(command.name) + ':' + command.help])}" for command in commands),
        "  )",
        "  if (( CURRENT == 2 )); then",
        "    _describe 'command' commands",
        "    return",
        "  fi",
        '  local command="$words[2]"',
        "  shift words",
        "  (( CURRENT-- ))",
        '  case "$command" in',
    ]
    for command in commands:
        specs = [_zsh_option(name, option) for option in command.options for name in option.names]
        rest = f"*:argument:({' '.join(command.words)})" if command.words else "*:file:_files"
        lines += [f"    {command.name})", "      _arguments \\"]
        lines += [f"        {_quoted([spec])} \\" for spec in specs]
        lines += [f"        {_quoted([rest])} ;;"]
    # Sourced, it registers itself; autoloaded from fpath, it is the function's body.
    end = [
        "  esac",
        "}",
        'if [ "$funcstack[1]" = "_anyaccel" ]; then _anyaccel "$@"; else compdef _anyaccel anyaccel; fi',
        "",
    ]
    return "\n".join(lines + end)


def _zsh_option(name: str, option: _Option) -> str:
    text = f"{name}[{_zsh_text(option.help)}]"
    if not option.takes_value:
        return text
    action = f"({' '.join(option.values)})" if option.values else "_files"
    return f"{text}:value:{action}"


def _zsh_text(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\[]:" else character for character in text)


def _fish(commands: list[_Command]) -> str:
    lines = ["# Completion of anyaccel for fish; printed by `anyaccel completion fish`."]
    for command in commands:
        text = _quoted_fish(command.help)
        lines.append(f"complete -c anyaccel -f -n __fish_use_subcommand -a {command.name} -d {text}")
    for command in commands:
        start = f"complete -c anyaccel -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{start} -f -a {_quoted_fish(' '.join(command.words))}")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = f" -x -a {_quoted_fish(' '.join(option.values))}" if option.values else " -r"
            lines.append(f"{start} {names}{value if option.takes_value else ''} -d {_quoted_fish(option.help)}")
    return "\n".join([*lines, ""])


def _spellings(options: tuple[_Option, ...]) -> list[str]:
    return [name for option in options for name in option.names]


def _quoted(words: list[str] | tuple[str, ...]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"


def _quoted_fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
