# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tensors lie one after another, and each of them is a part of the model: else it is refused."""

from __future__ import annotations

import copy
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuzz_models
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufFile, GgufSource
from anyaccel.inference.checkpoints.gguf_types import GGML_TYPES
from anyaccel.inference.checkpoints.gguf_unused import check_all_used
from anyaccel.inference.checkpoints.model_path import default_model_file
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.spec.mapping import Unsupported

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


# What a model does not use.


def read(file: fuzz_models.Gguf, path: Path) -> Plan:
    path.write_bytes(file.content())
    return Plan(read_checkpoint(path), Precision(None), 0, 1)


def relabelled(file: fuzz_models.Gguf, kind: str) -> fuzz_models.Gguf:
    """The file as if it were of another architecture."""
    pairs = {key.replace(f"{file.kind}.", f"{kind}."): value for key, value in file.pairs.items()}
    file.pairs = pairs | {"general.architecture": (fuzz_models.TEXT, kind)}
    file.kind = kind
    return file


def dense_qwen3() -> fuzz_models.Gguf:
    """Also what a llama file has, with norms of queries and keys besides."""
    file = relabelled(fuzz_models.healthy_gguf("llama"), "qwen3")
    for layer in range(fuzz_models.LAYERS):
        for part in ("q", "k"):
            file.tensor(f"blk.{layer}.attn_{part}_norm", fuzz_models.HEAD_DIM)
    return file


@pytest.mark.parametrize("kind", fuzz_models.KINDS)
def test_a_layer_that_the_count_leaves_out_is_refused(kind: str, tmp_path: Path) -> None:
    file = fuzz_models.healthy_gguf(kind)
    file.add(block_count=fuzz_models.LAYERS - 1)
    with pytest.raises(ModelError) as error:
        read(file, tmp_path / "model.gguf")
    assert not isinstance(error.value, Unsupported)  # transformers would leave it out, too
    said = str(error.value)
    assert f"{tmp_path / 'model.gguf'}: tensor 'blk.1." in said
    assert f"architecture '{kind}' with block_count=1" in said
    assert "others" in said
    assert "\n" not in said


def test_another_architectures_tensors_are_refused(tmp_path: Path) -> None:
    read(dense_qwen3(), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q_norm\.weight' is no part of .* 'llama' .* 3 others"):
        read(relabelled(dense_qwen3(), "llama"), tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", fuzz_models.KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_sinks.weight",
        "blk.1.attn_sub_norm.weight",
        "blk.1.ffn_norm.scale",
        "blk.1.attn_v.bias",
        "blk.2.attn_q.weight",
        "blk.0.attn_rot_embd.weight",
        "output.bias",
        "token_embd_norm.weight",
        "rope_factors_other.weight",
        "foo",
        "view.weight",
    ],
)
def test_a_tensor_that_nothing_reads_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    file = fuzz_models.healthy_gguf(kind)
    file.tensors[name] = (0, [4], struct.pack("<4f", 5, 5, 5, 5))
    with pytest.raises(ModelError, match=f"tensor '{re.escape(name)}' is no part of a model of architecture '{kind}'"):
        read(file, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "name", ["v.blk.0.attn_q.weight", "mm.0.weight", "mm.input_projection.weight", "a.conv1d.weight"]
)
def test_encoders_beside_a_text_model_are_left_out(name: str, tmp_path: Path) -> None:
    file = fuzz_models.healthy_gguf("gemma3")
    file.tensors[name] = (0, [4], bytes(16))
    read(file, tmp_path / "model.gguf")


def test_layers_that_only_guess_are_left_out(tmp_path: Path) -> None:
    """They are the last of the layers that are counted, so that a model of the architecture reads those before them."""
    file = fuzz_models.healthy_gguf("llama")
    path = tmp_path / "model.gguf"

    def check(left: str) -> None:
        path.write_bytes(file.content())
        source = GgufSource(path)
        check_all_used(source, [name for name in source.names() if not name.startswith(left)])

    with pytest.raises(ModelError, match=r"'blk\.1\."):
        check("blk.1.")
    file.add(nextn_predict_layers=1)
    check("blk.1.")
    with pytest.raises(ModelError, match=r"'blk\.0\."):
        check("blk.0.")


def test_divisors_of_frequencies_are_used_or_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for value, refused in ((1.0, False), (2.0, True)):
        file = fuzz_models.healthy_gguf("llama")
        file.tensor("rope_freqs", fuzz_models.HEAD_DIM // 2, value=value)
        path.write_bytes(file.content())
        source = GgufSource(path)
        used = [name for name in source.names() if name != "rope_freqs.weight"]
        if refused:
            with pytest.raises(ModelError, match=r"'rope_freqs\.weight' is no part"):
                check_all_used(source, used)
        else:
            check_all_used(source, used)


def test_what_transformers_passes_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of tensors that it does not know, and makes up weights that it does not find."""
    from anyaccel.inference.generic.gguf_conversion import converted

    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"

    def convert(file: fuzz_models.Gguf) -> Path:
        path.write_bytes(file.content())
        return converted(path)

    healthy = fuzz_models.healthy_gguf("llama")
    healthy.add(attention__head_count=fuzz_models.HEADS, vocab_size=len(fuzz_models.TOKENS))
    assert (convert(healthy) / "model.safetensors").is_file()

    fewer = copy.deepcopy(healthy)
    fewer.add(block_count=1)
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.attn_norm\.weight' is no part of .* block_count=1"):
        convert(fewer)
    more = copy.deepcopy(healthy)
    more.tensor("blk.0.attn_sinks", fuzz_models.HEADS)
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.attn_sinks\.weight' is no part of"):
        convert(more)
    lacking = copy.deepcopy(healthy)
    del lacking.tensors["blk.1.attn_k.weight"]
    with pytest.raises(
        ModelError, match=r"model\.gguf: the file lacks 1 weights .*'model\.layers\.1\.self_attn\.k_proj"
    ):
        convert(lacking)


def test_quantising_a_file_loses_nothing(tmp_path: Path) -> None:
    from anyaccel.inference.quantize import quantize

    path = tmp_path / "model.gguf"
    healthy = fuzz_models.healthy_gguf("llama")
    path.write_bytes(healthy.content())
    quantize(path, tmp_path / "whole", dtype="int8")
    healthy.tensor("blk.0.attn_sinks", fuzz_models.HEADS)
    path.write_bytes(healthy.content())
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_sinks\.weight' is no part"):
        quantize(path, tmp_path / "less", dtype="int8")
    assert not (tmp_path / "less").exists()
