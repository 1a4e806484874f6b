# SPDX-License-Identifier: Apache-2.0
"""What torch asks of a group that is written in Python, and of its backend, which is the group itself."""

# torch's declarations have no properties here, and an overload for each form of a call.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyaccel.accelerator.base import HOST
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
        if torch.device(device).type != HOST.type:
            raise UsageError(f"backend {group.name()} has nothing for {device}: it works on the CPU")
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return getattr(dist, "ProcessGroupGloo", TorchBackend)


class TorchGroup(dist.ProcessGroup):
    """What torch keeps in the C++ backends of a group, of which one that is written in Python has none."""

    _sequence = 0
    _group_name = _group_description = ""

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on every rank, without an exchange."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has asked for."""
        return self._sequence

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        """The name that torch gave it."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """What its creator calls it."""
        return self._group_description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> TorchBackend:
        return TorchBackend(self, device)
