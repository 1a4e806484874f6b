# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.numerals import parse_bytes, parse_integer, parse_number
from anyaccel.terminal import did_you_mean, fitted, terminal_width

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


# argparse quotes an argument in full, however long it is, so error messages are cut after so many characters.
_LONGEST = 400


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that gets its width from us: argparse would import shutil to find it, which takes 14 ms."""

    def __init__(self, prog: str) -> None:
        width = terminal_width() - 2
        super().__init__(prog, width=width, max_help_position=24 if width > 70 else 16)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill a description to the width, paragraph by paragraph; examples stay as they were written."""
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        filled = ["\n".join(list_entries(each)) or " ".join(each.split()) for each in text.split("\n\n")]
        return super()._fill_text(fitted("\n\n".join(filled), width), width, indent)


def list_entries(paragraph: str) -> list[str]:
    """The entries of a paragraph that is a list, each joined to one line; [] for other paragraphs.

    Entries of a list are indented by two spaces, and their further lines by more.
    """
    if not paragraph.startswith("  "):
        return []
    entries: list[str] = []
    for line in paragraph.splitlines():
        if line[2:3] == " " and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return entries


def strict_numbers(parser: argparse.ArgumentParser) -> None:
    """Make options of the types int and float refuse what only Python accepts as a number, such as `1_000` or `nan`."""
    parser.register("type", int, parse_integer)
    parser.register("type", float, parse_number)


def size(text: str) -> int:
    """The type of options that are numbers of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


class Parser(argparse.ArgumentParser):
    """argparse with five differences.

    - A mistake raises UsageError, which the command prints as one line with exit code 2.
    - Every long option is accepted with dashes and with underscores.
    - Options are never abbreviated: an abbreviation would change its meaning when an option is added.
    - Help that cannot be written raises OSError, as other output does.
    - `--option=--` gives the option the value `--`, as newer versions of Python do; others drop it.
    """

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"anyaccel {command}",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        strict_numbers(self)

    def _print_message(self, message: str, file: Any = None) -> None:
        try:
            print(message, end="", file=file or sys.stderr)
        except BrokenPipeError:
            raise
        except OSError as error:
            (file or sys.stderr).flush()  # fails again, but for a text that is larger than the stream's buffer
            raise AnyAccelError(f"standard output cannot be written ({error.strerror or error})") from None

    def error(self, message: str) -> NoReturn:
        start, _, rest = message.partition("unrecognized arguments: ")
        if rest and not start:
            option = rest.split()[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name[:2] == "--"]
            message += did_you_mean(option, known, 0.7) if option.startswith("--") else ""
        shown = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        raise UsageError(f"{shown}; see {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"] and action.nargs is None:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among an argument's choices, and suggest those that look like it."""
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            problem = f"invalid choice: {str(value)!r}{did_you_mean(str(value), known)}; choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, problem)

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Add an argument; a long option is also accepted in its other spelling, which the help does not show."""
        return self._accept_spellings(super().add_argument(*names, **kwargs), names)

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """Begin a group of options with its own title in the help. Returns the group's `add_argument`."""
        group = self.add_argument_group(title)
        return lambda *names, **kwargs: self._accept_spellings(group.add_argument(*names, **kwargs), names)

    def add_former_name(self, action: argparse.Action, name: str) -> None:
        """Also accept a former name of an option, which the help does not show."""
        self._accept_spellings(action, (name,))

    def _accept_spellings(self, action: argparse.Action, names: Iterable[str]) -> argparse.Action:
        for name in names:
            if name.startswith("--"):
                body = name[2:]
                for spelling in (f"--{body.replace('-', '_')}", f"--{body.replace('_', '-')}"):
                    self._option_string_actions.setdefault(spelling, action)
        return action
