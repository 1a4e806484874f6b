# SPDX-License-Identifier: Apache-2.0
"""Reading and writing source files: their encoding, byte-order mark and mode are kept, and writes are atomic."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class UnreadableError(Exception):
    """A file cannot be read or written; the message says why, in one line."""


@dataclass(frozen=True)
class Source:
    """A file's text and how it is encoded; `mark` is its byte-order mark."""

    text: str
    encoding: str
    mark: bytes = b""

    def encode(self, text: str) -> bytes:
        """Another text in the same encoding."""
        return self.mark + text.encode(self.encoding)


def read_bytes(path: str) -> bytes:
    """The file's content.

    Raises:
        UnreadableError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UnreadableError(_reason(error)) from None


def decode(data: bytes) -> Source:
    """The text of a Python file, by its byte-order mark or coding line (PEP 263), else UTF-8.

    Raises:
        UnreadableError: an unknown encoding, or bytes that are not of it.
    """
    mark = b"\xef\xbb\xbf" if data.startswith(b"\xef\xbb\xbf") else b""
    body = data[len(mark) :]
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        encoding = "utf-8" if mark else encoding
        text = body.decode(encoding)
        if text.encode(encoding) != body:
            raise UnreadableError(f"encoding {encoding} does not give the same bytes back")
    except (SyntaxError, LookupError) as error:
        if "missing encoding" in str(error):
            raise UnreadableError("not valid utf-8, and no other encoding is declared") from None
        raise UnreadableError(f"unknown encoding: {' '.join(str(error).split())}") from None
    except UnicodeError as error:
        raise UnreadableError(f"not valid {encoding}: {error.reason if hasattr(error, 'reason') else error}") from None
    return Source(text, encoding, mark)


def write_bytes(path: str, data: bytes, seen: bytes) -> None:
    """Replace the file's content in one step; a reader, or a crash, meets the old content or the new one.

    Args:
        path: a symbolic link stays one: what it points to is replaced.
        data: the new content.
        seen: the content that `data` was made from; a file that has changed since is left alone.

    Raises:
        UnreadableError: it cannot be written, or has changed.
    """
    real = Path(os.path.realpath(path))
    temporary: Path | None = None
    with _undisturbed():
        try:
            status = real.stat()
            if not os.access(real, os.W_OK):
                raise UnreadableError("cannot be written: it is read-only")
            if real.read_bytes() != seen:
                raise UnreadableError("has changed since it was read; left as it is")
            descriptor, name = tempfile.mkstemp(dir=real.parent, prefix=".anyaccel-port-")
            temporary = Path(name)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(status.st_mode & 0o7777)
            with contextlib.suppress(OSError):
                os.chown(temporary, status.st_uid, status.st_gid)
            temporary.replace(real)
            temporary = None
        except OSError as error:
            raise UnreadableError(f"cannot be written: {_reason(error)}") from None
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until a file is whole: an exception at any line could leave the temporary file behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
