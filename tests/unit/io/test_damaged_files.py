# SPDX-License-Identifier: Apache-2.0
"""Files that are no safetensors files: each is one clear error, where the safetensors package refuses them too."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from anyaccel.errors import AioError, ModelError, UsageError
from anyaccel.inference.checkpoints.gguf_file import GgufFile
from anyaccel.io import load, save
from anyaccel.ops.aio import aio_handle

WHOLE = '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'


def raw(header: str | bytes, data: int = 8, length: int | None = None) -> bytes:
    """A file with this header and so many bytes of tensors."""
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def one(shape: str = "[8]", offsets: str = "[0,8]", dtype: str = '"U8"', name: str = '"a"', more: str = "") -> str:
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


def two(first: tuple[int, int], second: tuple[int, int]) -> str:
    return json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in (("a", first), ("b", second))
        }
    )


def described(metadata: str) -> str:
    return f'{{"__metadata__":{metadata},{WHOLE[1:]}'


FILES = {
    "whole": raw(WHOLE),
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "no header, but data": bytes(16),
    "length of all ones": b"\xff" * 8 + b"{}",
    "length 2**63": (1 << 63).to_bytes(8, "little") + b"{}",
    "length above 100 MB": raw("{}", 0, 100_000_001),
    "length above the file": raw("{}", 0, 100),
    "length one too few": raw(WHOLE, length=len(WHOLE) - 1),
    "length one too many": raw(WHOLE, length=len(WHOLE) + 1),
    "nothing in it": raw("{}", 0),
    "nothing in it, but data": raw("{}"),
    "only spaces": raw("   ", 0),
    "null": raw("null", 0),
    "list": raw("[]", 0),
    "text": raw('"a"', 0),
    "number": raw("3", 0),
    "spaces behind it": raw(WHOLE + " \n\t"),
    "zeros behind it": raw(WHOLE + "\0\0"),
    "letters behind it": raw(WHOLE + "x"),
    "two objects": raw(WHOLE + "{}"),
    "unterminated": raw(WHOLE[:-1]),
    "comma at the end": raw(WHOLE[:-1] + ",}"),
    "single quotes": raw(WHOLE.replace('"', "'")),
    "byte order mark": raw(b"\xef\xbb\xbf" + WHOLE.encode()),
    "UTF-16": raw(WHOLE.encode("utf-16")),
    "bad UTF-8": raw(one(name='"a?"').encode().replace(b"?", b"\xff")),
    "overlong UTF-8": raw(one(name='"a?"').encode().replace(b"?", b"\xc0\xaf")),
    "surrogate in UTF-8": raw(one(name='"a?"').encode().replace(b"?", b"\xed\xa0\x80")),
    "half a character": raw(one(name='"\\ud800"')),
    "escaped pair": raw(one(name='"\\ud83d\\ude00"')),
    "control character": raw(one(name='"a\x01"')),
    "empty name": raw(one(name='""')),
    "field twice": raw(one(more=',"dtype":"U8"')),
    "unknown field": raw(one(more=',"x":1')),
    "metadata null": raw(described("null")),
    "metadata empty": raw(described("{}")),
    "metadata list": raw(described("[]")),
    "metadata false": raw(described("false")),
    "metadata 0": raw(described("0")),
    "metadata text": raw(described('""')),
    "metadata numbers": raw(described('{"x":1}')),
    "metadata nested": raw(described('{"x":{}}')),
    "metadata twice": raw(described("{}").replace("{}", '{},"__metadata__":{}')),
    "no dtype": raw(WHOLE.replace('"dtype":"U8",', "")),
    "no shape": raw(WHOLE.replace('"shape":[8],', "")),
    "no offsets": raw(WHOLE.replace(',"data_offsets":[0,8]', "")),
    "dtype in small letters": raw(one(dtype='"u8"')),
    "dtype null": raw(one(dtype="null")),
    "dtype list": raw(one(dtype="[]")),
    "shape null": raw(one("null")),
    "shape text": raw(one('"8"')),
    "shape negative": raw(one("[-8]")),
    "shape twice negative": raw(one("[-2,-4]")),
    "shape with a fraction": raw(one("[8.0]")),
    "shape NaN": raw(one("[NaN]")),
    "shape true": raw(one("[true]", "[0,1]"), 1),
    "shape 2**64": raw(one("[18446744073709551616]")),
    "shape of 5000 digits": raw(one(f"[{'1' * 5000}]")),
    "shape that overflows to 8": raw(one("[4611686018427387906,4]")),
    "shape that overflows to 0": raw(one("[4294967296,4294967296]", "[0,0]"), 0),
    "empty shape that overflows": raw(one("[4294967296,4294967296,0]", "[0,0]"), 0),
    "bytes that overflow": raw(one("[2305843009213693953]", dtype='"F64"')),
    "shape with a zero in front": raw(one("[08]")),
    "one offset": raw(one(offsets="[0]")),
    "three offsets": raw(one(offsets="[0,4,8]")),
    "offsets negative": raw(one(offsets="[-8,0]")),
    "offset of minus zero": raw(one(offsets="[-0,8]")),
    "size of minus zero": raw(one(shape="[-0]", offsets="[0,0]"), 0),
    "minus zero in a name": raw(one(name='"a-0"')),
    "offsets reversed": raw(one(offsets="[8,0]")),
    "offsets with a fraction": raw(one(offsets="[0.0,8.0]")),
    "offsets near 2**64": raw(one(offsets="[18446744073709551607,18446744073709551615]")),
    "offsets past the end": raw(one("[16]", "[0,16]")),
    "gap in front": raw(one("[4]", "[4,8]")),
    "data left over": raw(one("[4]", "[0,4]")),
    "overlap": raw(two((0, 8), (4, 8))),
    "the same bytes": raw(two((0, 8), (0, 8))),
    "gap between": raw(two((0, 2), (4, 8))),
    "in another order": raw(two((4, 8), (0, 4))),
    "empty one in front": raw(two((0, 8), (0, 0))),
    "empty one behind": raw(two((0, 8), (8, 8))),
    "empty one within": raw(two((0, 8), (4, 4))),
    "empty one far off": raw(two((0, 8), (99, 99))),
    "entry null": raw('{"a":null}'),
    "nested 100,000 deep": raw("[" * 100_000),
    "cut off": raw(WHOLE, 7),
    "one byte too many": raw(WHOLE, 9),
    "halves of pairs": raw(one("[3]", "[0,2]", '"F4"'), 2),
    "six bits, for which torch has nothing": raw(one("[4]", "[0,3]", '"F6_E2M3"'), 3),
    "six bits that end within a byte": raw(one("[3]", "[0,3]", '"F6_E3M2"'), 3),
}


@pytest.mark.parametrize("name", FILES)
def test_what_safetensors_refuses_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(FILES[name])
    try:
        theirs = load_file(file)
    except (SafetensorError, OSError, ValueError, OverflowError):
        theirs = None
    for mmap in (True, False):
        if theirs is None:
            with pytest.raises(ModelError, match="m: "):
                load(file, mmap=mmap)
            with pytest.raises(ModelError, match="m: "):
                load(file, tensors={"a": torch.zeros(8, dtype=torch.uint8)})
        else:
            assert load(file, mmap=mmap).keys() == theirs.keys()


@pytest.mark.parametrize(
    "header",
    [one("[0,4294967296,4294967296]", "[0,0]"), one("[9223372036854775807,0]", "[0,0]"), '{"a":["U8",[0],[0,0]]}',
     f'{{{WHOLE[1:-1]},{WHOLE[1:]}', described('{"x":"1","x":"2"}')],
)  # fmt: skip
def test_what_safetensors_lets_pass_and_nobody_can_mean_is_refused(header: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(raw(header, 8 if WHOLE[1:-1] in header else 0))
    with pytest.raises(ModelError, match="m: "):
        load(tmp_path / "m")


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_tensors_beside_those_that_torch_does_not_have(dtype: str, tmp_path: Path) -> None:
    header = json.dumps(
        {
            "six": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, 6]},
            "bytes": {"dtype": "U8", "shape": [8], "data_offsets": [6, 14]},
        }
    )
    (tmp_path / "m").write_bytes(raw(header, 14))
    with safe_open(tmp_path / "m", "pt") as file:
        assert set(file.keys()) == {"six", "bytes"}
    found = load(tmp_path / "m", tensors={"bytes": torch.ones(8, dtype=torch.uint8)})
    assert found["bytes"].sum() == 0
    for options in ({}, {"mmap": False}, {"tensors": {"six": torch.ones(2, 4)}}):
        with pytest.raises(ModelError, match=f"'six' is {dtype}, which torch does not have"):
            load(tmp_path / "m", **options)


def test_a_header_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.safetensors.header.MAX_HEADER", 1000)
    save({"a": torch.ones(3)}, tmp_path / "m", metadata={"k": "v" * 500})
    with pytest.raises(ModelError, match=r"the header would have \d+ bytes, above 1000"):
        save({"a": torch.zeros(3)}, tmp_path / "m", metadata={"k": "v" * 1000})
    assert load(tmp_path / "m")["a"].sum() == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ('{"a": 1}', "not an object"),
        ('{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}', "'F33' is unknown"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "not a list of sizes"),
        ('{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "not a list of sizes"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "not two offsets"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "do not fit shape"),
        ('{"a": {"dtype": "F32", "shape": [9999999999, 9999999999], "data_offsets": [0, 4]}}', "larger than memory"),
        (json.dumps({"a": {"dtype": "F32", "shape": [1 << 61] * 60, "data_offsets": [0, 4]}}), "larger than memory"),
        ('{"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}', "begins at byte"),
        ('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "U8", "shape": [2],'
         ' "data_offsets": [2, 4]}}', "begins at byte"),
        ('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a": {"dtype": "U8", "shape": [2],'
         ' "data_offsets": [2, 4]}}', "twice"),
        ('{"__metadata__": {"a": 1}}', "not a map of text"),
    ],
)  # fmt: skip
def test_damaged_headers_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(raw(text, 4))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "m")


def test_files_on_a_big_endian_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values would come out wrong: an error instead, also for GGUF."""
    path = tmp_path / "one.safetensors"
    path.write_bytes(raw(WHOLE))
    (tmp_path / "one.gguf").write_bytes(b"GGUF" + bytes(20))
    load(path)
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(ModelError, match=r"safetensors: its values are little-endian, and this machine \(big-endian\)"):
        load(path)
    with pytest.raises(ModelError, match=r"one\.gguf: its values are little-endian"):
        GgufFile(tmp_path / "one.gguf")


def test_a_header_length_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="this is no safetensors file"):
        load(tmp_path / "m")


@given(st.data())
@settings(max_examples=100)
def test_a_changed_header_is_refused_or_read_within_the_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "m"
        save({"a": torch.arange(50, dtype=torch.int32), "b": torch.ones(7)}, file, metadata={"x": "y"})
        whole = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 229))
        whole[at] = data.draw(st.integers(0, 255))
        file.write_bytes(whole)
        try:
            found = load(file, mmap=data.draw(st.booleans()))
        except ModelError:
            return
        assert sum(tensor.nbytes for tensor in found.values()) == 228


# What is no file --------------------------------------------------------------------------------------------------


def device(path: Path) -> Path:
    """A character device like /dev/full, which only root can make, and not on every file system."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(("make", "kind"), [(fifo, "a FIFO"), (device, "a character device")])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_neither_replaced_nor_waited_for(make, kind: str, linked: bool, tmp_path: Path) -> None:
    there = make(tmp_path / "there")
    before = there.lstat()
    name = there
    if linked:
        name = tmp_path / "link"
        name.symlink_to(there)
    with pytest.raises(UsageError, match=f"there is {kind}: only a regular file can be replaced"):
        save({"a": torch.ones(3)}, name)
    with pytest.raises(UsageError, match=kind):
        aio_handle().sync_pwrite(torch.ones(3), name, write_atomic=True)
    with pytest.raises(ModelError, match=f"is {kind}, not a safetensors file"):
        load(name)
    for call in (aio_handle().sync_pwrite, aio_handle().sync_pread):
        with pytest.raises(AioError):
            call(torch.ones(3), name)
    assert (there.lstat().st_mode, there.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert {path.name for path in tmp_path.iterdir()} == {"there", name.name}


def test_the_ends_of_a_pipe_are_refused_and_not_waited_for() -> None:
    read, write = os.pipe()
    try:
        for call, end in ((aio_handle().sync_pread, read), (aio_handle().sync_pwrite, write)):
            with pytest.raises(AioError, match=f"descriptor {end}"):
                call(torch.ones(3), end)
    finally:
        os.close(read)
        os.close(write)


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for value in (1.0, 2.0):
        save({"a": torch.full((3,), value)}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "file")["a"].tolist() == [value] * 3
