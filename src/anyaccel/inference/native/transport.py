# SPDX-License-Identifier: Apache-2.0
"""What carries a model's sums between hosts: TCP connections of its own, or a library that the job has. Torch-free."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from anyaccel import env
from anyaccel.errors import CommError

_ASKED = "ANYACCEL_BETWEEN_HOSTS"
# Variables that tell a process its rank, and whose MPI has started it. Intel's hydra says I_MPI_ too.
_OPEN_MPI = "OMPI_COMM_WORLD_RANK"
_HYDRA = "PMI_RANK"


def choose_transport(hosts: Sequence[str]) -> str:
    """What `Model.create_segment` takes as `between`.

    Args:
        hosts: the host of each rank of the model.

    Raises:
        CommError: ANYACCEL_BETWEEN_HOSTS asks for what is not there; the message says what is missing.
        UsageError: it cannot be read.
    """
    asked = env.ANYACCEL_BETWEEN_HOSTS.get()
    if len(set(hosts)) < 2 or asked in ("tcp", "gloo"):
        return ""
    if asked == "mpi":
        return f"mpi:{_mpi_library(len(hosts), os.environ)}"
    from anyaccel.comm import ccl

    return f"ccl:{ccl.library_of_op()}"


def _mpi_library(ranks: int, environ: Mapping[str, str]) -> str:
    """The MPI of the mpirun that has started this process.

    Raises:
        CommError: none has, or its library is not found.
    """
    name = next((name for name in (_OPEN_MPI, _HYDRA) if name in environ), None)
    if name is None:
        raise CommError(
            f"{_ASKED}=mpi: no mpirun has started this process; use --launcher openmpi, mpich or impi, or leave "
            f"{_ASKED} unset"
        )
    if environ[name] != environ.get("RANK") or environ.get("WORLD_SIZE") != str(ranks):
        raise CommError(
            f"{_ASKED}=mpi: this is rank {environ.get('RANK')} of {environ.get('WORLD_SIZE')} and {name}="
            f"{environ[name]}, and the model has {ranks} ranks; all ranks of the job have to share one model"
        )
    if given := environ.get(env.ANYACCEL_MPI_LIBRARY.name):
        return given
    names: tuple[str, ...]
    if name == _OPEN_MPI:
        names, program = ("libmpi.so.40", "libmpi.so"), "mpirun"
    elif any(key.startswith("I_MPI_") for key in environ):
        names, program = ("libmpi.so.12", "libmpi.so"), "mpiexec.hydra"
    else:
        names, program = ("libmpich.so.12", "libmpi.so.12", "libmpich.so"), "mpiexec.mpich"
    found = shutil.which(program, path=environ.get("PATH")) or shutil.which("mpiexec", path=environ.get("PATH"))
    beside = [Path(found).resolve().parent.parent / "lib"] if found else []
    folders = [*(Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part), *beside]
    for folder in folders:
        for each in names:
            if (folder / each).exists() and _is_right(folder / each, name == _OPEN_MPI):
                return str(folder / each)
    for each in names:
        if _is_right(Path(each), name == _OPEN_MPI):
            return each
    raise CommError(
        f"{_ASKED}=mpi: none of {', '.join(names)} is found, the library of the mpirun that has started the ranks; "
        f"install it, or name it in {env.ANYACCEL_MPI_LIBRARY.name}"
    )


def _is_right(library: Path, open_mpi: bool) -> bool:
    try:
        return hasattr(ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL), "ompi_mpi_comm_world") == open_mpi
    except OSError:
        return False


@cache
def end_with_process() -> None:
    """End what carries when this process does, unless an error ends it: others may wait for ever then."""
    from anyaccel import _llm

    atexit.register(lambda: None if hasattr(sys, "last_value") else _llm.end_transports())
