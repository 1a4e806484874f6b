# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with files: each error names file, offset and errno, and nothing that looks complete stays behind.

ENOSPC comes from small file systems that are mounted for the test, EIO and short transfers from one that fails on
purpose (failing_fs.py); both need root, so they are skipped without.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import pickle
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import failing_fs
from anyaccel.errors import AioError, AnyAccelError, UsageError
from anyaccel.ops import aio
from anyaccel.ops.aio.requests import MemoryRange
from waiting import settled, wait_for

ENGINES = ("io_uring", "linux_aio", "threads")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(engine: str = "auto", block: int = 1 << 16, depth: int = 4, threads: int = 2) -> aio.aio_handle:
    try:
        return aio.aio_handle(block, depth, False, True, threads, engine=engine)
    except AioError as error:
        pytest.skip(str(error))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def open_files() -> int:
    """Open descriptors, once handles of earlier tests, which close their files in threads, have ended."""
    gc.collect()
    found = [-1, -2]
    while found[-1] != found[-2]:
        time.sleep(0.1)
        found.append(descriptors())
    return found[-1]


def ones(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


# Files that are not there, or are something else ------------------------------------------------------------------


def test_a_missing_file_is_named(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "missing"
    with pytest.raises(AioError) as caught:
        make(engine).sync_pread(ones(100), file, 8192)
    error = caught.value
    assert (error.errno, error.filename, error.offset) == (errno.ENOENT, str(file), 0)
    assert str(error) == (
        f"reading 100 bytes at offset 8192 of '{file}' failed: opening it: No such file or directory (errno 2)"
    )
    assert isinstance(error, OSError) and isinstance(error, AnyAccelError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.errno, copy.filename, copy.offset) == (str(error), 2, str(file), 0)


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    handle, before = make(), open_files()
    os.mkfifo(tmp_path / "pipe")
    for name, number in (("", errno.EISDIR), ("pipe", errno.ESPIPE)):
        with pytest.raises(AioError) as caught:
            handle.sync_pread(ones(10), tmp_path / name)
        assert caught.value.errno == number
    for name, numbers in (("", [errno.EISDIR]), ("pipe", [errno.ESPIPE, errno.ENXIO]), ("no/file", [errno.ENOENT])):
        with pytest.raises(AioError) as caught:
            handle.sync_pwrite(ones(10), tmp_path / name)
        assert caught.value.errno in numbers
    with pytest.raises(AioError):
        handle.async_pwrite(ones(10), 987_654)
    with pytest.raises(UsageError, match="neither a name nor a descriptor"):
        handle.async_pwrite(ones(10), -1)
    assert settled(descriptors, before) == before and handle.wait() == 0


def test_a_file_that_is_too_short_is_refused_before_it_is_read(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    target = ones(10_000)
    with pytest.raises(AioError, match="the file ends at offset 10000") as caught:
        make(engine).sync_pread(target, tmp_path / "file", 1)
    assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, 10_000)
    assert bool(target.all())


def test_other_requests_are_done_although_one_fails(engine: str, tmp_path: Path) -> None:
    handle, target = make(engine), torch.zeros(10_000, dtype=torch.uint8)
    for name in "ac":
        (tmp_path / name).write_bytes(b"\1" * 10_000)
    (tmp_path / "b").write_bytes(b"\1" * 10_000)
    handle.async_pread(target[:5000], tmp_path / "a")
    os.truncate(tmp_path / "c", 10_000)
    for name in "bc":
        with pytest.raises(AioError):
            handle.async_pread(target, tmp_path / name, 10_000)
    handle.async_pread(target[5000:], tmp_path / "c")
    assert handle.wait() == 2
    assert bool(target.all())


# A file that fails on purpose -------------------------------------------------------------------------------------


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "failing"
    folder.mkdir()
    with failing_fs.mounted(folder) as why_not:
        if why_not:
            pytest.skip(why_not)
        yield folder


def test_eio_while_reading(engine: str, failing: Path) -> None:
    handle, before = make(engine), open_files()
    with pytest.raises(AioError, match="Input/output error, at offset 262144 ") as caught:
        handle.sync_pread(torch.empty(failing_fs.SIZE, dtype=torch.uint8), failing / "eio")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(failing / "eio"))
    assert caught.value.offset <= failing_fs.BAD < caught.value.offset + (1 << 16)
    assert settled(descriptors, before) == before
    assert handle.sync_pread(torch.empty(100_000, dtype=torch.uint8), failing / "eio") == 1


@pytest.mark.parametrize(("name", "number"), [("eio", errno.EIO), ("full", errno.ENOSPC)])
def test_a_write_that_fails_cuts_the_file_off(engine: str, name: str, number: int, failing: Path) -> None:
    handle, file = make(engine), failing / name
    # What is behind the range is another's.
    with pytest.raises(AioError, match="the content of that range is undefined now") as caught:
        handle.sync_pwrite(ones(500_000), file, 200_000)
    assert (caught.value.errno, caught.value.filename) == (number, str(file))
    assert file.stat().st_size == failing_fs.SIZE
    with pytest.raises(AioError, match="the file was cut off where this write began"):
        handle.sync_pwrite(ones(failing_fs.SIZE), file, 200_000)
    assert file.stat().st_size == 200_000


def test_transfers_that_stop_short_are_continued(engine: str, failing: Path) -> None:
    handle, content = make(engine), failing_fs.content()
    target = torch.zeros(failing_fs.SIZE - 3, dtype=torch.uint8)
    handle.sync_pread(target, failing / "short", 3)
    assert target.numpy().tobytes() == content[3 : failing_fs.SIZE]
    handle.sync_pwrite(target, failing / "short", 0)
    handle.sync_pread(target, failing / "short", 0)
    assert target.numpy().tobytes() == content[3 : failing_fs.SIZE]


def test_a_file_that_ends_before_its_size_is_an_error(engine: str, failing: Path) -> None:
    with pytest.raises(AioError, match="the file ends at offset") as caught:
        make(engine).sync_pread(torch.zeros(failing_fs.SIZE, dtype=torch.uint8), failing / "shrunk")
    assert caught.value.errno == errno.ENODATA
    assert failing_fs.BAD <= caught.value.offset < failing_fs.SIZE


def test_direct_transfers_that_are_refused_go_through_the_page_cache(engine: str, failing: Path) -> None:
    handle, target = make(engine), torch.zeros(failing_fs.SIZE, dtype=torch.uint8)
    handle.sync_pread(target, failing / "refuses")
    assert target.numpy().tobytes() == failing_fs.content()[: failing_fs.SIZE]
    handle.sync_pwrite(target.flip(0), failing / "refuses")
    assert (failing / "refuses").read_bytes() == target.flip(0).numpy().tobytes()


@pytest.mark.parametrize("write", [False, True])
def test_a_handle_may_be_dropped_with_io_in_flight(
    engine: str, write: bool, failing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, done = open_files(), (failing / "slow").stat().st_mtime
    handle = make(engine, block=4096, depth=4, threads=1)
    tensor = ones(failing_fs.SIZE)
    (handle.async_pwrite if write else handle.async_pread)(tensor, failing / "slow")
    del tensor  # the kernel still uses the memory
    wait_for(lambda: (failing / "slow").stat().st_mtime > done, "a block is transferred")
    with caplog.at_level(logging.ERROR, "anyaccel.aio"):
        del handle
        gc.collect()
    assert (failing / "slow").stat().st_mtime - done < failing_fs.SIZE // 4096  # it has not waited for all of it
    assert "was dropped without wait()" in caplog.text and "slow" in caplog.text
    assert settled(descriptors, before) == before
    if write:
        assert (failing / "slow").stat().st_size == 0


def test_a_transfer_that_is_interrupted_is_given_up(engine: str, failing: Path) -> None:
    handle = make(engine, block=4096, depth=2, threads=1)
    target = torch.zeros(failing_fs.SIZE, dtype=torch.uint8)
    seen = []

    def interrupt(done: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        handle.transfer(failing / "slow", [MemoryRange.of(target, 0)], write=False, progress=interrupt)
    assert sorted(seen) == seen and seen[-1] < failing_fs.SIZE
    assert handle.wait() == 0
    handle.sync_pread(target, failing / "plain")


# A file that becomes shorter while it is read ---------------------------------------------------------------------


def test_a_file_that_shrinks_while_it_is_read(engine: str) -> None:
    size = 64 << 20
    handle = make(engine, block=4096, depth=2, threads=1)
    target = torch.zeros(size, dtype=torch.uint8)
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
        handle.async_pread(target, file.name)
        os.truncate(file.name, size - 5001)
        os.truncate(file.name, 5000)
        try:
            handle.wait()
        except AioError as error:
            assert error.errno == errno.ENODATA and 5000 <= error.offset < size
            assert f"the file ends at offset {error.offset}" in str(error)
        else:
            pytest.skip("the disk was faster")


# No space ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder, image = tmp_path / "small", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
    else:
        image.touch()
        os.truncate(image, 8 << 20)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        command = ["mount", "-o", "loop", image, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_new_file_that_finds_no_space_is_removed(engine: str, small: Path) -> None:
    handle, before = make(engine), open_files()
    for atomic in (False, True):
        with pytest.raises(AioError, match="No space left on device") as caught:
            handle.sync_pwrite(ones(9 << 20), small / "file", write_atomic=atomic)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small / "file"))
        assert [path.name for path in small.iterdir() if path.name != "lost+found"] == []
    assert settled(descriptors, before) == before
    handle.sync_pwrite(ones(1 << 20), small / "file")
    assert (small / "file").stat().st_size == 1 << 20


def test_an_old_file_that_finds_no_space_does_not_look_complete(engine: str, small: Path) -> None:
    handle = make(engine)
    old = ones(3 << 20) * 2
    handle.sync_pwrite(old, small / "file")
    with pytest.raises(AioError, match=r"the file (is as it was before|was cut off where this write began)"):
        handle.sync_pwrite(ones(8 << 20), small / "file", 1 << 20)
    left = (small / "file").read_bytes()
    assert left in (old.numpy().tobytes(), old[: 1 << 20].numpy().tobytes())
    handle.sync_pwrite(old, small / "file")
    with pytest.raises(AioError, match="the file is as it was before"):
        handle.sync_pwrite(ones(8 << 20), small / "file", write_atomic=True)
    assert (small / "file").read_bytes() == old.numpy().tobytes()


def test_a_write_behind_another_leaves_that_alone_when_it_fails(engine: str, small: Path) -> None:
    handle = make(engine)
    handle.async_pwrite(ones(10_000), small / "file")
    with pytest.raises(AioError, match="No space left"):  # at once, or when it is done
        handle.sync_pwrite(ones(9 << 20), small / "file", 20_000)
    handle.wait()
    assert (small / "file").read_bytes().rstrip(b"\0") == bytes(ones(10_000).numpy())


def test_a_file_above_the_size_limit_is_an_error(engine: str, tmp_path: Path) -> None:
    handle = make(engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(AioError) as caught:
            handle.sync_pwrite(ones(2 << 20), tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "file").exists()


# write_atomic ------------------------------------------------------------------------------------------------------


def test_an_atomic_write_replaces_the_file_and_keeps_mode_and_link(engine: str, tmp_path: Path) -> None:
    handle, file = make(engine), tmp_path / "file"
    file.write_bytes(b"the old content, which is longer than the new one" * 1000)
    file.chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with file.open("rb") as old:
        handle.sync_pwrite(ones(5000), tmp_path / "link", write_atomic=True)
        assert old.read(7) == b"the old"
    assert file.read_bytes() == b"\1" * 5000 and file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "link").is_symlink()
    handle.write(ones(0), file, True, write_atomic=True)
    assert file.read_bytes() == b""


def test_an_atomic_write_respects_the_umask_and_long_names(tmp_path: Path) -> None:
    handle, file = make(), tmp_path / ("n" * 255)
    before = os.umask(0o027)
    try:
        handle.async_pwrite(ones(100_000), file, write_atomic=True)
        assert not file.exists() or file.stat().st_size == 100_000
        handle.wait()
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640 and file.stat().st_size == 100_000


def test_an_atomic_write_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    handle = make("threads", block=4096, depth=1, threads=1)
    handle.async_pwrite(ones(256 << 20), tmp_path / "file", write_atomic=True)
    del handle
    gc.collect()
    left = list(tmp_path.iterdir())
    assert left == [] or (left == [tmp_path / "file"] and left[0].stat().st_size == 256 << 20)


def test_an_atomic_write_wants_a_whole_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="file_offset=5 must be 0"):
        make().sync_pwrite(ones(10), tmp_path / "file", 5, write_atomic=True)
    with (tmp_path / "file").open("wb") as file, pytest.raises(UsageError, match="the file given by its name"):
        make().async_pwrite(ones(10), file.fileno(), write_atomic=True)


# Leaks -------------------------------------------------------------------------------------------------------------


def test_handles_leave_no_threads_descriptors_or_memory(engine: str, tmp_path: Path) -> None:
    def status(field: str) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields[field].split()[0])

    def use() -> None:
        handle = make(engine)
        handle.sync_pwrite(ones(300_001), tmp_path / "file", 1)
        handle.async_pread(torch.empty(300_000, dtype=torch.uint8), tmp_path / "file")
        with pytest.raises(AioError):
            handle.sync_pread(ones(10), tmp_path / "missing")

    for _ in range(5):
        use()
    gc.collect()
    files, threads, size = open_files(), status("Threads"), status("VmSize")
    logging.getLogger("anyaccel.aio").setLevel(logging.CRITICAL)
    try:
        for _ in range(100):
            use()
    finally:
        logging.getLogger("anyaccel.aio").setLevel(logging.NOTSET)
    gc.collect()
    assert settled(lambda: (descriptors(), status("Threads")), (files, threads)) == (files, threads)
    assert status("VmSize") < size + (100 << 10)  # KiB; one handle's memory for transfers is 0.5 MiB


def test_memory_is_not_given_back_while_the_kernel_writes_to_it(failing: Path) -> None:
    handle = make("io_uring", block=4096, depth=8, threads=1)
    tensor = torch.zeros(100_000, dtype=torch.uint8)
    address = tensor.data_ptr()
    handle.async_pread(tensor, failing / "slow")
    del tensor
    gc.collect()
    assert [request.pieces[0].address for request in handle._requests._known.values()] == [address]
    handle.wait()
    assert ctypes.string_at(address, 0) == b"" and not handle._requests._known
