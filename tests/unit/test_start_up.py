# SPDX-License-Identifier: Apache-2.0
"""The start-up set: what a launch imports before its workers run, and what these modules do without to start fast.

pyproject.toml names the set: the modules of the package that ruff lets use `os.path`. For them:

- Nothing of `COSTLY` is imported on the way to a worker. What only annotations need is imported below a
  `TYPE_CHECKING = False`, which type checkers take for True; what one option needs, where that option is met.
- A record that every launch makes is a plain class: a dataclass compiles its methods at import, 1 ms each.

Every other module is written as one writes Python.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "anyaccel"

# Each takes 3 to 6 ms to import, where all of `anyaccel run` takes about 100.
COSTLY = {
    "json",
    "logging",
    "numpy",
    "pathlib",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "torch",
    "typing",
}

_MAIN = "import sys; from anyaccel.cli import main; sys.exit(main({}))"
# Each way into the package -> the code that goes it, and what of COSTLY it cannot do without.
WAYS = {
    "import": ("import anyaccel", set()),
    "help": (_MAIN.format(["--help"]), set()),
    "run": (_MAIN.format(["run", "--num_accelerators", "1", "--bind_cores_to_rank", "--no_python", "true"]), set()),
    # Also where there is no such library.
    "run with an allocator": (_MAIN.format(["run", "--malloc", "jemalloc", "--no_python", "true"]), set()),
    "bind": (_MAIN.format(["bind", "--local_rank", "0", "--local_size", "1", "true"]), set()),
    # Messages between hosts are JSON.
    "agent": ("import sys; from anyaccel.launch.cluster.node import main; sys.exit(main([]))", {"json"}),
}

# Workers and the guardian are forks, so their imports are seen too.
_RECORDER = """
import sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        with open({file!r}, "a") as file:
            file.write(name + "\\n")
sys.meta_path.insert(0, Recorder())
"""


def start_up_set() -> set[str]:
    """The modules, by their names, that pyproject.toml lets use `os.path`."""
    ignored = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    found = set()
    for pattern, rules in ignored.items():
        if "PTH" in rules:
            folder, names = re.fullmatch(r"src/(.+)/{(.+)}\.py", pattern).groups()
            found |= {f"{folder}/{name}".replace("/", ".").removesuffix(".__init__") for name in names.split(",")}
    return found


@functools.cache
def imported_by(way: str) -> frozenset[str]:
    """The modules that the processes of this way into the package import, beyond those of a bare Python."""
    with tempfile.NamedTemporaryFile("r") as file:
        code = _RECORDER.format(file=file.name) + WAYS[way][0]
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr, done.stderr
        return frozenset(file.read().split())


def ours(names: frozenset[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "anyaccel"} - {"anyaccel._native"}


@pytest.mark.parametrize("way", WAYS)
def test_a_start_imports_nothing_costly(way: str) -> None:
    assert not COSTLY & imported_by(way) - WAYS[way][1]
    assert ours(imported_by(way)) <= start_up_set()


def test_the_start_up_set_has_only_what_a_start_imports() -> None:
    assert start_up_set() == set().union(*(ours(imported_by(way)) for way in WAYS))


def test_all_else_is_written_as_usual() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        contorted = re.search(r"^TYPE_CHECKING = False|^import _socket|ruff: noqa: PTH", path.read_text(), re.MULTILINE)
        assert not contorted or name in start_up_set(), f"{name}: {contorted[0]}"
