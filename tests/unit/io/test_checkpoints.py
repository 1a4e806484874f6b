# SPDX-License-Identifier: Apache-2.0
"""FileSystemWriter and FileSystemReader of one process, against torch's in both directions."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader as TorchReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter

from anyaccel.io import FileSystemReader, FileSystemWriter, checkpoints
from anyaccel.ops.aio.requests import MemoryRange

State = dict[str, Any]

# Without ranks, torch says so each time.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk: tmp_path may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="io-test-") as name:
        yield Path(name)


def state(seed: int = 0) -> State:
    """Tensors of all kinds, and objects."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(300, 700, generator=generator)
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64)
    return {
        "model": {
            "plain": plain,
            "transposed": torch.randn(64, 33, generator=generator).t(),
            "a part": torch.randn(100, 100, generator=generator)[3:50, 2:9],
            "expanded": torch.randn(1, 5, generator=generator).expand(4, 5),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
            "conjugate": torch.randn(7, dtype=torch.complex64, generator=generator).conj(),
            "parameter": torch.nn.Parameter(torch.randn(9, 9, generator=generator)),
            **{str(dtype): (plain[:11, :13] * 5).to(dtype) for dtype in dtypes},
        },
        "step": 7 + seed,
        "text": "words",
        "list": [torch.arange(5), {"inner": torch.ones(3)}],
    }


def blank(like: Any) -> Any:
    if isinstance(like, dict):
        return {name: blank(each) for name, each in like.items()}
    if isinstance(like, list):
        return [blank(each) for each in like]
    if isinstance(like, torch.Tensor):
        return torch.zeros(like.shape, dtype=like.dtype)
    return type(like)()


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted) or isinstance(found, torch.Tensor)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            same(found[name], wanted[name])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def check(folder: Path, wanted: State, reader: type[TorchReader] = FileSystemReader) -> None:
    found = blank(wanted)
    dcp.load(found, storage_reader=reader(folder))
    same(found, wanted)


@pytest.mark.parametrize("group_bytes", [None, 1000])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [(FileSystemWriter, TorchReader), (TorchWriter, FileSystemReader), (FileSystemWriter, FileSystemReader)],
)
def test_what_one_writes_the_other_reads(
    folder: Path,
    writer: type[TorchWriter],
    reader: type[TorchReader],
    group_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if group_bytes is not None:  # so that there are several groups
        monkeypatch.setattr(checkpoints, "_GROUP_BYTES", group_bytes)
    dcp.save(state(), storage_writer=writer(folder / "new" / "folder"))
    check(folder / "new" / "folder", state(), reader)


def test_tensors_go_to_the_file_from_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[MemoryRange] = []
    add = checkpoints._Pieces._add

    def added(self: Any, part: Any) -> None:
        add(self, part)
        pieces.append(self.pieces[-1])

    monkeypatch.setattr(checkpoints._Pieces, "_add", added)
    small, large = torch.randn(1000), torch.randn(1 << 19)
    wanted = {"small": small, "large": large}
    dcp.save(wanted, storage_writer=FileSystemWriter(folder))
    places = {piece.address: piece.offset for piece in pieces}
    assert small.data_ptr() in places
    assert (places[large.data_ptr()] - large.data_ptr()) % 4096 == 0  # so that direct I/O needs no copy
    check(folder, wanted, TorchReader)


def test_tensors_are_copied_from_what_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by torch.load(), which is the way for what is unusual."""
    dcp.save({"a": torch.randn(1000)}, storage_writer=FileSystemWriter(folder))
    loaded: list[torch.Tensor] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **named: loaded.append(load(*given, **named)) or loaded[-1])
    found = {"a": torch.zeros(1000)}
    dcp.load(found, storage_reader=FileSystemReader(folder))
    assert len(loaded) == 1
    assert not torch.equal(loaded[0], found["a"])  # its shape alone


def test_a_checkpoint_is_replaced_in_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state(0), storage_writer=FileSystemWriter(folder))
    first = set(folder.iterdir())

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", no_space)
        with pytest.raises(CheckpointException, match="No space left"):
            dcp.save(state(1), storage_writer=FileSystemWriter(folder))
    assert set(folder.iterdir()) == first
    check(folder, state(0), TorchReader)
    dcp.save(state(2), storage_writer=FileSystemWriter(folder))
    check(folder, state(2), TorchReader)
    assert len(list(folder.iterdir())) == len(first)


def test_a_save_whose_file_another_one_removed_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = FileSystemWriter.finish

    def late(writer: FileSystemWriter, **arguments: Any) -> None:
        monkeypatch.setattr(FileSystemWriter, "finish", finish)
        dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(folder))
        finish(writer, **arguments)

    monkeypatch.setattr(FileSystemWriter, "finish", late)
    with pytest.raises(CheckpointException, match="another save into this folder has removed"):
        dcp.save({"x": torch.zeros(3)}, storage_writer=FileSystemWriter(folder))
    loaded = {"x": torch.zeros(3)}
    dcp.load(loaded, storage_reader=FileSystemReader(folder))
    assert loaded["x"].tolist() == [1, 1, 1]


def test_what_a_killed_save_has_left_is_removed(folder: Path) -> None:
    dcp.save(state(0), storage_writer=TorchWriter(folder))
    left = [folder / "__3_0.0123456789abcdef.distcp", folder / "..metadata.0123456789abcdef.part"]
    kept = [folder / "notes.txt", folder / "__3_0.txt"]
    for file in (*left, *kept):
        file.write_text("x")
    dcp.save(state(1), storage_writer=FileSystemWriter(folder))
    check(folder, state(1))
    assert all(file.exists() for file in kept)
    assert len(list(folder.iterdir())) == len(kept) + 2  # a file and the metadata


def test_without_overwrite(folder: Path) -> None:
    dcp.save(state(0), storage_writer=FileSystemWriter(folder, overwrite=False))
    with pytest.raises(CheckpointException, match="has a checkpoint already"):
        dcp.save(state(1), storage_writer=FileSystemWriter(folder, overwrite=False))
    check(folder, state(0))


@pytest.mark.parametrize("cache", [False, True])
def test_what_changes_after_async_save_is_not_saved(folder: Path, cache: bool) -> None:
    writer = FileSystemWriter(folder, cache_staged_state_dict=cache)
    tensor = torch.randn(1000, 1000)
    for number in range(3):
        wanted = tensor.clone()
        saved = dcp.async_save({"a": tensor, "n": number}, storage_writer=writer)
        tensor.add_(1)
        saved.result()  # type: ignore[union-attr]
        check(folder, {"a": wanted, "n": number})
    writer.close()


def test_memory_is_kept_for_the_next_copy(folder: Path) -> None:
    writer = FileSystemWriter(folder, cache_staged_state_dict=True)
    tensor = torch.randn(1000)
    first = writer.stage({"a": tensor})["a"].data_ptr()
    assert writer.stage({"a": tensor})["a"].data_ptr() == first
    writer.close()


def test_a_writer_goes_to_another_process(folder: Path) -> None:
    writer = pickle.loads(pickle.dumps(FileSystemWriter(folder, cache_staged_state_dict=True)))
    dcp.save(state(), storage_writer=writer)
    check(folder, state())


def test_a_rank_of_its_own(folder: Path) -> None:
    writer = FileSystemWriter(folder)
    dcp.save(state(0), storage_writer=writer, use_collectives=False, no_dist=True)
    writer = FileSystemWriter(folder)
    dcp.save(state(1), storage_writer=writer, use_collectives=False, no_dist=True)
    names = sorted(file.name for file in folder.iterdir())
    assert names[0] == "__0.metadata"
    assert len(names) == 2


def test_a_shape_that_differs_is_named(folder: Path) -> None:
    dcp.save({"a": torch.zeros(3, 4)}, storage_writer=FileSystemWriter(folder))
    with pytest.raises(CheckpointException, match=r"\(4, 3\)|\[4, 3\]"):
        dcp.load({"a": torch.zeros(4, 3)}, storage_reader=FileSystemReader(folder))


def test_a_file_that_is_cut_off(folder: Path) -> None:
    dcp.save({"a": torch.zeros(10_000)}, storage_writer=FileSystemWriter(folder))
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointException, match="the file ends at offset"):
        dcp.load({"a": torch.zeros(10_000)}, storage_reader=FileSystemReader(folder))
