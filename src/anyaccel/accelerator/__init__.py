# SPDX-License-Identifier: Apache-2.0
"""The accelerator of this process: `get_accelerator()` and the interface behind it.

Importing this package does not import torch; the first `get_accelerator()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel._lazy import lazy
from anyaccel.accelerator.select import (
    Candidate,
    Detection,
    describe_choice,
    detection_report,
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from anyaccel.accelerator.spec import (
    API_VERSION,
    BackendSpec,
    Capabilities,
    Capability,
    CollectiveBackend,
    Unavailable,
)

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator
    from anyaccel.accelerator.torch_device import TorchDeviceAccelerator

__all__ = [
    "API_VERSION",
    "Accelerator",
    "BackendSpec",
    "Candidate",
    "Capabilities",
    "Capability",
    "CollectiveBackend",
    "Detection",
    "TorchDeviceAccelerator",
    "Unavailable",
    "describe_choice",
    "detection_report",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Accelerator": "anyaccel.accelerator.base",
        "TorchDeviceAccelerator": "anyaccel.accelerator.torch_device",
    },
)
