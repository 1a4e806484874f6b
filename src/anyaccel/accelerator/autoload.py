# SPDX-License-Identifier: Apache-2.0
"""Imports torch so that a broken vendor package is a warning and not a crash.

`import torch` loads every package that registers in the entry-point group "torch.backends", and fails as a whole when
one of them does. Here torch is imported without them, and then each is loaded by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points

from anyaccel import env
from anyaccel.accelerator import deadline
from anyaccel.accelerator.spec import BackendSpec
from anyaccel.errors import AcceleratorUnavailableError
from anyaccel.extras import pip_line

logger = logging.getLogger(__name__)

_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own switch

# Why an import of torch broke off in the middle. What it left behind makes another attempt fail otherwise, or crash.
_broken: BaseException | None = None


def import_torch() -> None:
    """Import torch and the packages that extend it; nothing to do when torch is imported already.

    Raises:
        AcceleratorUnavailableError: torch is not installed, or it is damaged.
    """
    if "torch" in sys.modules and _broken is None:
        return
    _import_alone()
    if os.environ.get(_VARIABLE) in (None, "1"):
        for point in entry_points(group="torch.backends"):
            _load(point)


def _import_alone() -> None:
    global _broken
    if _broken is not None:
        raise _unusable(_broken) from _broken
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        torch = importlib.import_module("torch")
        for name in ("Tensor", "device", "dtype", "nn"):
            if not hasattr(torch, name):  # a folder of that name is found first, or half of torch has been removed
                place = torch.__file__ or ", ".join(torch.__path__)
                raise ImportError(f"{place} is not torch, or not all of it: it has no {name}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a damaged installation may raise anything
        if not _is_missing(error):
            _broken = error
        raise _unusable(error) from error
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def _unusable(error: BaseException) -> AcceleratorUnavailableError:
    if _is_missing(error):
        return AcceleratorUnavailableError(f"torch is not installed in this environment: {pip_line('torch')}")
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return AcceleratorUnavailableError(
        f"torch is installed and cannot be imported ({reason}); pip install --force-reinstall torch"
    )


def _load(point: EntryPoint) -> None:
    seconds = env.ANYACCEL_PROBE_TIMEOUT.get() or BackendSpec.probe_deadline_s
    try:
        deadline.run(lambda: point.load()(), seconds, point.module)
    except (Exception, SystemExit) as error:  # a vendor package may raise anything at import
        logger.debug("loading %s failed", point.value, exc_info=True)
        problem = f"{type(error).__name__}: {error}"
        logger.warning("torch runs without its extension %r: %s (%s=0 skips all)", point.name, problem, _VARIABLE)
