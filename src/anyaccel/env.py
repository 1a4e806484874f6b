# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that anyaccel reads of its own: name, type, default, meaning.

Variables of a launch (RANK, WORLD_SIZE, ...) are part of the torchrun contract and are listed in docs/launching.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from anyaccel.errors import UsageError
from anyaccel.numerals import parse_bytes, parse_integer, parse_number

T = TypeVar("T")


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: `parse` turns its text into a value, `default` is used when it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def get(self) -> T:
        """The value now.

        Raises:
            UsageError: the text cannot be parsed; the message quotes it.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"{self.name}={text!r}: {error}; {self.meaning}") from None


def _positive_float(text: str) -> float:
    value = parse_number(text)
    if not 0 < value < 1e9:
        raise ValueError("must be above 0 and below a billion")
    return value


def _positive_int(text: str) -> int:
    value = parse_integer(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def _size(text: str) -> int:
    value = parse_bytes(text)
    if value < 0:
        raise ValueError("must be 0 or above")
    return value


def _positive_size(text: str) -> int:
    value = parse_bytes(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _is_one(text: str) -> bool:
    return text == "1"


ISA_NAMES = (
    *("scalar", "portable"),
    *("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),  # x86-64
    *("neon", "neon_dot", "neon_bf16_i8mm"),  # arm64
)

WIRE_DTYPES = ("fp32", "bf16", "int8")

DS_ACCELERATOR = EnvVar("DS_ACCELERATOR", str, "", "name of the accelerator to use, without detection")
DS_PIN_MEMORY_BACKEND = EnvVar(
    "DS_PIN_MEMORY_BACKEND",
    _one_of("torch", "native"),
    "torch",
    "native: pin_memory() of every accelerator returns memory that is locked with mlock(), instead of torch's",
)
DS_ALLOW_DEPRECATED_FP16 = EnvVar(
    "DS_ALLOW_DEPRECATED_FP16", _is_one, False, "1 allows fp16 on GPUs of compute capability 6, where it is slow"
)
ANYACCEL_AS_CUDA = EnvVar(
    "ANYACCEL_AS_CUDA",
    str,
    "",
    "on, or options of as-cuda (report, json, amp): code that names CUDA uses the accelerator; set for child processes",
)
ANYACCEL_CACHE_DIR = EnvVar(
    "ANYACCEL_CACHE_DIR",
    Path,
    None,
    "folder for converted models, packed weights and built ops; default: ~/.cache/anyaccel",
)
ANYACCEL_ISA = EnvVar(
    "ANYACCEL_ISA",
    _one_of(*ISA_NAMES),
    "",
    "highest instruction set that native code may use: " + ", ".join(ISA_NAMES),
)
ANYACCEL_PROBE_TIMEOUT = EnvVar(
    "ANYACCEL_PROBE_TIMEOUT",
    _positive_float,
    None,
    "seconds that detection waits for one accelerator; default: 60, or what the backend declares",
)
ANYACCEL_COMM_TIMEOUT = EnvVar(
    "ANYACCEL_COMM_TIMEOUT", _positive_float, 300.0, "seconds that a collective waits for a live peer"
)
ANYACCEL_BETWEEN_HOSTS = EnvVar(
    "ANYACCEL_BETWEEN_HOSTS",
    _one_of("tcp", "gloo", "ccl", "mpi"),
    "tcp",
    "transport between hosts: tcp (a native model's own connections, and gloo in groups of backend shm), gloo (the "
    "same), ccl (oneCCL for both) or mpi (for models the MPI whose mpirun has started them; gloo for groups)",
)
ANYACCEL_MPI_LIBRARY = EnvVar(
    "ANYACCEL_MPI_LIBRARY",
    str,
    "",
    "path of libmpi for ANYACCEL_BETWEEN_HOSTS=mpi; default: that of the mpirun which has started the ranks",
)
ANYACCEL_WIRE_DTYPE = EnvVar(
    "ANYACCEL_WIRE_DTYPE",
    _one_of(*WIRE_DTYPES),
    "fp32",
    "type in which sums of a model's ranks go over the network: fp32, bf16 or int8; wire_dtype of tensor_parallel "
    "takes precedence",
)
ANYACCEL_COMMS_LOG = EnvVar(
    "ANYACCEL_COMMS_LOG", _is_one, False, "1 records collectives from the start, for anyaccel.comm.log_summary()"
)
ANYACCEL_SHM_BYTES = EnvVar(
    "ANYACCEL_SHM_BYTES",
    _positive_size,
    8 << 20,
    "shared memory of one process group, all ranks together and without symmetric tensors, such as 8MiB",
)
ANYACCEL_PACKED_CACHE_BYTES = EnvVar(
    "ANYACCEL_PACKED_CACHE_BYTES",
    _size,
    64 << 30,
    "most that packed models may take in the cache folder, such as 64GiB; the least recently used ones are removed "
    "first; 0 keeps none",
)
ANYACCEL_API_KEY = EnvVar(
    "ANYACCEL_API_KEY", str, "", "key that requests to `anyaccel serve` have to bring; unset: no key is needed"
)
ANYACCEL_BUILD_TIMEOUT = EnvVar(
    "ANYACCEL_BUILD_TIMEOUT",
    _positive_float,
    600.0,
    "seconds that a build of an op may take, or may wait for another build",
)
CXX = EnvVar("CXX", str, "", "C++ compiler for ops; default: the first of c++, g++, clang++ in PATH")
CCL_ROOT = EnvVar(
    "CCL_ROOT", str, "", "folder with the lib/ and include/ of oneCCL; default: the packages of this Python"
)
MAX_JOBS = EnvVar(
    "MAX_JOBS", _positive_int, 0, "number of compilers that a build of an op runs at once; default: the allowed CPUs"
)

ALL: tuple[EnvVar[object], ...] = (
    DS_ACCELERATOR,
    DS_ALLOW_DEPRECATED_FP16,
    DS_PIN_MEMORY_BACKEND,
    ANYACCEL_AS_CUDA,
    ANYACCEL_CACHE_DIR,
    ANYACCEL_ISA,
    ANYACCEL_PROBE_TIMEOUT,
    ANYACCEL_COMM_TIMEOUT,
    ANYACCEL_BETWEEN_HOSTS,
    ANYACCEL_MPI_LIBRARY,
    ANYACCEL_WIRE_DTYPE,
    ANYACCEL_COMMS_LOG,
    ANYACCEL_SHM_BYTES,
    ANYACCEL_PACKED_CACHE_BYTES,
    ANYACCEL_API_KEY,
    ANYACCEL_BUILD_TIMEOUT,
    CXX,
    CCL_ROOT,
    MAX_JOBS,
)  # type: ignore[assignment]


def cache_dir() -> Path:
    """The user's cache folder of anyaccel (ANYACCEL_CACHE_DIR, else XDG_CACHE_HOME/anyaccel), not created here."""
    chosen = ANYACCEL_CACHE_DIR.get()
    if chosen is not None:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyaccel"
