# SPDX-License-Identifier: Apache-2.0
"""Python imports this at its start where `anyaccel run --as-cuda` has put its folder into PYTHONPATH.

The mode begins when torch has been imported: a program without torch costs nothing. A sitecustomize of somebody else,
which this one hides, runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes 5 ms of each start


class _AfterTorch:
    """Finds torch as everybody does, and begins the mode once its code has run.

    In its place until then: packages ask for torch's spec only to see whether it is installed.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(_AfterTorch)
                import anyaccel.cuda  # noqa: F401

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _others() -> None:
    """The next sitecustomize.py of sys.path."""
    rest = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("ANYACCEL_AS_CUDA"):
    sys.meta_path.insert(0, _AfterTorch)
_others()
