# SPDX-License-Identifier: Apache-2.0
"""Throw-away virtual environments that see the packages of the one that the tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import anyaccel

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# The import hook of an editable installation, where anyaccel is one.
_HOOK = "_editable_skbc_anyaccel"


class Environment:
    """A virtual environment.

    Attributes:
        folder, bin, site: it, its programs, its packages.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.folder, self.bin = folder, folder / "bin"
        self.site = folder / "lib" / PYTHON / "site-packages"
        entries = [str(Path(anyaccel.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
        hook = [f"import {_HOOK}"] if _HOOK in sys.modules else []
        (self.site / "running.pth").write_text("\n".join([*(entries if not hook else entries[1:]), *hook, ""]))
        self.before = self.files()

    def files(self) -> set[str]:
        """All files, relative to the folder; no bytecode."""
        return {
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    def run(self, *command: str, code: int | None = 0, cwd: Path | None = None, **variables: str) -> str:
        """Standard output and error of a program of the environment, which has to end with `code`."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(self.folder), **variables}
        if "PYTHONPATH" not in variables:
            environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd or self.folder, env=environment, timeout=100
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
