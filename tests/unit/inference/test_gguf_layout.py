# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tensors lie one after another, and each of them is a part of the model: else it is refused."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuzz_models
from anyaccel.cli.generate import default_model_file
from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.gguf_file import GgufFile, GgufSource
from anyaccel.inference.runtimes.gguf_types import GGML_TYPES

gguf = pytest.importorskip("gguf")


def with_offset(file: fuzz_models.Gguf, name: str, changed: Callable[[int], int]) -> tuple[bytes, int, int]:
    """The file with another offset of one tensor's data; that offset, and the right one."""
    content = bytearray(file.content())
    at = content.index(fuzz_models.encoded(fuzz_models.TEXT, name)) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", content, at)[0] + 4
    right = struct.unpack_from("<Q", content, at)[0]
    wrong = changed(right) % (1 << 64)
    struct.pack_into("<Q", content, at, wrong)
    return bytes(content), wrong, right


MOVED: dict[str, Callable[[int], int]] = {
    "overlapping": lambda at: at - 32,
    "the first one's": lambda at: 0,
    "a gap": lambda at: at + 32,
    "unaligned": lambda at: at + 1,
    "in the padding": lambda at: at + 4,
    "beyond the file": lambda at: 1 << 62,
    "around": lambda at: -32,
}


@pytest.mark.parametrize("how", MOVED)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_data_that_begin_elsewhere_are_refused(kind: str, how: str, tmp_path: Path) -> None:
    """Another tensor's bytes were read, without a word."""
    healthy = fuzz_models.healthy_gguf(kind)
    path = tmp_path / "model.gguf"
    for name in list(healthy.tensors)[1:]:
        content, wrong, right = with_offset(healthy, name, MOVED[how])
        path.write_bytes(content)
        with pytest.raises(ModelError) as error:
            GgufFile(path)
        wanted = f"{path}: tensor {name!r}: damaged: its data begin at offset {wrong}, not at {right}"
        assert str(error.value) == wanted


def test_a_gap_before_all_tensors_is_refused(tmp_path: Path) -> None:
    healthy = fuzz_models.healthy_gguf("llama")
    first = next(iter(healthy.tensors))
    (tmp_path / "model.gguf").write_bytes(with_offset(healthy, first, lambda at: 32)[0])
    with pytest.raises(ModelError, match=f"'{re.escape(first)}': damaged: its data begin at offset 32, not at 0"):
        GgufFile(tmp_path / "model.gguf")


def test_tensors_in_another_order_are_refused(tmp_path: Path) -> None:
    """Two that have exchanged their data are each other, though none overlaps and no byte is left out."""
    healthy = fuzz_models.healthy_gguf("llama")
    keys, values = "blk.0.attn_k.weight", "blk.0.attn_v.weight"
    both = [with_offset(healthy, name, lambda at: at)[2] for name in (keys, values)]
    content = bytearray(with_offset(healthy, keys, lambda at: both[1])[0])
    at = content.index(fuzz_models.encoded(fuzz_models.TEXT, values)) + 8 + len(values) + 4 + 16 + 4
    struct.pack_into("<Q", content, at, both[0])
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=f"'{keys}': damaged: its data begin at offset {both[1]}, not at {both[0]}"):
        GgufFile(tmp_path / "model.gguf")


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_files_of_the_writer_are_read_whatever_their_types(alignment: int, tmp_path: Path) -> None:
    """Sizes that are no multiples of the alignment, one after another."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(alignment)
    wanted = {}
    for number, (name, values, size) in GGML_TYPES.items():
        data = np.full((3, 512 // values * size), number, np.uint8)
        dtype = {"f32": np.float32, "f16": np.float16, "f64": np.float64}.get(name)
        if dtype is not None:
            writer.add_tensor(name, data.view(dtype))
        else:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(number))
        writer.add_tensor(f"{name} after", np.full(number + 1, 7.0, np.float32))
        wanted[name] = data.tobytes()
    write(writer)
    file = GgufFile(tmp_path / "model.gguf")
    for name, data in wanted.items():
        info = file.infos[name]
        assert bytes(file.file.bytes(info.begin, info.end - info.begin)) == data
        after = f"{name} after"
        assert set(file.floats(after, file.infos[after].shape)) == {7.0}


def test_files_that_the_writer_has_split_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"tensor {number}", np.full((number + 1, 3), number, np.float32))
    write(writer)
    source = GgufSource(tmp_path / "model-00002-of-00003.gguf")
    assert len(source.files) == 3
    for number in range(5):
        name = f"tensor {number}"
        assert set(source.file_of(name).floats(name, (number + 1, 3))) == {float(number)}


def test_a_real_file_is_read() -> None:
    assert len(GgufFile(default_model_file()).infos) > 200
