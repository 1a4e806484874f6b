#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds what `pip install -e .` would install, as a wheel in a folder, without touching the environment.

    python tools/editable_wheel.py build/editable

So the compiler works while pip installs other packages, which it has to do alone. It needs the packages of
pyproject.toml's [build-system] and ninja; what the build prints is shown where it fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def shown_on_failure() -> Iterator[None]:
    """Keep standard output and error, those of child processes too, and print them where it ends by an exception."""
    with tempfile.TemporaryFile() as kept:
        before = [os.dup(number) for number in (1, 2)]
        sys.stdout.flush()
        for number in (1, 2):
            os.dup2(kept.fileno(), number)
        try:
            yield
        except BaseException:
            sys.stdout.flush()
            kept.seek(0)
            os.write(before[1], kept.read())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), before, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    os.chdir(Path(__file__).parents[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with shown_on_failure():
        from scikit_build_core.build import build_editable

        build_editable(str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
