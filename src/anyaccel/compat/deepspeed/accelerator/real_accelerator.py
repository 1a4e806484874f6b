# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.real_accelerator: which accelerator it is."""

from __future__ import annotations

from anyaccel.accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator
from anyaccel.accelerator.select import FAMILIES, REGISTRY

from .._cover import cover

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

# Values of DS_ACCELERATOR.
SUPPORTED_ACCELERATOR_LIST = sorted({*REGISTRY.names(), *FAMILIES})

cover(globals())
