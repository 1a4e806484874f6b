# SPDX-License-Identifier: Apache-2.0
"""Which files are looked at, below the paths that were given."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".ipynb")
SKIPPED_FOLDERS = {
    ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "build", "dist", "node_modules", "__pycache__",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", "site-packages",
}  # fmt: skip

_OUTPUTS = ("build", "dist")


@dataclass(frozen=True)
class Skipped:
    """A path that is not looked at, with the reason; `failed` is one that should have been."""

    path: str
    reason: str
    failed: bool = True


def find(paths: Sequence[str], excluded: Sequence[str] = ()) -> Iterator[str | Skipped]:
    """Files to look at, sorted within a folder, each once; and what is in the way of others.

    Args:
        paths: files are taken whatever they are called; folders are searched for Python files and notebooks.
        excluded: patterns, for whole paths and for single names.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        for each in _below(path, excluded):
            if isinstance(each, Skipped):
                yield each
                continue
            try:
                status = Path(each).stat()
            except OSError as error:
                yield Skipped(each, (error.strerror or str(error)).lower())
                continue
            if not stat.S_ISREG(status.st_mode):
                yield Skipped(each, "not a regular file", failed=each == path)
            elif (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield each


def _below(path: str, excluded: Sequence[str]) -> Iterator[str | Skipped]:
    if not Path(path).is_dir():
        yield Skipped(path, "`exclude` names it", failed=False) if is_excluded(path, excluded) else path
        return
    problems: list[Skipped] = []

    def failed(error: OSError) -> None:
        problems.append(Skipped(str(error.filename), (error.strerror or str(error)).lower()))

    for folder, folders, names in os.walk(path, onerror=failed):
        yield from problems
        problems.clear()
        kept = []
        for name in sorted(folders):
            each = str(Path(folder, name))
            if is_excluded(each, excluded):
                continue
            if name in SKIPPED_FOLDERS and not _is_package(each, name):
                if name in _OUTPUTS and next(Path(each).rglob("*.py"), None) is not None:
                    yield Skipped(each, "by its name the output of a build; name it to look into it", failed=False)
                continue
            if Path(each).is_symlink():
                yield Skipped(each, _link_reason(folder, each), failed=False)
            else:
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            each = str(Path(folder, name))
            if name.endswith(SUFFIXES) and not is_excluded(each, excluded):
                yield each
    yield from problems


def _is_package(folder: str, name: str) -> bool:
    """Whether a folder that is called like the output of a build is a package of Python modules."""
    either = (Path(folder, "__init__.py"), Path(folder).parent / "__init__.py")
    return name in _OUTPUTS and any(each.is_file() for each in either)


def _link_reason(folder: str, link: str) -> str:
    target = Path(os.path.realpath(link))
    inside = Path(os.path.realpath(folder))
    if target == inside or target in inside.parents:
        return "a symbolic link that leads back to a folder around it"
    return "a symbolic link to a folder; name the folder itself to look into it"


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the path, its last name, or a folder on the way."""
    parts = Path(path).parts
    for pattern in patterns:
        pattern = pattern.rstrip("/")
        if any(fnmatch.fnmatch(part, pattern) for part in parts):
            return True
        whole = Path(path).as_posix()
        if (
            fnmatch.fnmatch(whole, pattern)
            or fnmatch.fnmatch(whole, f"{pattern}/*")
            or fnmatch.fnmatch(whole, f"*/{pattern}")
        ):
            return True
    return False
