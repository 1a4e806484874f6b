# SPDX-License-Identifier: Apache-2.0
"""`python -m anyaccel.cuda [--report] [--json] [--amp] script.py ...`: runs a program as `python` does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from anyaccel.cuda.mode import install
from anyaccel.cuda_job import CudaJobOptions
from anyaccel.errors import UsageError

_USAGE = """\
usage: python -m anyaccel.cuda [--report] [--json] [--amp] (script.py | -m module) [args ...]

Run a program that names CUDA, unchanged, on the accelerator of this machine.

  --report  print at exit what was redirected, how, and where
  --json    that table as one JSON object
  --amp     mixed precision that the program asks for is used on a CPU too, in bfloat16

examples:
  python -m anyaccel.cuda train.py --epochs 3
  python -m anyaccel.cuda --report -m package.train
  anyaccel run --as-cuda --num_accelerators 2 train.py    (several processes)
"""


def main(argv: list[str]) -> int:
    """Run the program; its exit code is that of the process."""
    names = []
    while argv and argv[0] in ("--report", "--json", "--amp"):
        names.append(argv.pop(0)[2:])
    if not argv or argv[0] in ("-h", "--help"):
        (sys.stdout if argv else sys.stderr).write(_USAGE)
        return 0 if argv else 2
    as_module = argv[0] == "-m"
    if as_module:
        argv.pop(0)
    if not argv:
        raise UsageError("-m: needs the module to run; --help shows how")
    if argv[0].startswith("-") and not as_module:
        raise UsageError(f"{argv[0]}: no such option; --help lists them")
    if not as_module:
        _check_program(Path(argv[0]))
    install(CudaJobOptions(**dict.fromkeys(names, True)))
    sys.argv = argv
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(argv[0]).absolute().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


def _check_program(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{path}: a folder without a __main__.py; name the script to run")
    if path.suffix == ".ipynb":
        raise UsageError(f"{path}: a notebook; write `import anyaccel.cuda` into its first cell instead")


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except UsageError as error:
        sys.stderr.write(f"anyaccel.cuda: {error}\n")
        code = 2
    sys.exit(code)
