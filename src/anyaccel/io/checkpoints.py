# SPDX-License-Identifier: Apache-2.0
"""FileSystemWriter and FileSystemReader: checkpoints of torch.distributed.checkpoint by asynchronous direct I/O.

Each tensor of a file is what torch.save() makes of it, a zip archive that has the tensor's bytes as they are in memory.
So they are written from, and copied out of, the memory that is there, and torch's code sees only what is around them.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import re
import struct
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import skip_data
from torch.utils.serialization import config

from anyaccel.errors import ModelError, UsageError
from anyaccel.io.reading import WARM, new_handle
from anyaccel.ops.aio.memory import aligned_memory, data_address
from anyaccel.ops.aio.native import cached_bytes
from anyaccel.ops.aio.requests import MemoryRange

_VERSION = "1.0.0"  # of torch's layout
_SUFFIX = ".distcp"
_ALIGNMENT = 64  # of an archive in its file, and by torch.save() of a tensor in its archive
_LARGE = 1 << 20  # bytes of a tensor that is worth a gap of up to a page before it
_GROUP_BYTES = 64 << 20  # what is under way while the next is prepared


class FileSystemWriter(filesystem.FileSystemWriter):
    """torch's FileSystemWriter, faster, and with checkpoints that replace each other in one step.

    The layout is torch's, with a file for each rank: torch's FileSystemReader, `dcp.load` and its tools read it.
    Tensors go to the disk from where they lie, past the page cache.

    A folder has one whole checkpoint at any time. Files of a save have names of their own, its metadata replaces that
    of the one before when all ranks have written and synced theirs, and only then are the older files removed. What a
    save leaves that did not come to its end, the next one removes. So one folder takes one save at a time.

    Args:
        path: the folder, which is made where there is none.
        cache_staged_state_dict: keep the memory into which `async_save` copies the tensors for the next save with
            this writer, which makes the copy several times faster.
        overwrite: whether the folder may have a checkpoint already.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, cache_staged_state_dict: bool = False, overwrite: bool = True
    ) -> None:
        super().__init__(path, overwrite=overwrite)
        # torch's own cache wants pinned memory, which there is only with a device.
        keeps = StagingOptions(False, False, False, False)
        self._stager = DefaultStager(keeps) if cache_staged_state_dict else None
        self._writing = threading.Lock()
        self._old: list[Path] = []

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory, which `async_save` writes."""
        if self._stager is None:
            return super().stage(state_dict)
        with self._writing:  # a save that is under way reads the same memory
            return self._stager.stage(state_dict)  # type: ignore[return-value]  # no future without async staging

    def close(self) -> None:
        """Free the memory that is kept for the next save."""
        if self._stager is not None:
            self._stager.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        """For `AsyncCheckpointerType.PROCESS`, which saves in a process of its own."""
        return {**self.__dict__, "_stager": None, "_writing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _writing=threading.Lock())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder; without `overwrite`, UsageError where it has a checkpoint."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        if not self.overwrite and self._metadata().exists():
            raise UsageError(f"{self.path} has a checkpoint already; give another folder, or overwrite=True")
        if self._alone():
            self._old = self._files(f"__{self.rank}")
            return replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on one rank, before any writes."""
        if not self._alone():
            self._old = self._files("")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync the file of this rank."""
        path = Path(self.path) / f"{plan.storage_data.prefix}0.{uuid.uuid4().hex}{_SUFFIX}"
        with self._writing:
            results = _write(path, plan.items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make what all ranks have written the checkpoint of the folder."""
        metadata.version = _VERSION
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = self.storage_meta()
        for name in {result.storage_data.relative_path for each in results for result in each}:
            if not (Path(self.path) / name).exists():
                raise UsageError(f"{self.path}: another save into this folder has removed {name}; save one at a time")
        pickled = torch.frombuffer(bytearray(pickle.dumps(metadata)), dtype=torch.uint8)
        new_handle().write(pickled, self._metadata(), False, write_atomic=True)
        for path in self._old:
            path.unlink(missing_ok=True)

    def _alone(self) -> bool:
        """Whether each rank saves a checkpoint of its own (`use_collectives=False`)."""
        return self.rank is not None and not self.use_collectives

    def _metadata(self) -> Path:
        return Path(self.path) / (f"__{self.rank}.metadata" if self._alone() else ".metadata")

    def _files(self, own: str) -> list[Path]:
        """The files of earlier saves, of one rank or of all, and what is left of metadata that was not renamed."""
        data = rf"{own or '__[0-9]+'}_[^/]*{re.escape(_SUFFIX)}"
        name = re.compile(rf"{data}|\.{re.escape(self._metadata().name)}\.[0-9a-f]{{16}}\.part")
        return [path for path in Path(self.path).iterdir() if name.fullmatch(path.name)]


def _write(path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """A new file with what `items` stand for, one after the other."""
    results = []
    handle = new_handle()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _reserve(descriptor, items)
        group = _Pieces()
        for item in items:
            archive, copied = _archive(item, planner)
            begin = group.append(archive)
            group.copies |= copied
            info = _StorageInfo(path.name, begin, group.end - begin)
            results.append(WriteResult(item.index, group.end - begin, info))
            if group.end - group.begin >= _GROUP_BYTES:
                if group.copies:
                    handle.wait()  # so that copies of two groups at most are in memory
                handle.transfer(descriptor, group.pieces, write=True, wait=False)
                group = _Pieces(group.end)
        handle.transfer(descriptor, group.pieces, write=True, wait=False)
        handle.wait()
        os.ftruncate(descriptor, group.end)
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return results


def _reserve(descriptor: int, items: list[WriteItem]) -> None:
    """Make the file as long as it may become, since extending it later waits for what is under way in it.

    Where that fails, the writes that follow do, or reserve space for themselves.
    """
    tensors = [item.tensor_data for item in items if item.tensor_data is not None]
    sizes = (tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    whole = sum(sizes) + (4096 + mmap.PAGESIZE) * len(items)
    # Not os.posix_fallocate(), which writes to every block where the file system cannot reserve.
    fallocate = ctypes.CDLL(None).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fallocate(descriptor, 0, 0, whole)


def _archive(item: WriteItem, planner: SavePlanner) -> tuple[_Archive, bool]:
    """What of an item goes to the file, and whether memory has been made for that."""
    data: Any = planner.resolve_data(item)
    archive = _Archive()
    if item.type == WriteItemType.BYTE_IO:
        archive.write(data.getbuffer())
        return archive, False
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save() would write all that it is a part of
    archive.tensor = tensor
    # Without checksums, which torch.load() does not look at, and which take as long as writing to a fast disk.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(tensor, archive)  # type: ignore[arg-type]
    return archive, tensor.data_ptr() != data.data_ptr()


class _Archive:
    """A file for torch.save() that keeps where a tensor lies rather than its bytes.

    Attributes:
        tensor: the tensor that is being saved.
        parts: what was written.
    """

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.parts: list[bytearray | MemoryRange] = []
        self._size = 0

    def write(self, data: Any) -> int:
        """Append bytes, whose memory may be gone afterwards if it is not that of the tensor."""
        view = memoryview(data).cast("B")
        size = view.nbytes
        if size and self.tensor is not None:
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            begin = self.tensor.untyped_storage().data_ptr()
            if begin <= address < begin + self.tensor.nbytes:
                self.parts.append(MemoryRange(self._size, address, size, self.tensor))
                self._size += size
                return size
        last = self.parts[-1] if self.parts else None
        if isinstance(last, bytearray):
            last += view
        else:
            self.parts.append(bytearray(view))
        self._size += size
        return size

    def flush(self) -> None:
        """Nothing to do: torch.save() calls it at its end."""


class _Pieces:
    """A part of a file, from `begin` to `end`, as what is to be written there."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = self.end = begin
        self.pieces: list[MemoryRange] = []
        self.copies = False

    def append(self, archive: _Archive) -> int:
        """Append an archive, and return where it begins.

        A large tensor goes to where it is as far into a page as in memory, from which it is written without a copy.
        """
        gap = -self.end % _ALIGNMENT
        for part in archive.parts:
            if isinstance(part, MemoryRange) and part.num_bytes >= _LARGE and part.address % _ALIGNMENT == 0:
                gap = (part.address - part.offset - self.end) % mmap.PAGESIZE
        if gap:
            self._add(bytearray(gap))
        begin = self.end
        for part in archive.parts:
            self._add(part)
        return begin

    def _add(self, part: bytearray | MemoryRange) -> None:
        if isinstance(part, MemoryRange):
            piece = part._replace(offset=self.end)
        else:
            piece = MemoryRange.of(torch.frombuffer(part, dtype=torch.uint8), self.end)
        self.pieces.append(piece)
        self.end += piece.num_bytes


class FileSystemReader(filesystem.FileSystemReader):
    """torch's FileSystemReader, faster: it reads what FileSystemWriter, ours or torch's, has written.

    As with torch's, objects other than tensors are unpickled: load only what you trust.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants into the planner's tensors."""
        files: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            if info.transform_descriptors:
                return super().read_data(plan, planner)
            files.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        for name, wanted in files.items():
            for place, memory, start in _read(Path(self.path) / name, sorted(wanted)):
                for item in wanted[place]:
                    _load(item, memory, start, place[1], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read(path: Path, places: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], mmap.mmap, int]]:
    """Each of the places (offset and length) of a file, and where in which memory it lies until the next is asked for.

    The places that follow are being read meanwhile.
    """
    groups: list[list[tuple[int, int]]] = []
    for offset, length in places:
        if not groups or offset + length - groups[-1][0][0] > _GROUP_BYTES:
            groups.append([])
        groups[-1].append((offset, length))
    size = max(sum(group[-1]) - group[0][0] for group in groups)
    memories = [aligned_memory(size + mmap.PAGESIZE) for _ in groups[:2]]
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        cached = cached_bytes(file.fileno(), length) >= WARM * length
        handle = new_handle()

        def start_of(number: int) -> int:
            """Where in its memory a group begins: as far into a page as in the file, so that nothing is copied."""
            return memories[number % 2][1] + groups[number][0][0] % mmap.PAGESIZE

        def begin(number: int) -> None:
            memory, first = memories[number % 2][0], groups[number][0][0]
            address = data_address(memory, start_of(number)) - first
            pieces = [MemoryRange(offset, address + offset, length, memory) for offset, length in groups[number]]
            handle.transfer(file.fileno(), pieces, write=False, cached=cached, wait=False)

        begin(0)
        for number, group in enumerate(groups):
            handle.wait()
            if number + 1 < len(groups):
                begin(number + 1)
            for place in group:
                yield place, memories[number % 2][0], start_of(number) + place[0] - group[0][0]


def _load(item: ReadItem, memory: mmap.mmap, start: int, length: int, planner: LoadPlanner) -> None:
    archive = _Window(memory, start, length)
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(archive.read()))
        return
    tensor = narrow_tensor_by_index(_tensor(archive), item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise ModelError(f"{item.storage_index}: {list(tensor.shape)} in the file, and {list(target.shape)} to fill")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _tensor(archive: _Window) -> torch.Tensor:
    """The tensor of an archive of torch.save(), in the archive's memory if it is as usual there."""
    with skip_data():
        shape: torch.Tensor = torch.load(archive, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    with zipfile.ZipFile(archive) as entries:
        records = {entry.filename.partition("/")[2]: entry for entry in entries.infolist()}
    data, order = records.get("data/0"), records.get("byteorder")
    if (
        type(shape) is not torch.Tensor
        or shape.layout != torch.strided
        or shape.is_quantized
        or shape.is_conj()
        or shape.is_neg()
        or data is None
        or data.file_size != shape.untyped_storage().nbytes()
        or (order is not None and archive.record(order) != sys.byteorder.encode())
    ):
        archive.seek(0)
        whole: torch.Tensor = torch.load(archive, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        return whole
    content = archive.record(data)
    if not content.nbytes:
        return shape
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if flat.data_ptr() % shape.dtype.itemsize:
        flat = flat.clone()
    return flat.view(shape.dtype).as_strided(shape.shape, shape.stride(), shape.storage_offset())


class _Window(io.RawIOBase):
    """A part of memory as a file, with a zip archive in it."""

    def __init__(self, memory: mmap.mmap, start: int, length: int) -> None:
        self._view = memoryview(memory)[start : start + length]
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._view)}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def record(self, entry: zipfile.ZipInfo) -> memoryview:
        """The content of an entry that is not compressed."""
        name, extra = struct.unpack_from("<HH", self._view, entry.header_offset + 26)
        begin = entry.header_offset + 30 + name + extra
        return self._view[begin : begin + entry.file_size]
