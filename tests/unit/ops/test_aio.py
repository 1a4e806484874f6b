# SPDX-License-Identifier: Apache-2.0
"""Reading and writing tensors: every engine, size, offset, dtype and layout, and DeepSpeed's names."""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyaccel import get_accelerator
from anyaccel.errors import AioError, UsageError
from anyaccel.ops import aio
from anyaccel.ops.aio import memory, native

ENGINES = ("io_uring", "linux_aio", "threads")
PAGE = 4096
FOLDERS = {"disk": "/var/tmp", "tmpfs": "/dev/shm"}


def make(engine: str = "auto", block: int = 1 << 16, depth: int = 4, threads: int = 2) -> aio.aio_handle:
    try:
        return aio.aio_handle(block, depth, False, True, threads, engine=engine)
    except AioError as error:
        pytest.skip(str(error))


def pattern(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """With O_DIRECT, where the machine's disk has it, and without."""
    with tempfile.TemporaryDirectory(dir=FOLDERS[request.param], prefix="aio-test-") as name:
        yield Path(name)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Names ----------------------------------------------------------------------------------------------------------

# py_ds_aio.cpp of DeepSpeed 0.19.8: positional parameters and their defaults.
DEEPSPEED = {
    "__init__": "block_size=1048576 queue_depth=128 single_submit=False overlap_events=False intra_op_parallelism=1",
    "get_block_size": "",
    "get_queue_depth": "",
    "get_single_submit": "",
    "get_overlap_events": "",
    "get_intra_op_parallelism": "",
    "get_alignment": "",
    "read": "buffer filename validate file_offset=0",
    "write": "buffer filename validate file_offset=0",
    "pread": "buffer filename validate async_ file_offset=0",  # theirs is called async, which Python cannot write
    "pwrite": "buffer filename validate async_ file_offset=0",
    "sync_pread": "buffer filename file_offset=0",
    "sync_pwrite": "buffer filename file_offset=0",
    "async_pread": "buffer filename file_offset=0",
    "async_pwrite": "buffer filename=None file_offset=0",  # or fd, by name
    "new_cpu_locked_tensor": "num_elem example_tensor",
    "free_cpu_locked_tensor": "tensor",
    "is_pinned": "buffer",
    "wait": "",
}
DEEPSPEED_FUNCTIONS = {
    "aio_read": "buffer filename block_size queue_depth single_submit overlap_events validate",
    "aio_write": "buffer filename block_size queue_depth single_submit overlap_events validate",
    "deepspeed_memcpy": "dest src",
}


def positional(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return " ".join(
        parameter.name + ("" if parameter.default is parameter.empty else f"={parameter.default}")
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    )


def test_has_the_names_and_parameters_of_deepspeed() -> None:
    assert {name: positional(getattr(aio.aio_handle, name)) for name in DEEPSPEED} == DEEPSPEED
    assert {name: positional(getattr(aio, name)) for name in DEEPSPEED_FUNCTIONS} == DEEPSPEED_FUNCTIONS


def test_the_accelerators_builder_gives_the_module() -> None:
    assert get_accelerator().create_op_builder("AsyncIOBuilder").load() is aio


def test_settings_are_as_given() -> None:
    handle = aio.aio_handle(8192, 3, True, False, 2)
    found = (
        handle.get_block_size(),
        handle.get_queue_depth(),
        handle.get_single_submit(),
        handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
        handle.get_alignment(),
    )
    assert found == (8192, 3, True, False, 2, 1024)
    assert aio.aio_handle().get_block_size() == 1 << 20


@pytest.mark.parametrize("arguments", [(0,), (-1,), (1 << 31,), (4096, 0), (4096, 1 << 20), (4096, 1, False, False, 0)])
def test_settings_out_of_range_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="must be from 1 to"):
        aio.aio_handle(*arguments)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="one of auto, io_uring, linux_aio, threads"):
        aio.aio_handle(engine="spdk")


def test_the_engine_that_is_asked_for_is_used(engine: str) -> None:
    assert make(engine).engine == engine
    assert aio.aio_handle().engine in ENGINES


# Sizes and offsets ----------------------------------------------------------------------------------------------


def around(*values: int) -> st.SearchStrategy[int]:
    return st.one_of([st.integers(max(0, value - 2), value + 2) for value in values])


SIZES = st.one_of(around(0, 512, PAGE, 2 * PAGE, 1 << 16, 3 << 16, 1 << 20), st.integers(0, 1 << 21))
OFFSETS = st.one_of(around(0, 512, PAGE, 1 << 16, 1 << 20), st.integers(0, 1 << 20))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", FOLDERS)
@given(
    before=SIZES,
    size=SIZES,
    offset=OFFSETS,
    shift=st.sampled_from([0, 1, 64, 512]),
    block=st.sampled_from([1, 100, PAGE, 5000, 1 << 16, 1 << 20]),
    depth=st.sampled_from([1, 2, 32]),
    threads=st.integers(1, 3),
    single=st.booleans(),
)
@settings(max_examples=40)
def test_any_range_of_any_file_is_written_and_read(
    engine: str, where: str, before: int, size: int, offset: int, shift: int, block: int, depth: int, threads: int,
    single: bool,
) -> None:  # fmt: skip
    try:
        handle = aio.aio_handle(max(block, size // 500 + 1), depth, single, True, threads, engine=engine)
    except AioError as error:
        pytest.skip(str(error))
    old, new = pattern(before, 1), pattern(size + shift, 2)[shift:]
    expected = bytearray(old.numpy().tobytes())
    if size:
        expected.extend(bytes(max(0, offset + size - before)))
        expected[offset : offset + size] = new.numpy().tobytes()
    with tempfile.NamedTemporaryFile(dir=FOLDERS[where]) as file:
        file.write(old.numpy().tobytes())
        file.flush()
        assert handle.sync_pwrite(new, file.name, offset) == 1
        assert Path(file.name).read_bytes() == expected
        back = torch.zeros(size + shift, dtype=torch.uint8)[shift:]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert handle.sync_pread(back, file.name, offset if size else 0) == 1
        assert torch.equal(back, new)


@pytest.mark.parametrize("engine", ENGINES)
@given(st.lists(st.integers(0, 300_000), min_size=2, max_size=40), st.booleans(), st.integers(0, 4096))
@settings(max_examples=30)
def test_pieces_of_a_file_are_written_and_read(engine: str, cuts: list[int], gaps: bool, begin: int) -> None:
    handle = make(engine)
    cuts = sorted(cuts)
    total = pattern(cuts[-1])
    parts = [total[first:last].clone() for first, last in zip([0, *cuts], cuts, strict=False)]
    offsets = [begin + first for first in [0, *cuts[:-1]]]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        file = Path(folder) / "file"
        pieces = [aio.requests.MemoryRange.of(part, offset) for part, offset in zip(parts, offsets, strict=True)]
        handle.transfer(file, pieces, write=True)
        # Nothing to write makes no bytes before it either.
        assert file.read_bytes() == (bytes(begin) + total.numpy().tobytes() if total.numel() else b"")
        back = [torch.zeros_like(part) for part in parts]
        pieces = [aio.requests.MemoryRange.of(part, offset) for part, offset in zip(back, offsets, strict=True)]
        handle.transfer(file, pieces[:: 2 if gaps else 1], write=False)
    for index in range(0, len(parts), 2 if gaps else 1):
        assert torch.equal(back[index], parts[index])


def test_requests_beside_each_other_do_not_disturb_each_other(engine: str, folder: Path) -> None:
    handle = make(engine, block=PAGE, depth=8, threads=2)
    whole = pattern(1 << 20)
    edges = [0, 1, 700, 5000, 70_001, 70_002, 200_000, 500_123, 1 << 20]
    for first, last in itertools.pairwise(edges):
        handle.async_pwrite(whole[first:last], folder / "file", first)
    assert handle.wait() == len(edges) - 1
    assert (folder / "file").read_bytes() == whole.numpy().tobytes()
    parts = [torch.zeros(last - first, dtype=torch.uint8) for first, last in itertools.pairwise(edges)]
    for first, part in zip(edges, parts, strict=False):
        handle.async_pread(part, folder / "file", first)
    handle.wait()
    assert torch.equal(torch.cat(parts), whole)


# Tensors --------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.int8, torch.int64, torch.uint16, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_goes_there_and_back(dtype: torch.dtype, folder: Path) -> None:
    handle = make()
    tensor = (pattern(3 * 1000 * dtype.itemsize) & (1 if dtype == torch.bool else 255)).view(dtype).view(3, 1000)
    handle.sync_pwrite(tensor, folder / "file")
    back = torch.zeros_like(tensor)
    handle.sync_pread(back, folder / "file")
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_strided_tensors_are_written_in_their_order_and_filled(folder: Path) -> None:
    handle = make()
    whole = torch.arange(6000, dtype=torch.float32).view(60, 100)
    handle.sync_pwrite(whole.t(), folder / "file")
    assert torch.equal(torch.frombuffer(bytearray((folder / "file").read_bytes()), dtype=torch.float32),
                       whole.t().reshape(-1))  # fmt: skip
    target = torch.zeros(60, 100)
    handle.async_pread(target.t(), folder / "file")
    assert handle.wait() == 1
    assert torch.equal(target, whole)


def test_lazy_conjugates_are_written_as_they_look_and_filled(folder: Path) -> None:
    handle = make()
    values = torch.randn(1000, dtype=torch.complex64)
    handle.sync_pwrite(values.conj(), folder / "file")
    back = torch.zeros(1000, dtype=torch.complex64)
    handle.sync_pread(back, folder / "file")
    assert torch.equal(back, values.conj().resolve_conj())
    handle.sync_pread(back.conj(), folder / "file")
    assert torch.equal(back, values)


def test_parameters_are_filled_without_a_trace_in_autograd(folder: Path) -> None:
    handle = make()
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    handle.sync_pwrite(torch.ones(10, 10), folder / "file")
    handle.sync_pread(parameter, folder / "file")
    handle.sync_pread(parameter.t(), folder / "file")
    assert parameter.is_leaf and bool((parameter == 1).all())


def test_scalars_and_empty_tensors_work(folder: Path) -> None:
    handle = make()
    handle.sync_pwrite(torch.tensor(2.5), folder / "scalar")
    back = torch.tensor(0.0)
    handle.sync_pread(back, folder / "scalar")
    assert back.item() == 2.5
    handle.sync_pwrite(torch.empty(0), folder / "empty")
    handle.sync_pread(torch.empty(0), folder / "empty", 100)
    assert (folder / "empty").stat().st_size == 0


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(3, device="meta"), "a tensor that is meta"),
        (torch.eye(3).to_sparse(), "a tensor that is torch.sparse_coo"),
        (torch.zeros(1).expand(5), "expanded tensor"),
    ],
    ids=["meta", "sparse", "expanded"],
)
def test_tensors_that_cannot_be_filled_are_refused(tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        make().sync_pread(tensor, tmp_path / "file")


@pytest.mark.parametrize("offset", [-1, 1 << 63, (1 << 63) - 3])
def test_impossible_offsets_are_refused(offset: int, tmp_path: Path) -> None:
    for call in (make().sync_pread, make().sync_pwrite):
        with pytest.raises(UsageError, match=r"must be from 0 to 2\*\*63-1"):
            call(torch.zeros(4), tmp_path / "file", offset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "message"), [("a\0b", "zero byte"), ("a\ud800b", "surrogate")])
def test_names_that_no_file_can_have_are_refused(name: str, message: str, tmp_path: Path) -> None:
    handle, tensor, path = make(), torch.zeros(4), f"{tmp_path}/{name}"
    for call in (handle.sync_pread, handle.sync_pwrite, partial(handle.sync_pwrite, write_atomic=True)):
        with pytest.raises(UsageError, match=message):
            call(tensor, path)
    assert not list(tmp_path.iterdir())


def test_names_may_be_bytes_that_are_no_text(tmp_path: Path) -> None:
    handle, back, name = make(), torch.zeros(4), os.fsencode(tmp_path) + b"/\xff"
    handle.sync_pwrite(torch.ones(4), name)
    handle.sync_pread(back, os.fsdecode(name))
    assert bool(back.all())


@pytest.mark.parametrize("descriptor", [-1, True, 1 << 32])
def test_numbers_that_are_no_descriptors_are_refused(descriptor: int) -> None:
    for call in (make().sync_pread, make().sync_pwrite):
        with pytest.raises(UsageError, match="neither a name nor a descriptor"):
            call(torch.zeros(4), descriptor)


@pytest.mark.parametrize("count", [-5, -1])
def test_a_negative_number_of_elements_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"num_elem={count} must not be negative"):
        make().new_cpu_locked_tensor(count, torch.zeros(1))


@pytest.mark.parametrize("count", [1 << 45, 1 << 62, 1 << 70])
def test_memory_that_is_not_there_is_an_error_of_ours(count: int) -> None:
    with pytest.raises(AioError, match=f"there is no memory of {4 * count} bytes"):
        make().new_cpu_locked_tensor(count, torch.zeros(1))


# Waiting --------------------------------------------------------------------------------------------------------


def test_wait_counts_what_was_pending(folder: Path, engine: str) -> None:
    handle = make(engine)
    assert handle.wait() == 0
    tensors = [pattern(100_000 + index, index) for index in range(50)]
    for index, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, folder / str(index)) == 0
    assert handle.sync_pwrite(tensors[0], folder / "more") == 51
    assert handle.wait() == 0
    back = [torch.zeros_like(tensor) for tensor in tensors]
    for index, tensor in enumerate(back):
        handle.pread(tensor, folder / str(index), True, True)
    assert handle.wait() == 50
    assert all(map(torch.equal, back, tensors))


def test_several_threads_use_one_handle(folder: Path, engine: str) -> None:
    handle = make(engine)
    done = []

    def work(number: int) -> None:
        tensor, back = pattern(300_001, number), torch.zeros(300_001, dtype=torch.uint8)
        for _ in range(10):
            handle.transfer(folder / str(number), [aio.requests.MemoryRange.of(tensor, 3)], write=True)
            handle.transfer(folder / str(number), [aio.requests.MemoryRange.of(back, 3)], write=False)
            assert torch.equal(tensor, back)
            handle.async_pread(back, folder / str(number), 3)
            handle.wait()
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(6))


def test_each_thread_of_a_handle_gets_its_own_reads(folder: Path, engine: str) -> None:
    """Whichever thread's wait comes first, every call returns with its data, and counts what its thread has begun."""
    handle, size = make(engine), 150_001
    for number in range(6):
        handle.sync_pwrite(torch.full((size,), number + 1, dtype=torch.uint8), folder / str(number))
    wrong: list[str] = []
    done = threading.Event()

    def read(number: int) -> None:
        file = folder / str(number)
        for turn in range(25):
            first, second = torch.zeros(2, size, dtype=torch.uint8)
            if turn % 3 == 0:
                counts = [handle.sync_pread(first, file) - 1, handle.read(second, file, False)]
            elif turn % 3 == 1:
                counts = [handle.async_pread(first, file), handle.sync_pread(second, file) - 2]
            else:  # others may be pending here too, so there may be more
                counts = [handle.async_pread(first, file), handle.async_pread(second, file), min(handle.wait() - 2, 0)]
            if any(counts) or not bool((first == number + 1).all() and (second == number + 1).all()):
                wrong.append(f"thread {number}, turn {turn}: counts {counts}, {int((first == 0).sum())} bytes missing")

    def only_wait() -> None:
        while not done.is_set():
            handle.wait()

    waiting = threading.Thread(target=only_wait)
    waiting.start()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    waiting.join()
    assert not wrong
    assert handle.wait() == 0 and not handle._requests._known and not handle._requests._pending


def test_an_error_is_heard_by_the_thread_that_began_and_by_the_one_that_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, tensor = make(), pattern(50_000)
    handle.sync_pwrite(tensor, folder / "file")
    handle.pwrite(tensor, folder / "file", True, True)
    handle.async_pread(torch.empty_like(tensor), folder / "file")
    monkeypatch.setattr("builtins.open", lambda *_arguments, **_options: io.BytesIO(bytes(60_000)))
    heard: list[object] = []

    def others() -> None:
        heard.append(handle.sync_pread(torch.empty_like(tensor), folder / "file"))  # no business of its
        try:
            handle.wait()
        except AioError as error:
            heard.append(str(error))
        heard.append(handle.wait())

    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert heard[0] == 1 and "differ" in str(heard[1]) and heard[2] == 0
    with pytest.raises(AioError, match="differ"):
        handle.wait()
    assert handle.wait() == 0


def test_a_tensor_that_nobody_else_keeps_is_written(folder: Path) -> None:
    handle = make()
    for index in range(20):
        handle.async_pwrite(torch.full((200_000,), index, dtype=torch.uint8), folder / str(index))
    handle.wait()
    assert all((folder / str(index)).read_bytes() == bytes([index]) * 200_000 for index in range(20))


def test_a_descriptor_is_written_to_and_may_be_closed_at_once(folder: Path) -> None:
    handle, tensor = make(), pattern(100_000)
    with (folder / "file").open("wb") as file:
        handle.async_pwrite(tensor, file.fileno(), 10)
    with (folder / "appended").open("ab", buffering=0) as file:  # the offset counts, not the flag
        file.write(bytes(20))
        handle.async_pwrite(buffer=tensor, fd=file.fileno(), file_offset=10)
        for wrong in ({}, {"filename": folder / "file", "fd": file.fileno()}):
            with pytest.raises(UsageError, match="give one of the two"):
                handle.async_pwrite(tensor, **wrong)
    assert handle.wait() == 2
    assert (folder / "file").read_bytes() == (folder / "appended").read_bytes() == bytes(10) + tensor.numpy().tobytes()
    with tempfile.TemporaryFile(dir=folder) as unnamed:
        handle.async_pwrite(tensor, unnamed.fileno())
        handle.wait()
        assert unnamed.read() == tensor.numpy().tobytes()


@pytest.mark.parametrize("way", ["read", "pread", "sync_pread", "async_pread"])
def test_a_descriptor_is_read_from_and_may_be_closed_at_once(way: str, folder: Path) -> None:
    handle, tensor = make(), pattern(100_000)
    handle.sync_pwrite(tensor, folder / "file", 7)
    back = torch.zeros_like(tensor)
    with (folder / "file").open("rb") as file:
        descriptor = file.fileno()
        if way == "read":
            handle.read(back, descriptor, True, 7)
        elif way == "pread":
            handle.pread(back, descriptor, True, True, 7)
        else:
            getattr(handle, way)(back, descriptor, 7)
        assert file.tell() == 0
    assert handle.wait() == (way in ("pread", "async_pread"))
    assert torch.equal(back, tensor)


def test_a_descriptor_allows_what_it_was_opened_for(folder: Path) -> None:
    """Also where the file, and root, would allow more."""
    handle, tensor, path = make(), pattern(100_000), folder / "file"
    path.write_bytes(b"as before" * 20_000)
    before = path.read_bytes()
    with path.open("rb") as file:
        for call in (handle.sync_pwrite, handle.async_pwrite, partial(handle.write, validate=True)):
            with pytest.raises(AioError, match=r"writing 100000 bytes .* Bad file descriptor"):
                call(tensor, file.fileno())
    with path.open("ab") as file:
        with pytest.raises(AioError, match=r"reading 100000 bytes .* Bad file descriptor"):
            handle.sync_pread(tensor, file.fileno())
        with pytest.raises(UsageError, match="open for writing only"):
            handle.write(tensor, file.fileno(), True)
    number = os.open(path, os.O_PATH)
    os.close(number)
    with pytest.raises(AioError, match="Bad file descriptor"):
        handle.read(tensor, number, True)
    assert handle.wait() == 0 and path.read_bytes() == before
    with path.open("r+b") as file:
        assert handle.write(tensor, file.fileno(), True) == 0
    assert path.read_bytes()[:100_000] == tensor.numpy().tobytes()


def test_validate_compares_with_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, tensor = make(), pattern(50_000)
    assert handle.write(tensor, folder / "file", True, 7) == 0
    assert handle.read(tensor, folder / "file", True, 7) == 0
    (folder / "other").write_bytes(bytes(60_000))
    opened = open

    def open_other(path: str, *arguments: object, **options: object) -> object:
        return opened(str(path).replace("file", "other"), *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", open_other)
    with pytest.raises(AioError, match="differ"):
        handle.read(tensor, folder / "file", True, 7)


def test_functions_open_a_handle_of_their_own(folder: Path) -> None:
    tensor, back = pattern(10_000), torch.zeros(10_000, dtype=torch.uint8)
    assert aio.aio_write(tensor, folder / "file", 4096, 4, False, False, True) == 0
    assert aio.aio_read(back, folder / "file", 4096, 4, False, False, True) == 0
    assert aio.deepspeed_memcpy(back[:5], torch.zeros(5, dtype=torch.uint8)) == 0
    assert torch.equal(back[5:], tensor[5:]) and not back[:5].any()


def test_a_file_system_without_direct_io_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "_said", set())
    handle = make()
    with caplog.at_level(logging.WARNING, "anyaccel.aio"), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in "abc":
            handle.sync_pwrite(torch.zeros(10_000), Path(folder) / name)
    assert len(caplog.records) == 1
    assert "no direct I/O (O_DIRECT): files go through the page cache" in caplog.text


def test_cached_bytes_counts_pages(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(bytes(10 * PAGE))
        file.flush()
        found = native.cached_bytes(file.fileno(), 10 * PAGE)
    assert found in (-1, 10 * PAGE)


# Processes and Ctrl-C -------------------------------------------------------------------------------------------


def test_a_child_that_was_forked_is_told_to_make_its_own(tmp_path: Path) -> None:
    handle = make()
    handle.sync_pwrite(torch.zeros(5000), tmp_path / "file")
    child = os.fork()
    if child == 0:
        try:
            handle.sync_pread(torch.zeros(5000), tmp_path / "file")
        except UsageError:
            own = aio.aio_handle(4096, 2)
            own.sync_pwrite(torch.ones(5000), tmp_path / "file")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.zeros(5000)
    handle.sync_pread(back, tmp_path / "file")
    assert bool((back == 1).all())


BUSY = """
import sys, threading, torch
from anyaccel.ops.aio import aio_handle
handle = aio_handle(4096, 1, engine="threads")
tensor = torch.zeros(64 << 20, dtype=torch.uint8)
loops = 0
def count():
    global loops
    while True: loops += 1
threading.Thread(target=count, daemon=True).start()
print("ready", flush=True)
try:
    while True:
        handle.sync_pwrite(tensor, sys.argv[1])
except KeyboardInterrupt:
    before = loops
    print("waited for", handle.wait(), "others ran" if before > 1000 else "others did not run", flush=True)
"""


def test_ctrl_c_is_answered_and_other_threads_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path / "file")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) in (
        ("waited for 1 others ran\n", "", 0),
        ("waited for 0 others ran\n", "", 0),
    )
