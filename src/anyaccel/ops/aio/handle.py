# SPDX-License-Identifier: Apache-2.0
"""`aio_handle`, the class with DeepSpeed's methods for file I/O."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from anyaccel.errors import AioError, UsageError
from anyaccel.ops._dense import why_no_memory
from anyaccel.ops.aio.memory import LockedTensors
from anyaccel.ops.aio.native import ATOMIC, CACHED, ENGINES, WRITE, native
from anyaccel.ops.aio.requests import MemoryRange, PathLike, Request, Requests, changed, copy_into, replaceable

_MAX_BLOCK = 1 << 30
_MAX_DEPTH = 4096
_MAX_THREADS = 256
_SECTOR = 512  # the unit of DeepSpeed's get_alignment()
_VALIDATED_AT_ONCE = 8 << 20

File: TypeAlias = PathLike | int


class aio_handle(LockedTensors):
    """Reads files into tensors and writes tensors to files.

    Args:
        block_size: bytes of one transfer; the engines use 32 MiB where it is more.
        queue_depth: transfers under way in one thread.
        single_submit: hand transfers to the kernel one by one instead of in batches.
        overlap_events: accepted for DeepSpeed's sake; submitting and completing always overlap.
        intra_op_parallelism: threads; all of them work on each request.
        engine: ``"io_uring"``, ``"linux_aio"``, ``"threads"``, or ``"auto"``: the first of these that works here.

    A file is given by its name or by a descriptor, which must allow what is done and may be closed at once.

    Methods with ``async`` in their name return at once; the tensor must not be changed (written to a file) or looked at
    (read) until `wait()`. A tensor is kept until then. The others return when all that the calling thread has begun is
    done. Several threads may use one handle. A process that was forked needs one of its own.

    Raises:
        UsageError: a size is not positive, or the engine is unknown.
        AioError: the engine that was asked for does not work here.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        engine: str = "auto",
    ) -> None:
        for name, value, most in (
            ("block_size", block_size, _MAX_BLOCK),
            ("queue_depth", queue_depth, _MAX_DEPTH),
            ("intra_op_parallelism", intra_op_parallelism, _MAX_THREADS),
        ):
            if not hasattr(value, "__index__") or not 0 < value <= most:
                raise UsageError(f"aio_handle: {name}={value!r} must be from 1 to {most}")
        if engine not in ENGINES:
            raise UsageError(f"aio_handle: engine={engine!r} is unknown; use one of {', '.join(ENGINES)}")
        self._block_size, self._queue_depth = block_size, queue_depth
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._threads = intra_op_parallelism
        library = native()
        self._requests = Requests(library)
        # Set before the native side opens its queues, which a Ctrl-C in between would otherwise leave open.
        self._finalizer = weakref.finalize(self, self._requests.close)
        number = library.anyaccel_aio_create(
            block_size, queue_depth, intra_op_parallelism, single_submit, ENGINES.index(engine),
            ctypes.byref(self._requests.address),
        )  # fmt: skip
        if number:
            raise AioError(number, f"aio_handle: engine {engine!r} does not work here: {os.strerror(number)}", "", 0)

    # Settings ---------------------------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """As given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """As given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._threads

    def get_alignment(self) -> int:
        """Bytes that DeepSpeed wants sizes to be a multiple of; here other sizes work too."""
        return self._threads * _SECTOR

    @property
    def engine(self) -> str:
        """The engine in use: ``"io_uring"``, ``"linux_aio"`` or ``"threads"``."""
        self._requests.check_process()
        return ENGINES[self._requests.library.anyaccel_aio_engine(self._requests.address)]

    # Reading and writing ----------------------------------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: File, validate: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from the file. Returns 0.

        Args:
            validate: read the range once more through the page cache and compare.
            file_offset: in bytes.

        Raises:
            AioError: the file cannot be read or ends too early.
            UsageError: `buffer` cannot be filled, or the offset is negative.
        """
        self._begin_read(buffer, filename, file_offset, validate)
        self._requests.wait_own()
        return 0

    def write(
        self,
        buffer: torch.Tensor,
        filename: File,
        validate: bool,
        file_offset: int = 0,
        *,
        write_atomic: bool = False,
    ) -> int:
        """Write `buffer` to the file, which is created where there is none and never shortened. Returns 0.

        A write that fails leaves no file that looks complete: a new file is removed, an old one cut off at
        `file_offset` (unless it goes on behind the range; the error says what happened).

        Args:
            validate: read the range back through the page cache and compare.
            file_offset: in bytes.
            write_atomic: write a file beside, sync and rename it: whoever opens `filename` sees the old file or all of
                the new one, whatever happens. `file_offset` must be 0.

        Raises:
            AioError: the file cannot be written, or there is no space.
            UsageError: `buffer` has no bytes to write, the offset is not possible, or write_atomic would replace a
                device, FIFO or socket by a file.
        """
        self._begin_write(buffer, filename, file_offset, validate, write_atomic)
        self._requests.wait_own()
        return 0

    def pread(self, buffer: torch.Tensor, filename: File, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`async_pread` or `sync_pread`, with read()'s `validate`."""
        self._begin_read(buffer, filename, file_offset, validate)
        return 0 if async_ else self._requests.wait_own()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: File,
        validate: bool,
        async_: bool,
        file_offset: int = 0,
        *,
        write_atomic: bool = False,
    ) -> int:
        """`async_pwrite` or `sync_pwrite`, with write()'s `validate`."""
        self._begin_write(buffer, filename, file_offset, validate, write_atomic)
        return 0 if async_ else self._requests.wait_own()

    def sync_pread(self, buffer: torch.Tensor, filename: File, file_offset: int = 0) -> int:
        """Like read(). Returns how many requests were done: 1, and those that this thread had pending."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(
        self, buffer: torch.Tensor, filename: File, file_offset: int = 0, *, write_atomic: bool = False
    ) -> int:
        """Like write(). Returns how many requests were done: 1, and those that this thread had pending."""
        return self.pwrite(buffer, filename, False, False, file_offset, write_atomic=write_atomic)

    def async_pread(self, buffer: torch.Tensor, filename: File, file_offset: int = 0) -> int:
        """Begin to fill `buffer`. Returns 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: File | None = None,
        file_offset: int = 0,
        *,
        write_atomic: bool = False,
        fd: int | None = None,
    ) -> int:
        """Begin to write `buffer`. Returns 0.

        Args:
            fd: a descriptor in the place of `filename`, under DeepSpeed's name.
        """
        file = filename if fd is None else fd
        if file is None or (filename is not None and fd is not None):
            raise UsageError(f"async_pwrite: filename={filename!r}, fd={fd!r}: give one of the two")
        self._begin_write(buffer, file, file_offset, False, write_atomic)
        return 0

    def wait(self) -> int:
        """Wait until all that is pending is done, and return how many requests that were.

        With several threads: what any of them has begun before is waited for. Those of this thread count, and fail
        here, even where another thread's wait() was first.

        Ctrl-C leaves them under way; wait again, or drop the handle to give them up.

        Raises:
            AioError: one failed. The others were waited for too; further errors are in its notes.
        """
        return self._requests.wait_all()

    def transfer(
        self,
        filename: File,
        pieces: Sequence[MemoryRange],
        *,
        write: bool,
        write_atomic: bool = False,
        cached: bool = False,
        wait: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Read or write several ranges of one file, and wait for just that.

        Args:
            pieces: in ascending order of offset, not overlapping; those of a write without gaps.
            write_atomic: as in write(); the file is given by its name then.
            cached: whether to read from the page cache, not with direct I/O.
            wait: False only begins it, and wait() waits for it.
            progress: called now and then with the number of bytes that are done, while this call waits.

        Raises:
            AioError: as read() and write() do.
            KeyboardInterrupt: Ctrl-C; the rest of the transfer is cancelled.
        """
        path, descriptor = _file(filename)
        if write_atomic:
            path = replaceable(path)
        flags = (WRITE if write else 0) | (ATOMIC if write_atomic else 0) | (CACHED if cached else 0)
        request = Request(path, descriptor, pieces, flags)
        if wait:
            self._requests.run(request, progress)
        else:
            self._requests.submit(request)

    def _begin_read(self, buffer: torch.Tensor, filename: File, file_offset: int, validate: bool) -> None:
        path, descriptor = _file(filename)
        _check_dense("read into", buffer)
        if any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise UsageError(f"cannot read into an expanded tensor (strides {buffer.stride()}): elements share memory")
        host = buffer
        after: list[Callable[[], None]] = []
        if not buffer.is_cpu or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
            host = torch.empty(buffer.shape, dtype=buffer.dtype)
            after.append(lambda: copy_into(buffer, host))
        else:
            changed(buffer)
        if validate:
            reopened = _Reopened(descriptor) if descriptor >= 0 else None
            after.insert(0, lambda: _validate(host, path, file_offset, reopened))
        self._requests.submit(Request(path, descriptor, [MemoryRange.of(host, file_offset)], 0, after))

    def _begin_write(
        self, buffer: torch.Tensor, filename: File, file_offset: int, validate: bool, write_atomic: bool
    ) -> None:
        path, descriptor = _file(filename)
        _check_dense("write", buffer)
        if write_atomic and (file_offset or not path):
            raise UsageError(
                f"write_atomic=True replaces a whole file by its name; file_offset={file_offset} must be 0"
                + ("" if path else " and the file given by its name")
            )
        if write_atomic:
            path = replaceable(path)
        host = buffer.detach().resolve_conj().resolve_neg().cpu().contiguous()
        reopened = _Reopened(descriptor) if validate and descriptor >= 0 else None
        after = [lambda: _validate(host, path, file_offset, reopened)] if validate else []
        flags = WRITE | (ATOMIC if write_atomic else 0)
        self._requests.submit(Request(path, descriptor, [MemoryRange.of(host, file_offset)], flags, after))


def _check_dense(what: str, buffer: torch.Tensor) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise UsageError(f"cannot {what} a {type(buffer).__name__}: the buffer must be a tensor")
    kind = why_no_memory(buffer)
    if kind:
        raise UsageError(f"cannot {what} a tensor that is {kind}")


def _file(filename: File) -> tuple[str, int]:
    """The path and -1, or "" and the descriptor."""
    if not isinstance(filename, int):
        return os.fsdecode(filename), -1
    if isinstance(filename, bool) or not 0 <= filename < 1 << 31:
        raise UsageError(f"filename={filename!r} is neither a name nor a descriptor")
    return "", filename


class _Reopened:
    """The file of a descriptor, reopened for reading, as the caller may close the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = -1
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                raise UsageError(f"descriptor {descriptor} is open for writing only: what it has cannot be validated")
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            number = error.errno or errno.EBADF
            what = f"validating descriptor {descriptor}: {os.strerror(number)} (errno {number})"
            raise AioError(number, what, f"descriptor {descriptor}", 0) from None

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _validate(host: torch.Tensor, path: str, offset: int, reopened: _Reopened | None) -> None:
    expected = memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())).cast("B")
    name = path if reopened is None else "the descriptor's file"
    opened = path if reopened is None else reopened.descriptor
    with open(opened, "rb", buffering=0, closefd=reopened is None) as file:
        file.seek(offset)
        for at in range(0, host.nbytes, _VALIDATED_AT_ONCE):
            part = expected[at : at + _VALIDATED_AT_ONCE]
            if file.read(len(part)) != part:
                raise AioError(
                    errno.EIO, f"validating {name!r}: its bytes from offset {offset + at} on differ", name, offset + at
                )
