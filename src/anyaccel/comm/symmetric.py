# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory that all ranks of a group have mapped."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch

from anyaccel import _native
from anyaccel.comm.collectives import Collectives
from anyaccel.errors import CommError, UsageError

_PAGE = 4096
_TEXT_BYTES = 1024
_LAST_NUMBER = 65535  # csrc/comm/shm_group.h

# Counts the allocations of each group: ranks allocate in the same order, so equal numbers mean the same memory.
_numbers: WeakKeyDictionary[_native.ShmGroup, itertools.count[int]] = WeakKeyDictionary()
# The kind of memory that has worked for a group.
_kinds: WeakKeyDictionary[_native.ShmGroup, tuple[str, ...]] = WeakKeyDictionary()


def _all_gather_text(transport: Collectives, text: str) -> list[str]:
    """Every rank's text, in rank order."""
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
    data = text.encode()[: _TEXT_BYTES - 1]
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    parts = [torch.empty_like(own) for _ in range(transport.size)]
    transport.all_gather(parts, own)
    return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts]


def _release(native: _native.ShmGroup, number: int, segments: list[_native.ShmSegment]) -> None:
    native.remove_symmetric(number)
    segments.clear()


def _map_segments(transport: Collectives, size: int) -> tuple[_native.ShmSegment, list[_native.ShmSegment]]:
    """This rank's segment, and the segments of all ranks, mapped into this process.

    memfd comes first; ranks in separate pid namespaces cannot open each other's, and use /dev/shm. The ranks exchange
    whether they have succeeded, so that all of them use the same kind.
    """
    failures: list[str] = []
    for kind in _kinds.get(transport.native, ("memfd", "posix")):
        own: _native.ShmSegment | None = None
        name, error = "", ""
        try:
            own = _native.ShmSegment.create(size, kind == "memfd")
            name = own.name
        except OSError as problem:
            error = str(problem)
        offers = [json.loads(text) for text in _all_gather_text(transport, json.dumps([name, size, error[:300]]))]
        wanted = sorted({peer_size for _, peer_size, _ in offers})
        if len(wanted) > 1:
            raise CommError(f"the ranks asked for symmetric tensors of different sizes: {wanted} bytes")
        without_memory = [f"rank {r} has no memory: {problem}" for r, (_, _, problem) in enumerate(offers) if problem]
        segments: list[_native.ShmSegment] = []
        if own is not None and not without_memory:
            try:
                for rank, (peer_name, _, _) in enumerate(offers):
                    segments.append(own if rank == transport.rank else _native.ShmSegment.open(peer_name, size))
            except OSError as problem:
                error = f"{problem} (of rank {len(segments)})"
        unreachable = [f"rank {r}: {text}" for r, text in enumerate(_all_gather_text(transport, error[:500])) if text]
        if own is not None and not without_memory and not unreachable:
            own.unlink()
            _kinds[transport.native] = (kind,)
            return own, segments
        failures.append("; ".join(without_memory or unreachable))
        del own, segments
    causes = (f"without a name: {failures[0]}", f"in /dev/shm: {failures[-1]}") if len(failures) > 1 else failures
    raise CommError(f"the ranks cannot share {size} bytes for a symmetric tensor: " + "; ".join(causes))


def allocate(transport: Collectives, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of this rank in shared memory; every rank of the group calls it with the same arguments.

    Raises:
        CommError: the ranks asked for different sizes, one of them has no memory, or they cannot open each other's.
        UsageError: a negative length.
    """
    dtype = dtype or torch.get_default_dtype()
    if any(length < 0 for length in shape):
        raise UsageError(f"a symmetric tensor of shape {list(shape)}: lengths are 0 or more")
    numel = math.prod(shape)
    size = -(-max(numel * dtype.itemsize, 1) // _PAGE) * _PAGE
    number = next(_numbers.setdefault(transport.native, itertools.count(1)))
    if number > _LAST_NUMBER:
        raise CommError(f"a group can have {_LAST_NUMBER} symmetric tensors in its life; keep them and use them again")
    own, segments = _map_segments(transport, size)
    # torch.frombuffer keeps this ctypes array alive, and the array's finalizer frees the memory.
    kind: Any = type("Memory", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": size})
    memory = kind.from_address(own.address)
    transport.native.add_symmetric(number, [segment.address for segment in segments], size)
    weakref.finalize(memory, _release, transport.native, number, segments).atexit = False
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)
