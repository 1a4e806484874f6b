# SPDX-License-Identifier: Apache-2.0
"""`anyaccel compat`: makes `import deepspeed`, `deepspeed` and `ds_report` those of anyaccel in a Python environment.

This folder is what the `.pth` file adds to sys.path, so nothing stands beside the package `deepspeed` here.

What is written is a `.pth` file, two scripts and a record of them with their checksums. The record is written first and
removed last: at any moment it names everything of ours that may be there. A file that the record does not know, or
whose contents are others, is not ours and stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import secrets
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import CompatError

ALIAS_ROOT = Path(__file__).absolute().parent
RECORD = "anyaccel-compat.json"
_PTH = "anyaccel-compat.pth"
# Script -> what it calls.
_SCRIPTS = {"deepspeed": "deepspeed.launcher.runner:main", "ds_report": "deepspeed.env_report:cli_main"}
# It imports the alias by its place: whatever else is called deepspeed, the command is this one.
_SCRIPT = """\
{first_line}
# Written by `anyaccel compat install`; `anyaccel compat remove` takes it away.
import sys

sys.path.insert(0, {root!r})
from {module} import {function}

sys.exit({function}())
"""


@dataclass(frozen=True)
class State:
    """What is in the environment.

    Attributes:
        installed: everything of the alias is there.
        files: what the record names, by path: "ours", "missing" or "changed".
        imported: file that `import deepspeed` would load; None for none.
        is_alias: that file is the alias.
    """

    installed: bool
    files: dict[str, str]
    imported: str | None
    is_alias: bool


def install() -> list[Path]:
    """Put the alias into the environment of this Python; does nothing where it is complete already.

    Returns:
        The files that were written now.

    Raises:
        CompatError: the real DeepSpeed is there, a file is in the way, or Python would not find the alias afterwards.
        OSError: a folder cannot be written to.
    """
    with _alone():
        return _install()


def _install() -> list[Path]:
    found = find_deepspeed()
    if found is not None and not _is_alias(found):
        raise CompatError(
            f"DeepSpeed is installed ({found}): its names stay its own. `pip uninstall deepspeed` first, or run one "
            "job with `anyaccel run --as-deepspeed script.py`"
        )
    wanted = _wanted()
    recorded = _read_record()
    for path in wanted:
        if _state(path, recorded.get(str(path))) == "changed":
            owner = "was changed by somebody" if str(path) in recorded else "is not of anyaccel"
            raise CompatError(f"{path} {owner}, so it is not overwritten: move it away and try again")
    # Both the old contents and the new ones are ours until the end.
    sums = {str(path): sorted({*recorded.get(str(path), []), _sum(text)}) for path, text in wanted.items()}
    stale = {path: known for path, known in recorded.items() if path not in sums}
    _write(_record_path(), json.dumps({"files": {**stale, **sums}}, indent=1).encode(), replace=True)
    written: list[Path] = []
    try:
        for path, text in wanted.items():
            if path.exists() and _sum(path.read_bytes()) == _sum(text):
                continue
            ours = path.exists()
            _write(path, text, replace=ours, executable=path.suffix != ".pth")
            written.append(path)
        _check_that_python_finds_it()
    except BaseException:
        if not recorded:
            _remove()
        raise
    return written


def remove() -> tuple[list[Path], list[Path]]:
    """Take away what `install` wrote.

    Returns:
        The files that were removed, and those that stay because somebody has changed them since.

    Raises:
        OSError: a folder cannot be written to.
    """
    with _alone():
        return _remove()


def _remove() -> tuple[list[Path], list[Path]]:
    removed, left = [], []
    for name, sums in _read_record().items():
        path = Path(name)
        state = _state(path, sums)
        if state == "ours":
            path.unlink()
            removed.append(path)
        elif state == "changed":
            left.append(path)
    _record_path().unlink(missing_ok=True)
    return removed, left


def status() -> State:
    """What is there, and what `import deepspeed` would load in a new Python."""
    recorded = _read_record()
    files = {name: _state(Path(name), sums) for name, sums in recorded.items()}
    imported = _found_by_new_python()
    return State(
        installed=bool(files) and set(files.values()) == {"ours"} and {*map(str, _wanted())} <= files.keys(),
        files=files,
        imported=imported,
        is_alias=imported is not None and _is_alias(imported),
    )


def find_deepspeed() -> str | None:
    """The file that `import deepspeed` would load in this process, without importing it; None for none.

    The folder that a command was started in does not count: what is there is not installed.
    """
    folders = [entry for entry in sys.path if entry and Path(entry) != Path.cwd()]
    spec = importlib.machinery.PathFinder.find_spec("deepspeed", folders)
    if spec is not None and spec.origin is not None:
        return spec.origin
    try:
        return f"version {importlib.metadata.version('deepspeed')}, whose package is nowhere in sys.path"
    except importlib.metadata.PackageNotFoundError:
        return None


def job_environment(environ: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """Variables with which a process, and those that it starts, import the alias: for one job.

    The alias comes first in PYTHONPATH, so it is also before a DeepSpeed that is installed.
    """
    before = environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ALIAS_ROOT), before]))}


def _wanted() -> dict[Path, bytes]:
    """The files of an installation, and their contents."""
    root = str(ALIAS_ROOT)
    if "\n" in root:
        raise CompatError(f"anyaccel is in {root!r}, which no .pth file can name; install it elsewhere")
    found = {Path(sysconfig.get_path("purelib"), _PTH): f"{root}\n".encode()}
    for name, target in _SCRIPTS.items():
        module, _, function = target.partition(":")
        text = _SCRIPT.format(first_line=_first_line(), root=root, module=module, function=function)
        found[Path(sysconfig.get_path("scripts"), name)] = text.encode()
    return found


def _first_line() -> str:
    """How a script names its Python; the kernel reads 127 characters and stops at a space."""
    if len(sys.executable) < 120 and " " not in sys.executable:
        return f"#!{sys.executable}"
    return f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other process installs or removes meanwhile."""
    folder = os.open(sysconfig.get_path("purelib"), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _record_path() -> Path:
    return Path(sysconfig.get_path("purelib"), RECORD)


def _read_record() -> dict[str, list[str]]:
    """Checksums by path; empty where there is no record."""
    path = _record_path()
    try:
        record: Any = json.loads(path.read_bytes())
        files: dict[str, list[str]] = {str(name): list(map(str, sums)) for name, sums in record["files"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompatError(f"{path} is damaged ({error}): delete it, {_PTH} beside it, and our scripts") from None
    return files


def _state(path: Path, sums: list[str] | None) -> str:
    try:
        contents = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    return "ours" if sums and _sum(contents) in sums else "changed"


def _sum(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def _write(path: Path, contents: bytes, *, replace: bool, executable: bool = False) -> None:
    """Write a file at once; without `replace`, only where there is none, also when somebody makes one meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        if executable:
            temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        if replace:
            temporary.replace(path)
        else:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise CompatError(f"{path} is not of anyaccel, so it is not overwritten: move it away") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _check_that_python_finds_it() -> None:
    imported = _found_by_new_python()
    if imported is None or not _is_alias(imported):
        site = sysconfig.get_path("purelib")
        raise CompatError(
            f"a new Python would import deepspeed from {imported or 'nowhere'}, not from anyaccel: .pth files of "
            f"{site} are not read, or something else comes first; nothing was left behind"
        )


def _found_by_new_python() -> str | None:
    """What a new process of this Python finds, away from the current folder and PYTHONPATH."""
    code = "import importlib.machinery as m; s = m.PathFinder.find_spec('deepspeed'); print(s.origin if s else '')"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _is_alias(file: str) -> bool:
    """Also that of another installation of anyaccel: its package has a module that DeepSpeed has not."""
    return (Path(file).parent / "_cover.py").exists()
