# SPDX-License-Identifier: Apache-2.0
"""A file system whose files fail in the way that their name says, for tests of file I/O.

It speaks the kernel's FUSE protocol (linux/fuse.h), and so needs root, but no library. `python failing_fs.py FOLDER`
mounts it there, says so, and unmounts when its standard input ends; `mounted()` runs that for a test.

Every file has SIZE bytes, `content()`, and passes each read and write on (no page cache):

    plain   nothing fails
    eio     EIO for what touches byte BAD
    short   transfers at most 5,000 bytes at a time
    shrunk  ends at byte BAD, whatever its size says
    full    ENOSPC for what is written at or behind byte BAD
    refuses takes O_DIRECT when it is opened, then answers EINVAL
    slow    each read and write takes 50 ms; the modification time is their number
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SIZE = 1 << 20
BAD = 300_001
NAMES = ("plain", "eio", "short", "shrunk", "full", "refuses", "slow")

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _RELEASE = 1, 2, 3, 4, 14, 15, 16, 18
_FSYNC, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 20, 25, 26, 27, 29, 36, 42
_HEADER = struct.Struct("<IIQQIIIHH")
_DIRECT_IO = 1  # FOPEN_DIRECT_IO
_DETACH = 2  # MNT_DETACH
_MAX_WRITE = 128 << 10


def content() -> bytes:
    """What every file has at first."""
    return bytes(range(251)) * (SIZE // 251 + 1)


class _Server:
    def __init__(self, device: int) -> None:
        self.device = device
        self.slow = 0  # reads and writes of that file
        self.files = {2 + index: bytearray(content()[:SIZE]) for index in range(len(NAMES))}

    def serve(self) -> None:
        while True:
            try:
                message = os.read(self.device, _MAX_WRITE + (64 << 10))
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = _HEADER.unpack_from(message)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                body, error_number = self.answer(opcode, node, message[_HEADER.size :]), 0
            except OSError as error:
                body, error_number = b"", error.errno or errno.EIO
            with contextlib.suppress(OSError):  # the caller has gone
                os.write(self.device, struct.pack("<IiQ", 16 + len(body), -error_number, unique) + body)

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == _INIT:
            return struct.pack("<IIIIHHIIHHII", 7, 31, 0, 0, 12, 10, _MAX_WRITE, 1, 0, 0, 0, 0) + bytes(24)
        if opcode == _LOOKUP:
            name = body.rstrip(b"\0").decode()
            if node != 1 or name not in NAMES:
                raise OSError(errno.ENOENT, name)
            node = 2 + NAMES.index(name)
            return struct.pack("<QQQQII", node, 0, 3600, 3600, 0, 0) + self.attributes(node)
        if opcode in (_GETATTR, _SETATTR):
            if opcode == _SETATTR and struct.unpack_from("<I", body)[0] & 8:
                del self.files[node][struct.unpack_from("<Q", body, 16)[0] :]
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if opcode == _OPEN:
            direct = struct.unpack_from("<I", body)[0] & os.O_DIRECT
            # Without the page cache either way. Both together make io_uring repeat a short transfer in the wrong place
            # (seen on Linux 6.18: FUSE leaves the position to a caller that does not move it).
            return struct.pack("<QIi", direct, 0 if direct else _DIRECT_IO, 0)
        if opcode == _READ:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return self.read(NAMES[node - 2], self.files[node], handle != 0, offset, size)
        if opcode == _WRITE:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return self.write(NAMES[node - 2], self.files[node], handle != 0, offset, body[40 : 40 + size])
        if opcode == _OPENDIR:
            return bytes(16)
        if opcode in (_RELEASE, _RELEASEDIR, _FLUSH, _FSYNC):
            return b""
        raise OSError(errno.ENOSYS, "")

    def read(self, name: str, data: bytearray, direct: bool, offset: int, size: int) -> bytes:
        self.common(name, direct, offset, size)
        end = BAD if name == "shrunk" else offset + 5000 if name == "short" else len(data)
        return bytes(data[offset : min(end, offset + size)])

    def write(self, name: str, data: bytearray, direct: bool, offset: int, new: bytes) -> bytes:
        self.common(name, direct, offset, len(new))
        if name == "full" and offset + len(new) > BAD:
            raise OSError(errno.ENOSPC, name)
        if name == "short":
            new = new[:5000]
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(new)] = new
        return struct.pack("<II", len(new), 0)

    def common(self, name: str, direct: bool, offset: int, size: int) -> None:
        if name == "eio" and offset <= BAD < offset + size:
            raise OSError(errno.EIO, name)
        if name == "refuses" and direct:
            raise OSError(errno.EINVAL, name)
        if name == "slow":
            time.sleep(0.05)
            self.slow += 1

    def attributes(self, node: int) -> bytes:
        size, mode = (0, 0o40755) if node == 1 else (len(self.files[node]), 0o100644)
        times = (0, self.slow, 0, 0, 0, 0)
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, *times, mode, 1, 0, 0, 0, 4096, 0)


def _main(folder: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"anyaccel-failing", folder.encode(), b"fuse", 0, options) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    threading.Thread(target=_Server(device).serve, daemon=True).start()
    print("mounted", flush=True)
    sys.stdin.read()
    libc.umount2(folder.encode(), _DETACH)


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[str]:
    """Mounts it while the block runs. Gives the reason why not where that cannot be, else an empty string."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None and process.stderr is not None
    try:
        yield (
            "" if process.stdout.readline() == "mounted\n" else f"no FUSE here: {process.stderr.read().strip()[-200:]}"
        )
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()
        process.stderr.close()


if __name__ == "__main__":
    _main(sys.argv[1])
