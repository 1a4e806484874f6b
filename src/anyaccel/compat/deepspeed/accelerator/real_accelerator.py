# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.real_accelerator: which accelerator it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel.accelerator import get_accelerator, is_current_accelerator_supported
from anyaccel.accelerator import set_accelerator as _set_accelerator
from anyaccel.accelerator.select import REGISTRY
from anyaccel.vendors import FAMILIES

from .._cover import cover

if TYPE_CHECKING:
    from anyaccel.accelerator import Accelerator

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

# Values of DS_ACCELERATOR.
SUPPORTED_ACCELERATOR_LIST = sorted({*REGISTRY.names(), *FAMILIES})


def set_accelerator(accel_obj: Accelerator) -> None:
    """`anyaccel.accelerator.set_accelerator`, whose argument has DeepSpeed's name."""
    _set_accelerator(accel_obj)


cover(globals())
