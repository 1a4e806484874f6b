# SPDX-License-Identifier: Apache-2.0
"""Imported before torch by the modules that users name and that are nothing without it: says how to get it."""

from __future__ import annotations

from importlib.util import find_spec

from anyaccel.errors import MissingPackageError
from anyaccel.extras import pip_line


def _is_here() -> bool:
    try:
        return find_spec("torch") is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # a module that was made by hand
        return True


if not _is_here():
    message = f"this part of anyaccel needs torch, which is not installed: {pip_line('torch')}"
    raise MissingPackageError(message, "torch")
