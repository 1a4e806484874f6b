# SPDX-License-Identifier: Apache-2.0
"""Page-aligned, locked host memory from the asynchronous I/O op, for direct file I/O into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Block(NamedTuple):
    addresses: range
    storage: StorageWeakRef


class LockedMemory:
    """Hands out locked tensors and knows them again, views of them too, by their address until they are freed.

    Args:
        builder: makes the op builder, whose op has DeepSpeed's `aio_handle`; called on first use.
    """

    def __init__(self, builder: Callable[[], Any]) -> None:
        self._builder = builder
        self._handle: Any = None
        self._blocks: list[_Block] = []

    def pin(self, tensor: torch.Tensor, make_copy: bool, match_shape: bool) -> torch.Tensor:
        """New locked memory for a host tensor: of its shape or flat, filled with its values or not.

        Raises:
            CapabilityError: the op is not there.
        """
        if self._handle is None:
            # block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism: none matters here.
            self._handle = self._builder().load().aio_handle(128 << 10, 8, False, False, 1)
        flat: torch.Tensor = self._handle.new_cpu_locked_tensor(tensor.numel(), tensor)[: tensor.numel()]
        storage = flat.untyped_storage()
        addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        self._blocks.append(_Block(addresses, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
        if make_copy:
            flat.copy_(tensor.flatten())
        return flat.view(tensor.shape) if match_shape else flat

    def _find(self, tensor: torch.Tensor) -> _Block | None:
        # The address of memory that went with its tensor may have been given to another.
        self._blocks = [block for block in self._blocks if not block.storage.expired()]  # type: ignore[no-untyped-call]
        address = tensor.data_ptr()
        return next((block for block in self._blocks if address in block.addresses), None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return bool(self._blocks) and self._find(tensor) is not None

    def free(self, tensor: torch.Tensor) -> None:
        """Give the memory of this tensor back now; nothing happens when it is none of these."""
        block = self._find(tensor)
        if block is not None:
            self._blocks.remove(block)
            self._handle.free_cpu_locked_tensor(tensor)
