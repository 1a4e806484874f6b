# SPDX-License-Identifier: Apache-2.0
"""Changes modules of torch that `import torch` does not load: when a program imports them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with the module once it has been loaded; at once where it is there already."""
    if name in sys.modules:
        change(sys.modules[name])
        return

    class Finder:
        """In its place until the module is loaded: packages ask for its spec only to see whether it is installed."""

        looking = False

        @staticmethod
        def find_spec(wanted: str, path: Any = None, target: Any = None) -> Any:
            if wanted != name or Finder.looking:
                return None
            Finder.looking = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                Finder.looking = False
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    run(module)
                    sys.meta_path.remove(Finder)
                    change(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
