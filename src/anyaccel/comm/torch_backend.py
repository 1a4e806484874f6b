# SPDX-License-Identifier: Apache-2.0
"""The interface that torch expects of a process group written in Python, which is also its own backend."""

# torch's declarations have no properties here, and an overload for each form of a call.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend  # torch.distributed has another of this name

from anyaccel.accelerator.base import HOST
from anyaccel.comm.untraced import Untraced
from anyaccel.errors import NoBackendError


class _Synchronous:
    asyncOp = False  # torch's name


SYNCHRONOUS = _Synchronous()  # the options of an operation that has none of its own


class TorchBackend(Untraced):
    """The result of `group._get_backend(device)`: it forwards to the group.

    torch's `_set_pg_timeout` sets timeouts only on the classes of its own backends, which cannot be derived from, so
    this one claims to be one of them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str) -> None:
        """
        Raises:
            NoBackendError: the group does not support the device.
        """
        if torch.device(device).type != HOST.type:
            raise NoBackendError(f"backend {group.name()} works on CPU tensors only, not on {device}")
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return getattr(dist, "ProcessGroupGloo", TorchBackend)


class TorchGroup(Untraced, dist.ProcessGroup):
    """Name, description and sequence number, which torch otherwise keeps in a group's C++ backends."""

    _sequence = 0
    _group_name = _group_description = ""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has called."""
        return self._sequence

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        """The name that torch has given the group."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """The description that the group's creator has given."""
        return self._group_description

    @property
    def options(self) -> Any:
        """torch's record of the backend, the timeout and the name."""
        found = Backend.Options(self.name(), self._get_timeout())
        found.group_name = self._group_name
        return found

    def _get_timeout(self) -> timedelta:
        """How long an operation may wait for a peer."""
        raise NotImplementedError

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> TorchBackend:
        return TorchBackend(self, device)
