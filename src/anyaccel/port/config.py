# SPDX-License-Identifier: Apache-2.0
"""`[tool.anyaccel.port]` of the nearest pyproject.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.port.rules import RULES
from anyaccel.terminal import did_you_mean

_KEYS = ("select", "ignore", "exclude", "unsafe-fixes")


@dataclass(frozen=True)
class PortConfig:
    """What is looked for and where.

    Attributes:
        select, ignore: codes of rules or how they begin, such as ACC2; ignore wins.
        exclude: patterns of paths that are left out.
        unsafe: also make the fixes that need a reader.
    """

    select: tuple[str, ...] = ("ACC",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    unsafe: bool = False

    def wants(self, code: str) -> bool:
        """Whether the rule of this code is applied."""
        return code.startswith(self.select) and not (self.ignore and code.startswith(self.ignore))

    def changed(self, select: str | None, ignore: str | None, unsafe: bool = False) -> PortConfig:
        """A copy in which options of the command line replace those of the file.

        Raises:
            UsageError: a rule that is not there.
        """
        changes: dict[str, Any] = {"unsafe": True} if unsafe else {}
        if select is not None:
            changes["select"] = checked(select.split(","), "--select")
        if ignore is not None:
            changes["ignore"] = checked(ignore.split(","), "--ignore")
        return replace(self, **changes)


def checked(codes: Iterable[str], where: str) -> tuple[str, ...]:
    """The codes, in capitals.

    Raises:
        UsageError: none begins like one of them.
    """
    found = tuple(code.strip().upper() for code in codes if code.strip())
    for code in found:
        if not any(rule.code.startswith(code) for rule in RULES):
            near = did_you_mean(code, [rule.code for rule in RULES])
            raise UsageError(f"{where}: no rule is or begins with {code!r}{near}; `anyaccel port --rules` lists them")
    return found


def find(path: str) -> PortConfig:
    """The configuration for this file or folder: of the nearest pyproject.toml that has the table.

    Raises:
        UsageError: the table has an unknown key, a wrong value or a rule that is not there.
    """
    start = Path(path).absolute()
    return _find(start if start.is_dir() else start.parent)


@functools.cache
def _find(folder: Path) -> PortConfig:
    for each in (folder, *folder.parents):
        file = each / "pyproject.toml"
        if file.is_file():
            try:
                content = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
            table = content.get("tool", {}).get("anyaccel", {}).get("port")
            if table is not None:
                return _parse(table, f"{file}: [tool.anyaccel.port]")
    return PortConfig()


def _parse(table: object, where: str) -> PortConfig:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(
                f"{where}: unknown key {key!r}{did_you_mean(str(key), _KEYS)}; there are {', '.join(_KEYS)}"
            )
        if key == "unsafe-fixes":
            if not isinstance(value, bool):
                raise UsageError(f"{where}: {key} = {value!r} must be true or false")
            values["unsafe"] = value
            continue
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{where}: {key} = {value!r} must be a list of strings")
        values[key] = tuple(value) if key == "exclude" else checked(value, f"{where}: {key}")
    return PortConfig(**values)
