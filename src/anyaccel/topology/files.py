# SPDX-License-Identifier: Apache-2.0
"""Small files of the kernel and what they say: texts, numbers, lists and masks; missing ones are no error."""

from __future__ import annotations

import os
import stat

from anyaccel.errors import UsageError
from anyaccel.topology.model import parse_cpu_list


def read_text(path: str, limit: int | None = None) -> str | None:
    """Text of a small file; None where it is missing or cannot be read (an offline CPU, a masked file).

    Args:
        limit: bytes after which to stop; all of it when left out.

    Raises:
        UsageError: it is a named pipe, in a recorded machine.
    """
    try:
        # Without O_NONBLOCK a named pipe in a recorded machine would be waited for until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            raise UsageError(f"{path!r} is a pipe, and no file of a machine; remove it, or record the machine again")
        if not stat.S_ISREG(mode):
            return None  # containers mask files with /dev/null
        parts = []
        while part := os.read(descriptor, limit or 65536):
            parts.append(part)
            if limit:
                break
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace").strip("\0 \t\r\n")  # some recordings keep the final NUL


def numbers(text: str | None) -> tuple[int, ...] | None:
    """A kernel list; None where it is missing or not a list."""
    if text is None:
        return None
    try:
        return tuple(sorted(set(parse_cpu_list(text))))
    except ValueError:
        return None


def mask_numbers(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a kernel mask such as "ff,ffffffff"; None where it is missing or not a mask."""
    try:
        bits = int((text or "").replace(",", ""), 16)
    except ValueError:
        return None
    return tuple(bit for bit in range(bits.bit_length()) if bits >> bit & 1)


def listed(list_file: str, mask_file: str) -> tuple[int, ...] | None:
    """What a list file names; old kernels and some recordings have only the mask file beside it."""
    found = numbers(read_text(list_file))
    return found or mask_numbers(read_text(mask_file)) or found


def number(text: str | None) -> int:
    """A kernel number; 0 where it is missing, not a number or -1 (the kernel's "unknown")."""
    try:
        return max(0, int(text or 0))
    except ValueError:
        return 0


def names(folder: str) -> list[str]:
    """Names of the entries of a folder, sorted; none where it is missing."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []


def numbered(folder: str, prefix: str) -> tuple[int, ...]:
    """The numbers N of the entries `prefix`N of a folder."""
    tails = (name[len(prefix) :] for name in names(folder) if name.startswith(prefix))
    return tuple(sorted(int(tail) for tail in tails if tail.isascii() and tail.isdigit()))
