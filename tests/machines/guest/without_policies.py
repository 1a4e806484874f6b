# SPDX-License-Identifier: Apache-2.0
"""Runs a command in which mbind and set_mempolicy are refused, as Docker's default seccomp filter does.

without_policies.py command...
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_NUMBERS = (237, 238)  # mbind, set_mempolicy on x86-64
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def main() -> None:
    steps = [(_LOAD, 0, 0, 0)]  # the number of the call
    for at, number in enumerate(_NUMBERS):
        steps.append((_EQUAL, len(_NUMBERS) - at, 0, number))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
