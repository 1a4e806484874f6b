# SPDX-License-Identifier: Apache-2.0
"""The argument parser of every subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable

from anyaccel.errors import UsageError
from anyaccel.numerals import parse_number, parse_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


# Characters of a message: argparse quotes words as they were given, however long they are.
_LONGEST = 400


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse makes a formatter for each argument and asks shutil for its width: 14 ms of imports."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_terminal_width() - 2)


def _terminal_width() -> int:
    try:
        return int(os.environ.get("COLUMNS", "")) or os.get_terminal_size().columns
    except (ValueError, OSError):
        return 80


def strict_numbers(parser: argparse.ArgumentParser) -> None:
    """Have options of the types int and float take what a person writes, not all that `int` and `float` do."""
    parser.register("type", int, parse_whole)
    parser.register("type", float, parse_number)


class Parser(argparse.ArgumentParser):
    """argparse with four differences.

    - A mistake raises UsageError, which the command prints as one line with exit code 2.
    - Every long option is accepted with dashes and with underscores.
    - Options are never abbreviated: an abbreviation would change its meaning when an option is added.
    - Help that cannot be written raises OSError, as other output does.
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
        print(message, end="", file=file or sys.stderr)

    def error(self, message: str) -> NoReturn:
        said = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        raise UsageError(f"{said}; see {self.prog} --help")

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Add an argument; the other spelling of a long option is added without being shown in the help."""
        return self._spelled(super().add_argument(*names, **kwargs), names)

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """`add_argument` for a group of the help with a title of its own."""
        group = self.add_argument_group(title)
        return lambda *names, **kwargs: self._spelled(group.add_argument(*names, **kwargs), names)

    def also(self, action: argparse.Action, name: str) -> None:
        """Accept another name for an option, one that it had once, without showing it in the help."""
        self._spelled(action, (name,))

    def _spelled(self, action: argparse.Action, names: Iterable[str]) -> argparse.Action:
        for name in names:
            if name.startswith("--"):
                body = name[2:]
                for spelling in (f"--{body.replace('-', '_')}", f"--{body.replace('_', '-')}"):
                    self._option_string_actions.setdefault(spelling, action)
        return action
