# SPDX-License-Identifier: Apache-2.0
"""A rank that says where it is: its CPUs and those of a thread, its memory policy, and the node of each page it has.

    where.py [--megabytes N] [--sleep SECONDS]

Prints one line of JSON. Everything is asked of the kernel, by system calls and /proc, and nothing of anyaccel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import sys
import threading
import time
from collections import Counter

_X86 = platform.machine() == "x86_64"
_MOVE_PAGES, _GET_MEMPOLICY = (279, 239) if _X86 else (239, 236)
_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred")  # the last: several nodes
_PAGE = 4096
_NODES = 1024
_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")

_libc = ctypes.CDLL(None, use_errno=True)


def pages_by_node(megabytes: int) -> dict[int, int]:
    """How many of the pages of memory that is touched now lie on which node."""
    count = megabytes * (1 << 20) // _PAGE
    memory = mmap.mmap(-1, count * _PAGE)
    for page in range(count):
        memory[page * _PAGE] = 1
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = (ctypes.c_void_p * count)(*range(begin, begin + count * _PAGE, _PAGE))
    nodes = (ctypes.c_int * count)()
    if _libc.syscall(_MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, nodes, 0):
        raise OSError(ctypes.get_errno(), "move_pages")
    return dict(Counter(nodes))


def memory_policy() -> tuple[str, list[int]]:
    mode = ctypes.c_int()
    mask = (ctypes.c_ulong * (_NODES // 64))()
    if _libc.syscall(_GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(_NODES), None, 0):
        raise OSError(ctypes.get_errno(), "get_mempolicy")
    return _POLICIES[mode.value & 0xFF], [node for node in range(_NODES) if mask[node // 64] >> node % 64 & 1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0)
    given, _ = parser.parse_known_args()
    of_thread: list[list[int]] = []
    thread = threading.Thread(target=lambda: of_thread.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    policy, nodes = memory_policy()
    found = {
        "pid": os.getpid(),
        "host": platform.node(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "thread": of_thread[0],
        "policy": policy,
        "nodes": nodes,
        "pages": pages_by_node(given.megabytes),
        "env": {name: os.environ[name] for name in _ENV if name in os.environ},
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if given.sleep:
        time.sleep(given.sleep)
        sys.stdout.write(json.dumps({**found, "cpus": sorted(os.sched_getaffinity(0)), "again": True}) + "\n")


if __name__ == "__main__":
    main()
