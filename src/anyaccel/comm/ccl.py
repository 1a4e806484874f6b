# SPDX-License-Identifier: Apache-2.0
"""oneCCL from PyPI's wheels: its environment variables, and its functions with errors as exceptions.

The process group on top of it is `ccl_group`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from anyaccel import env
from anyaccel.errors import CommError
from anyaccel.launch.cluster.address import interface_towards
from anyaccel.ops.builders.ccl import PIP_LINE, CCLCommBuilder, Installation, find, why_not

logger = logging.getLogger(__name__)

__all__ = ["PIP_LINE", "Installation", "find", "is_available", "library_of_op", "native", "why_not"]


def is_available() -> bool:
    """Whether `torch.distributed` can use backend `ccl` here; as `why_not`, without the reason."""
    return not why_not()


# The environment of oneCCL, which it reads once ---------------------------------------------------------------


def under_mpirun(rank: int, size: int) -> bool:
    """Whether mpirun has started this very process as this rank, so that MPI can carry messages."""
    return os.environ.get("PMI_RANK") == str(rank) and os.environ.get("PMI_SIZE") == str(size)


def environment(found: Installation, rank: int, size: int, master: str, timeout: float) -> dict[str, str]:
    """The environment variables that oneCCL needs and the user has not set.

    Raises:
        CommError: neither libfabric nor MPI is there to carry messages.
    """
    mpi = bool(found.mpi) and under_mpirun(rank, size)
    if not mpi and not found.fabric and size > 1:
        raise CommError(
            f"backend ccl: no libfabric, and the ranks are not started by mpirun: {PIP_LINE}, or install your "
            "distribution's libfabric1"
        )
    interface = interface_towards(master)
    wanted = {
        "CCL_ATL_TRANSPORT": "mpi" if mpi else "ofi",
        "CCL_WORKER_OFFLOAD": "0",  # no thread of its own, which would take the rank's cores
        "CCL_LOG_LEVEL": "error",
        "CCL_KVS_CONNECTION_TIMEOUT": str(max(int(timeout), 1)),
        "CCL_ATL_SHM": "1",
    }
    if interface:
        wanted["CCL_KVS_IFACE"] = interface  # without it oneCCL takes the first that it finds, or waits
        wanted["FI_TCP_IFACE"] = interface
    if found.mpi:
        wanted["CCL_MPI_LIBRARY_PATH"] = found.mpi
    if found.fabric:
        wanted["CCL_OFI_LIBRARY_PATH"] = found.fabric
    if not Path("/sys/class/infiniband").exists():
        wanted["FI_PROVIDER"] = "tcp"  # looking for others fails or takes seconds
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def library_of_op() -> str:
    """The op that calls oneCCL, built on first use, for C++ that calls it itself; the environment is made ready for it.

    Raises:
        CommError: oneCCL is not there.
        OpBuildError: it cannot be built.
    """
    # Not as a rank of mpirun: only one rank of each host takes part, and oneCCL's MPI would wait for all.
    master = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    os.environ.update(environment(find(), -1, 2, master, env.ANYACCEL_COMM_TIMEOUT.get()))
    return str(CCLCommBuilder().load()._name)


# Its functions ------------------------------------------------------------------------------------------------

ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV, BARRIER = range(9)

# oneCCL makes progress inside its calls only, and only one thread may be inside at a time.
_one_call = threading.Lock()
_SLICE = 0.005  # seconds that a wait holds the lock


class Native:
    """The op's functions, with their errors as exceptions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        sizes = ctypes.POINTER(size)
        for name, result, arguments in (
            ("ccl_last_error", ctypes.c_char_p, []),
            ("ccl_version", ctypes.c_char_p, []),
            ("ccl_address_bytes", size, []),
            ("ccl_new_kvs", pointer, [ctypes.c_char_p]),
            ("ccl_join_kvs", pointer, [ctypes.c_char_p]),
            ("ccl_free_kvs", None, [pointer]),
            ("ccl_new_communicator", pointer, [pointer, integer, integer]),
            ("ccl_free_communicator", None, [pointer]),
            (
                "ccl_start",
                pointer,
                [pointer, integer, pointer, pointer, size, sizes, sizes, integer, integer, integer],
            ),
            ("ccl_wait", integer, [pointer, ctypes.c_double]),
            ("ccl_free", None, [pointer]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def _error(self, what: str) -> CommError:
        text = (self._library.ccl_last_error() or b"").decode(errors="replace").strip()
        return CommError(f"backend ccl: {what}: {text or 'oneCCL gave no reason'}")

    def version(self) -> str:
        """The library's version, such as "2021.16.2"."""
        with _one_call:
            found = self._library.ccl_version()
        if found is None:
            raise self._error("starting oneCCL")
        return str(found.decode())

    def new_kvs(self) -> tuple[int, bytes]:
        """A key-value store by which ranks find each other, and its address."""
        address = ctypes.create_string_buffer(self._library.ccl_address_bytes())
        with _one_call:
            kvs = self._library.ccl_new_kvs(address)
        if not kvs:
            raise self._error("making a key-value store")
        return kvs, address.raw

    def join_kvs(self, address: bytes) -> int:
        """Connect to the key-value store of another rank."""
        with _one_call:
            kvs = self._library.ccl_join_kvs(address)
        if not kvs:
            raise self._error("joining the key-value store")
        return int(kvs)

    def new_communicator(self, kvs: int, size: int, rank: int) -> int:
        """Connect the ranks; blocks until all have called it."""
        _remove_stale_memory()
        with _one_call:
            communicator = self._library.ccl_new_communicator(kvs, size, rank)
        if not communicator:
            raise self._error(f"rank {rank} of {size} joining the others")
        return int(communicator)

    def free(self, communicator: int, kvs: int) -> None:
        """Free a communicator and its key-value store."""
        with _one_call:
            self._library.ccl_free_communicator(communicator)
            self._library.ccl_free_kvs(kvs)

    def start(
        self,
        communicator: int,
        operation: int,
        send: int,
        recv: int,
        count: int,
        datatype: int,
        *,
        send_counts: list[int] | None = None,
        recv_counts: list[int] | None = None,
        reduction: int = 0,
        peer: int = 0,
    ) -> int:
        """Start an operation; its memory must stay until it is complete."""
        with _one_call:
            handle = self._library.ccl_start(
                communicator,
                operation,
                send,
                recv,
                count,
                _sizes(send_counts),
                _sizes(recv_counts),
                datatype,
                reduction,
                peer,
            )
        if not handle:
            raise self._error("starting an operation")
        return int(handle)

    def wait(self, operation: int) -> bool:
        """Make progress on an operation for some milliseconds; returns whether it is complete."""
        with _one_call:
            answer = self._library.ccl_wait(operation, _SLICE)
        if answer < 0:
            raise self._error("an operation failed")
        return bool(answer)

    def end(self, operation: int) -> None:
        """Free an operation that is complete."""
        with _one_call:
            self._library.ccl_free(operation)


def _remove_stale_memory() -> None:
    """Remove the shared memory of a killed process that had the pid of this one.

    libfabric names its shared memory by pid, user and a counter, and would take a stale file for that of a peer.
    """
    mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    for path in Path("/dev/shm").glob(f"{os.getpid()}:{os.getuid()}:*"):
        if f" {path}\n" not in mapped:  # a mapped file belongs to a group of this process
            logger.info("%s: removed, which a killed process has left", path)
            with contextlib.suppress(OSError):
                path.unlink()


def _sizes(counts: list[int] | None) -> Any:
    return None if counts is None else (ctypes.c_size_t * len(counts))(*counts)


@cache
def native() -> Native:
    """The op, built on first use.

    Raises:
        CommError: oneCCL is not there.
        OpBuildError: it cannot be built.
    """
    find()
    return Native(CCLCommBuilder().load())
