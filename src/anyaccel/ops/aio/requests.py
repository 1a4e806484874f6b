# SPDX-License-Identifier: Apache-2.0
"""Reads and writes that are under way: their memory, their results, and how threads wait for them."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from anyaccel.errors import AioError, UsageError
from anyaccel.ops.aio import native
from anyaccel.ops.aio.memory import warn_once

logger = logging.getLogger("anyaccel.aio")

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_WAIT_MILLISECONDS = 50  # between two checks for Ctrl-C
_LAST_BYTE = (1 << 63) - 1


class MemoryRange(NamedTuple):
    """Contiguous host memory for a range of a file; `owner` is kept alive until the transfer is done."""

    offset: int
    address: int
    num_bytes: int
    owner: object

    @classmethod
    def of(cls, host: torch.Tensor, offset: int) -> MemoryRange:
        """The memory of a contiguous host tensor."""
        return cls(offset, host.data_ptr(), host.nbytes, host)


@dataclass(eq=False)
class Submitter:
    """A thread that has submitted requests, with the results of those that another thread's wait has collected."""

    num_done: int = 0
    errors: list[Exception] = field(default_factory=list)


@dataclass
class Request:
    """One read or write.

    Attributes:
        path: path of the file; empty if it is given by its descriptor.
        after: called in order when the transfer has succeeded.
        settled: whether the transfer and the calls after it are done.
        error: why it has failed, once it is settled.
        settling: held by the thread that settles it; several may wait for it.
        submitter: the thread that has submitted it, and gets its result.
    """

    path: str
    descriptor: int
    pieces: Sequence[MemoryRange]
    flags: int
    after: Sequence[Callable[[], None]] = ()
    settled: bool = False
    error: Exception | None = field(default=None)
    settling: threading.Lock = field(default_factory=threading.Lock)
    submitter: Submitter | None = None

    @property
    def offset(self) -> int:
        """The offset of the first byte."""
        return self.pieces[0].offset if self.pieces else 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes from the first to the last."""
        return self.pieces[-1].offset + self.pieces[-1].num_bytes - self.offset if self.pieces else 0

    @property
    def name(self) -> str:
        """The file's name for messages."""
        return self.path if self.descriptor < 0 else f"descriptor {self.descriptor}"

    def check(self) -> None:
        """Raises UsageError for a name or an offset that the kernel would misinterpret."""
        check_name(self.path)
        if not hasattr(self.offset, "__index__"):
            raise UsageError(f"file_offset={self.offset!r} of {self.name!r} must be a whole number")
        if self.offset < 0 or self.offset + self.num_bytes > _LAST_BYTE:
            raise UsageError(f"file_offset={self.offset} of {self.name!r} must be from 0 to 2**63-1, less the size")

    def failure(self, status: native.Status, number: int = 0) -> AioError:
        """The error for `status`, or for the errno `number`."""
        code = status.error or number
        writes = bool(self.flags & native.WRITE)
        what = "writing" if writes else "reading"
        where = f"{what} {self.num_bytes} bytes at offset {self.offset} of {self.name!r}"
        if status.step == native.END_OF_FILE:
            why = f"the file ends at offset {status.offset}"
        elif status.step == native.CANCELLED:
            why = "given up before it was done"
        else:
            step = native.STEPS[status.step]
            at = f", at offset {status.offset}" if step in ("reading", "writing") else ""
            why = f"{f'{step}: ' if step and step != what else ''}{os.strerror(code)}{at}"
        left = f"; {native.LEFTOVERS[status.leftover]}" if writes else ""
        return AioError(code, f"{where} failed: {why} (errno {code}){left}", self.name, status.offset)

    def settle(self, status: native.Status | None) -> None:
        """Record the result of a finished transfer, and make the calls after it.

        Args:
            status: None if the native side does not know the request: another thread has settled and removed it, or
                Ctrl-C came before it was submitted.
        """
        with self.settling:
            if self.settled or status is None:
                self.settled = True
                return
            if status.fell_back:
                self._note_fallback()
            if status.step:
                self.error = self.failure(status)
            else:
                try:
                    for call in self.after:
                        call()
                except Exception as error:  # noqa: BLE001 - wait() raises it
                    self.error = error
            self.settled = True

    def _note_fallback(self) -> None:
        try:
            device = Path(self.path).stat().st_dev if self.path else -1
        except OSError:
            return
        warn_once(
            ("direct", device),
            "the file system of %s has no direct I/O (O_DIRECT): files go through the page cache. This is said once.",
            self.name,
        )


class Requests:
    """The requests of one handle, which keeps their memory alive until the kernel is done with it.

    A KeyboardInterrupt may come between any two steps. So a request is recorded here before it is submitted, and
    removed from the native side after it is settled: a request that the native side does not know was either not
    submitted, or is settled.

    Any number of threads may wait for one request. Each returns when it is settled, and the thread that has submitted
    it gets its result even if another thread's wait was first; otherwise it would miss the error.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.address = ctypes.c_void_p()  # of the native handle, set by its creator
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._known: dict[int, Request] = {}
        self._pending: dict[int, Request] = {}  # submitted requests that no wait has collected, in order
        self._thread = threading.local()

    def check_process(self) -> None:
        """Raises UsageError in a child that was forked."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this aio_handle belongs to process {self._process}, which process {os.getpid()} was forked from; "
                "make a new one here"
            )

    def close(self) -> None:
        """Cancel all requests, and return when the kernel does not use their memory any more."""
        if os.getpid() != self._process or not self.address:
            return  # the threads and the kernel's queue belong to the parent, or there are none
        abandoned = [request for request in self._pending.values() if not request.settled]
        self.library.anyaccel_aio_destroy(self.address)
        self._known.clear()
        for request in abandoned:
            logger.error(
                "aio_handle was dropped without wait(): a %s of %d bytes at offset %d of %r may be incomplete",
                "write" if request.flags & native.WRITE else "read", request.num_bytes, request.offset, request.name,
            )  # fmt: skip

    def submit(self, request: Request) -> None:
        """Submit a request; the next wait includes it."""
        request.submitter = self._this_thread()
        self._submit(request, next(self._numbers), pending=True)

    def run(self, request: Request, progress: Callable[[int], object] | None = None) -> None:
        """Submit a request and wait for it alone. Ctrl-C cancels it."""
        number = next(self._numbers)
        try:
            self._submit(request, number, pending=False)
            self._settle(number, request, progress)
        except BaseException:
            if number in self._known:
                self.library.anyaccel_aio_cancel(self.address, number)
                self._settle(number, request)
            raise
        if request.error is not None:
            raise request.error

    def wait_all(self) -> int:
        """Wait for all submitted requests and return their number; the first error is raised at the end."""
        self.check_process()
        with self._mutex:
            wanted = dict(self._pending)
        return self._wait(wanted)

    def wait_own(self) -> int:
        """wait_all() for the requests of this thread only, so that errors of other threads are not raised here."""
        self.check_process()
        submitter = self._this_thread()
        with self._mutex:
            wanted = {number: request for number, request in self._pending.items() if request.submitter is submitter}
        return self._wait(wanted)

    def _this_thread(self) -> Submitter:
        found: Submitter | None = getattr(self._thread, "submitter", None)
        if found is None:
            found = self._thread.submitter = Submitter()
        return found

    def _wait(self, wanted: dict[int, Request]) -> int:
        for number, request in wanted.items():
            self._settle(number, request)
        own = self._this_thread()
        count = 0
        errors: list[Exception] = []
        with self._mutex:
            for number, request in wanted.items():
                first = self._pending.pop(number, None) is not None
                if request.submitter is not own:
                    if first and request.submitter is not None:
                        request.submitter.num_done += 1
                        request.submitter.errors += [request.error] if request.error else []
                elif not first:
                    continue  # the wait that was first has added its result to `own`
                count += 1
                errors += [request.error] if request.error else []
            count, own.num_done = count + own.num_done, 0
            errors, own.errors = [*own.errors, *errors], []
        if errors:
            for other in map(str, errors[1:]):
                if other not in getattr(errors[0], "__notes__", ()):
                    errors[0].add_note(other)
            raise errors[0]
        return count

    def _submit(self, request: Request, number: int, *, pending: bool) -> None:
        self.check_process()
        request.check()
        segments = (native.FileSegment * len(request.pieces))(
            *(native.FileSegment(*piece[:3]) for piece in request.pieces)
        )
        status = native.Status()
        # Held across the call, so that another thread's wait does not miss the request.
        with self._mutex:
            self._known[number] = request
            if pending:
                self._pending[number] = request
            error = self.library.anyaccel_aio_submit(
                self.address, number, os.fsencode(request.path), request.descriptor, segments, len(segments),
                request.flags, ctypes.byref(status),
            )  # fmt: skip
            if error:
                self._pending.pop(number, None)
                del self._known[number]
        if error:
            raise request.failure(status, error)

    def _settle(self, number: int, request: Request, progress: Callable[[int], object] | None = None) -> None:
        status = native.Status()
        while not request.settled:
            error = self.library.anyaccel_aio_wait(self.address, number, _WAIT_MILLISECONDS, ctypes.byref(status))
            if error in (0, errno.ENOENT):
                request.settle(None if error else status)
            elif progress is not None:
                progress(self.library.anyaccel_aio_progress(self.address, number))
        self.library.anyaccel_aio_forget(self.address, number)
        self._known.pop(number, None)


def check_name(path: str) -> None:
    """Raises UsageError for a text that cannot be the name of a file."""
    if "\0" in path:
        raise UsageError(f"the file name {path!r} has a zero byte")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise UsageError(f"the file name {path!r} has an unpaired surrogate, which no file name can have") from None


def kind_of(mode: int) -> str:
    """The kind of a file with this st_mode, for messages; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def replaceable(path: str) -> str:
    """The path at which a new file replaces `path`, with symbolic links resolved, so that they stay links.

    Raises:
        AioError: no file can be there: the path ends with a slash, is empty, or has a link that leads to itself.
        UsageError: a device, FIFO or socket is there, which a file must not replace.
    """
    if path.endswith("/"):  # a folder to open(), which realpath() forgets
        raise _cannot_create(path, errno.EISDIR)
    try:
        kind = kind_of(os.stat(path).st_mode)  # noqa: PTH116 - a name that no path can be goes through unharmed
    except FileNotFoundError:
        if not path:
            raise _cannot_create(path, errno.ENOENT) from None
        return os.path.realpath(path)
    except OSError as error:
        raise _cannot_create(path, error.errno or errno.EIO) from None
    except ValueError:  # Request.check() reports what is wrong
        return path
    path = os.path.realpath(path)
    if kind and kind != "a folder":
        raise UsageError(f"{path} is {kind}: only a regular file can be replaced by a new one; give another name")
    return path


def _cannot_create(path: str, number: int) -> AioError:
    what = f"writing {path!r} failed: {native.STEPS[2]}: {os.strerror(number)} (errno {number})"
    return AioError(number, f"{what}; {native.LEFTOVERS[0]}", path, 0)


def changed(tensor: torch.Tensor) -> None:
    """Tell autograd that native code writes to the tensor, so that a backward pass does not use the new values."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also between devices, without recording it in autograd."""
    with torch.no_grad():
        target.copy_(source)
