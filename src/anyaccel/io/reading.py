# SPDX-License-Identifier: Apache-2.0
"""load(): reads a safetensors file into tensors."""

from __future__ import annotations

import errno
import mmap as mapping
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.io.progress import progress_bar
from anyaccel.ops._dense import why_no_memory
from anyaccel.ops.aio import aio_handle
from anyaccel.ops.aio.memory import aligned_memory, data_address
from anyaccel.ops.aio.native import cached_bytes
from anyaccel.ops.aio.requests import MemoryRange, PathLike, changed, check_name, copy_into, kind_of
from anyaccel.safetensors.header import Header, read_header
from anyaccel.safetensors.tensors import to_tensor, torch_layout

# These keep a fast disk busy. More threads help if memory has to be copied, into unaligned tensors.
BLOCK_BYTES, DEPTH, MAX_THREADS = 1 << 20, 32, 4
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without O_NONBLOCK, opening a FIFO waits for a writer
WARM = 0.9  # with this share of a file in the page cache, buffered reads are faster than direct I/O


def new_handle() -> aio_handle:
    """A handle with the settings for whole files."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    return aio_handle(BLOCK_BYTES, DEPTH, False, True, threads)


def load(
    path: PathLike,
    *,
    device: str | torch.device = "cpu",
    tensors: Mapping[str, torch.Tensor] | None = None,
    mmap: bool | None = None,
    progress: bool | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name, in the order in which they lie in it.

    Args:
        device: where they are wanted.
        tensors: existing tensors to fill, of the dtypes and shapes in the file; only these are read, and returned.
        mmap: True maps the file, so that its pages are read when they are first used, False reads it now. None, the
            default, maps a file that is in the page cache, which costs nothing, and reads any other with direct I/O.
            Tensors of a mapped file may be changed without changing the file; but a file that is overwritten or cut
            off in place, rather than replaced, changes or ends the process that has it mapped, as with
            safetensors.torch.load_file().
        progress: a progress bar when it takes longer than a second; None: if stderr is a terminal.

    Raises:
        OSError: as open() says it, where there is no file, a folder, or no right to read it.
        ModelError: the file is damaged, cut off, has an unknown dtype, or does not have what `tensors` wants.
        AioError: it cannot be read.
        UsageError: `tensors` with `device` or with mmap=True; no file can have this name.
    """
    name = os.fsdecode(path)
    check_name(name)
    target = torch.device(device)
    if tensors is not None and (mmap or not torch.empty(0, device=target).is_cpu):
        raise UsageError("load(): tensors= says where the data goes; leave out device= and mmap=")
    opened: list[int] = []
    try:
        # extend(map(...)) is one step for Ctrl-C, so that no descriptor is open without being in the list.
        opened.extend(map(os.open, (name,), (_FLAGS,)))
        descriptor = opened[0]
        status = os.fstat(descriptor)
        kind, size = kind_of(status.st_mode), status.st_size
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)  # as open() does
        if kind:
            raise ModelError(f"{name} is {kind}, not a safetensors file")
        header = read_header(lambda begin, length: os.pread(descriptor, length, begin), name, size)
        warm = cached_bytes(descriptor, size) >= WARM * size
        if tensors is not None:
            return _fill(header, name, tensors, warm, progress)
        for entry in header.entries:
            torch_layout(name, entry)
        if header.begin == header.end:
            return {entry.name: to_tensor(name, entry, None).to(target) for entry in header.entries}
        if warm if mmap is None else mmap:
            memory, base = mapping.mmap(descriptor, size, access=mapping.ACCESS_COPY), 0
        else:
            memory, base = _read(header, name, warm, progress)
    finally:
        for each in opened:
            os.close(each)
    return {entry.name: to_tensor(name, entry, memory, base).to(target) for entry in header.entries}


def _read(header: Header, path: str, warm: bool, progress: bool | None) -> tuple[mapping.mmap, int]:
    """Memory with the data of all tensors, and the position in it that stands for the beginning of the file."""
    size = header.end - header.begin
    # The same offset within a page as in the file, so that direct I/O needs no copy.
    memory, start = aligned_memory(size, header.begin % mapping.PAGESIZE)
    with progress_bar(Path(path).name, size, progress) as show:
        piece = MemoryRange(header.begin, data_address(memory, start), size, memory)
        new_handle().transfer(path, [piece], write=False, cached=warm, progress=show)
    return memory, start - header.begin


def _fill(
    header: Header, path: str, tensors: Mapping[str, torch.Tensor], warm: bool, progress: bool | None
) -> dict[str, torch.Tensor]:
    missing = tensors.keys() - {entry.name for entry in header.entries}
    if missing:
        raise ModelError(f"{path}: there is no tensor {min(missing)!r} in the file")
    wanted = [entry for entry in header.entries if entry.name in tensors]
    pieces = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for entry in wanted:
        tensor, (dtype, shape) = tensors[entry.name], torch_layout(path, entry)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ModelError(
                f"{path}: tensor {entry.name!r} is {dtype} {list(shape)} in the file, and the one to fill "
                f"is {tensor.dtype} {list(tensor.shape)}"
            )
        kind = why_no_memory(tensor)
        if kind:
            raise UsageError(f"load(): the tensor to fill {entry.name!r} with is {kind}")
        host = tensor
        # The memory of a conjugate or negative view has other values than the view.
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            host = torch.empty(shape, dtype=dtype)
            copies.append((tensor, host))
        else:
            changed(tensor)
        pieces.append(MemoryRange.of(host, entry.begin))
    with progress_bar(Path(path).name, header.end - header.begin, progress) as show:
        if pieces:
            new_handle().transfer(path, pieces, write=False, cached=warm, progress=show)
    for tensor, host in copies:
        copy_into(tensor, host)
    return {entry.name: tensors[entry.name] for entry in wanted}
