# SPDX-License-Identifier: Apache-2.0
"""Page-aligned host memory, locked or not."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import operator
import os
import resource
import threading
import weakref
from collections.abc import Callable

import torch

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import AioError, AnyAccelError, UsageError

logger = logging.getLogger("anyaccel.aio")

_HUGE_PAGE = 2 << 20


class Memory(mmap.mmap):
    """Anonymous memory that is unmapped, and so unlocked, with the last tensor on it."""

    _locked: tuple[int, int] | None = None  # address and number of bytes that mlock() has locked
    _unregister: Callable[[], object] | None = None

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock this part in memory, by registering it with the accelerator or else by mlock()."""
        accelerator = get_accelerator()
        if accelerator.has("register_host_memory"):
            try:
                if accelerator.register_host_memory(address, num_bytes):
                    self._unregister = lambda: accelerator.unregister_host_memory(address)
                    return
            except (AnyAccelError, RuntimeError) as error:
                warn_once("register", "host memory could not be registered with the accelerator: %s", error)
        if _mlock(address, num_bytes):
            self._locked = address, num_bytes
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        warn_once(
            "mlock",
            "%d bytes could not be locked in memory (%s; RLIMIT_MEMLOCK is %d bytes): tensors are page-aligned but may "
            "be swapped out; raise the limit with ulimit -l. This is said once.",
            num_bytes, os.strerror(ctypes.get_errno()), soft,
        )  # fmt: skip

    def release(self) -> None:
        """Unlock the memory; its addresses stay valid until the last tensor is gone."""
        unregister, self._unregister = self._unregister, None
        locked, self._locked = self._locked, None
        if unregister is not None:
            unregister()
        if locked is not None:
            _munlock(*locked)

    def __del__(self) -> None:
        if self._unregister is not None:
            try:
                self._unregister()
            except (AnyAccelError, RuntimeError):  # the device's runtime may be gone by then, at exit
                logger.debug("host memory was not unregistered", exc_info=True)


_memories: dict[int, weakref.ref[Memory]] = {}  # address -> memory of new_locked_tensor()
_mutex = threading.Lock()
_said: set[object] = set()


def warn_once(what: object, text: str, *arguments: object) -> None:
    """Log a warning, unless there was one about `what`."""
    if what not in _said:
        _said.add(what)
        logger.warning(text, *arguments)


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("mlock", "munlock"):
        getattr(library, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def _mlock(address: int, num_bytes: int) -> bool:
    return bool(_libc().mlock(address, num_bytes) == 0)


def _munlock(address: int, num_bytes: int) -> None:
    _libc().munlock(address, num_bytes)


def aligned_memory(num_bytes: int, phase: int = 0) -> tuple[Memory, int]:
    """New memory, and the position in it of `num_bytes` bytes that begin `phase` bytes past a page boundary.

    Large memory is in huge pages. The content is zero, and no page is allocated before it is touched.
    """
    huge = num_bytes >= _HUGE_PAGE
    size = max(phase + num_bytes, 1)
    memory = Memory(-1, size + (_HUGE_PAGE if huge else 0), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if huge:
        start = -data_address(memory) % _HUGE_PAGE
        try:
            memory.madvise(mmap.MADV_HUGEPAGE, start, size)
        except OSError:  # a kernel without huge pages
            start = 0
    return memory, start + phase


def data_address(memory: mmap.mmap, start: int = 0) -> int:
    """The address of a byte of writable mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, start))


def new_locked_tensor(num_elem: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor in memory of its own, page-aligned and locked."""
    if num_elem <= 0:
        return torch.empty(0, dtype=dtype)
    memory, start = aligned_memory(num_elem * dtype.itemsize)
    address = data_address(memory, start)
    # The accelerator and RLIMIT_MEMLOCK count whole pages.
    memory.lock(address, -(-num_elem * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE)
    with _mutex:
        for other in [other for other, there in _memories.items() if there() is None]:
            del _memories[other]
        _memories[address] = weakref.ref(memory)
    return torch.frombuffer(memory, dtype=dtype, count=num_elem, offset=start)


def free_locked_tensor(tensor: torch.Tensor) -> bool:
    """Unlock the memory of a tensor of new_locked_tensor(), or of a view of one; False for another tensor."""
    return tensor.is_cpu and free_locked(tensor.untyped_storage().data_ptr())


def free_locked(address: int) -> bool:
    """Unlock the memory of new_locked_tensor() that begins at `address`; False where there is none."""
    with _mutex:
        there = _memories.pop(address, None)
    memory = there() if there is not None else None
    if memory is None:
        return False
    memory.release()
    return True


def is_locked(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or what it is a view of, came from new_locked_tensor() and was not freed."""
    there = _memories.get(tensor.untyped_storage().data_ptr())
    return there is not None and there() is not None


class LockedTensors:
    """DeepSpeed's methods for tensors in locked memory, which its handles have."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A flat host tensor of `num_elem` elements of the dtype of `example_tensor`.

        Its memory is page-aligned, in huge pages where it is large enough, and freed with the tensor. It is registered
        with an accelerator that does that (so it is pinned), else locked; where RLIMIT_MEMLOCK forbids that, there is
        one warning.

        Raises:
            UsageError: `num_elem` is negative.
            AioError: there is no memory of this size.
        """
        count, dtype = operator.index(num_elem), example_tensor.dtype
        if count < 0:
            raise UsageError(f"new_cpu_locked_tensor: num_elem={num_elem} must not be negative")
        try:
            return new_locked_tensor(count, dtype)
        except (OSError, OverflowError):
            why = f"there is no memory of {count * dtype.itemsize} bytes (errno {errno.ENOMEM})"
            raise AioError(errno.ENOMEM, f"new_cpu_locked_tensor: {why}", "", 0) from None

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock the memory of a tensor of new_cpu_locked_tensor(), or of a view of one, now.

        Its addresses stay valid until the last tensor on them is gone, so a late access is no crash. False when the
        tensor is none of these.
        """
        return free_locked_tensor(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` is in locked or pinned host memory."""
        return buffer.is_cpu and (is_locked(buffer) or buffer.is_pinned())
