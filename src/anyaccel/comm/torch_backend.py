# SPDX-License-Identifier: Apache-2.0
"""What torch takes for the backend of a group that is written in Python."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyaccel.errors import UsageError


class TorchBackend:
    """The group itself, as `group._get_backend(device)` gives it.

    torch's `_set_pg_timeout` asks for the backend's class whether it has a timeout that can be set, and knows only its
    own, which cannot be derived from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str) -> None:
        """
        Raises:
            UsageError: the group has nothing for the device.
        """
        if torch.device(device).type != "cpu":
            raise UsageError(f"backend {group.name()} has nothing for {device}: it works on the CPU")
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return getattr(dist, "ProcessGroupGloo", TorchBackend)
