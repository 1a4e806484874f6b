# SPDX-License-Identifier: Apache-2.0
"""Every type of GGUF runs in a form that holds its values: a bound for each, through the real packing and kernels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyaccel import _llm
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufFile
from anyaccel.inference.checkpoints.gguf_types import HELD, UNREAD
from anyaccel.inference.native import packed_cache
from anyaccel.inference.native.formats import Format, Precision, choose, stored_format
from anyaccel.inference.native.packing import _converted, _pack, _Tensor, with_own_scales
from anyaccel.inference.spec.decoder import MatrixShape
from anyaccel.inference.spec.mapping import Unsupported
from gguf_cases import random_blocks

gguf = pytest.importorskip("gguf")

ROWS, COLS = 48, 768
EXACT = 2e-7  # products in float32
HALVES = 4e-4  # scales and minima rounded to halves; bfloat16 has 1.7e-3
BF16 = 3e-3
MINIMA = 8e-4  # the same, of values around zero that are counted from their minimum

# Of these, whole blocks are kept bit by bit.
SUPERBLOCKS = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
# Type -> the form that it runs in, most error of its values (root mean square, relative to that of the values) where
# blocks are divided.
FORMS: dict[str, tuple[Format, float]] = {
    "F64": (("f32", 0, False), EXACT),
    "F32": (("f32", 0, False), EXACT),
    "F16": (("f16", 0, False), EXACT),
    "BF16": (("bf16", 0, False), EXACT),
    "Q4_0": (("i4", 32, False), EXACT),
    "Q4_1": (("i4", 32, True), EXACT),
    "Q5_0": (("i5", 32, False), EXACT),
    "Q5_1": (("i5", 32, True), EXACT),
    "Q8_0": (("i8", 32, False), EXACT),
    "Q2_K": (("i2", 16, True), HALVES),
    "Q3_K": (("i3", 16, False), HALVES),
    "Q4_K": (("i4", 32, True), HALVES),
    "Q5_K": (("i5", 32, True), HALVES),
    "Q6_K": (("i6", 16, False), HALVES),
    "IQ1_S": (("i4", 32, True), MINIMA),
    "IQ1_M": (("i8", 16, False), HALVES),
    "IQ2_XXS": (("i8", 32, False), HALVES),
    "IQ2_XS": (("i8", 16, False), HALVES),
    "IQ2_S": (("i8", 16, False), HALVES),
    "IQ3_XXS": (("i8", 32, False), HALVES),
    "IQ3_S": (("i4", 32, True), MINIMA),
    "IQ4_NL": (("nl4", 32, False), EXACT),
    "IQ4_XS": (("nl4", 32, False), HALVES),
    "TQ1_0": (("i4", 128, False), EXACT),
    "TQ2_0": (("i4", 128, False), EXACT),
    "MXFP4": (("fp4", 32, False), EXACT),
}


def dequantised(kind: str, data: Any) -> Any:
    if kind == "F64":
        return data.view(np.float64)
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float64)


def write(path: Path, tensors: dict[str, tuple[str, Any]]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, data) in tensors.items():
        if kind in ("F64", "F32", "F16"):
            data = data.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[kind])
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


class OneMatrix:
    """A `_llm.Model` of one matrix, for packing."""

    def __init__(self, shape: MatrixShape) -> None:
        self.shape = shape
        self.linear = _llm.Linear(shape.rows, shape.cols, shape.format, shape.group, shape.minimum, shape.scales)

    def set_rows(self, name: str, first: int, count: int, address: int, kind: str, *more: Any) -> None:
        row_stride, col_stride, order = (*more, None)[:3]
        assert order is None
        self.linear.set_rows(first, count, address, kind, row_stride, col_stride)

    def set_quantised_rows(self, name: str, *more: int) -> None:
        self.linear.set_quantised_rows(*more)

    def values(self) -> Any:
        numbers = np.arange(self.shape.rows, dtype=np.int64)
        found = np.empty((self.shape.rows, self.shape.cols), np.float32)
        self.linear.copy_rows(numbers.ctypes.data, len(numbers), found.ctypes.data, "f32")
        return found.astype(np.float64)

    def product(self, x: Any) -> Any:
        y = np.empty((len(x), self.shape.rows), np.float32)
        self.linear.multiply(x.ctypes.data, y.ctypes.data, len(x), "f32")
        return y.astype(np.float64)


def packed(tensors: list[Any], cols: range = range(COLS)) -> OneMatrix:
    """One matrix of the rows of all tensors, in the form that `--dtype auto` gives it."""
    rows = sum(tensor.shape[0] for tensor in tensors)
    shape = choose(MatrixShape("w", rows, len(cols)), Precision(None), [stored_format(each, cols) for each in tensors])
    parts = [_Tensor("w", each, range(each.shape[0]), each.shape[1], 0.0, 1.0) for each in tensors]
    shape, parts = with_own_scales(shape, parts, cols)
    matrix, at = OneMatrix(shape), 0
    for part in parts:
        _pack(matrix, shape, at, part, part.rows, cols, _converted(shape, part, part.rows, cols))  # type: ignore[arg-type]
        at += len(part.rows)
    return matrix


def error(got: Any, wanted: Any) -> float:
    return float(np.sqrt(((got - wanted) ** 2).sum() / (wanted**2).sum()))


def as_bytes(x: Any) -> Any:
    """Activations as quantised products see them: 8 bits with a scale for each 32."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    return (np.rint(groups * (np.float32(127) / most)) * (most / np.float32(127))).reshape(x.shape).astype(np.float64)


def test_every_type_is_held_or_refused_by_name(tmp_path: Path) -> None:
    """A new version of the format must not bring a type that nobody has thought about."""
    known = {each.name for each in gguf.GGMLQuantizationType}
    assert known <= set(FORMS) | {name.upper() for name in UNREAD.values()}
    for kind in ("Q8_K", "NVFP4"):
        values, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = np.zeros((2, COLS // values * length), np.uint8)
        with pytest.raises(Unsupported, match=f"tensor type {kind.lower()} of GGUF"):
            write(tmp_path / f"{kind}.gguf", {"w": (kind, data)})


def test_a_type_or_version_that_nobody_knows_is_damage(tmp_path: Path) -> None:
    """Of which transformers need not be asked."""
    file = tmp_path / "m.gguf"
    write(file, {"w": ("F32", np.zeros((2, COLS), np.float32))})
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + (1 << 28).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match="GGUF of version 268435456, and 2 and 3 are known"):
        GgufFile(file)
    at = whole.index(b"w", whole.index(b"w" + (2).to_bytes(4, "little"))) + 1 + 4 + 2 * 8
    file.write_bytes(whole[:at] + (1 << 28).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ModelError, match="tensor 'w': of type 268435456, which is not known"):
        GgufFile(file)


@pytest.mark.parametrize("kind", FORMS)
def test_values_and_products_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    form, most = FORMS[kind]
    data = random_blocks(kind, ROWS, COLS)
    wanted = dequantised(kind, data)
    file = write(tmp_path / "m.gguf", {"w": (kind, data)})  # whose memory tensors are
    tensor = file.tensor("w")
    matrix = packed([tensor])
    shape = matrix.shape
    assert (shape.format, shape.group, shape.minimum) == form
    assert shape.scales == ("superblocks" if kind in SUPERBLOCKS else "powers" if kind == "MXFP4" else "halves")
    most = EXACT if shape.scales != "halves" else most
    found = matrix.values()
    assert error(found, wanted) < most
    assert np.abs(found - wanted).max() < 1.5 * most * np.abs(wanted).max()
    rng = np.random.default_rng(1)
    for tokens in (1, 5, 40):  # one vector, a few, and the kernels of prompts
        x = rng.normal(0, 1, (tokens, COLS)).astype(np.float32)
        if kind == "BF16":  # which some instruction sets round activations to
            x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        exact = x.astype(np.float64) @ wanted.T
        rounded = as_bytes(x) @ wanted.T
        # Quantised weights may be multiplied with rounded activations, or with floats or pairs of bfloat16.
        got = matrix.product(x)
        assert min(error(got, exact), error(got, rounded)) < max(most, 5e-6) * 1.5 or tokens == 40
        assert error(got, exact) < 0.015


@pytest.mark.parametrize("kind", sorted(each.upper() for each in HELD))
def test_a_rank_has_its_columns(kind: str, tmp_path: Path) -> None:
    """Columns that begin inside a block, inside a group, and where no group does."""
    data = random_blocks(kind, ROWS, COLS)
    wanted = dequantised(kind, data)
    file = write(tmp_path / "m.gguf", {"w": (kind, data)})  # whose memory tensors are
    tensor = file.tensor("w")
    superblock = EXACT if kind in SUPERBLOCKS else MINIMA
    for cols, most in (
        (range(256, 768), superblock),
        (range(64, 400), MINIMA),
        (range(48, 768), MINIMA),
        (range(7, 300), BF16),
    ):
        matrix = packed([tensor], cols)
        assert error(matrix.values(), wanted[:, cols.start : cols.stop]) < most
        assert (matrix.shape.format == "bf16") == (cols.start == 7)


def test_a_matrix_of_several_types_holds_them_all(tmp_path: Path) -> None:
    """As queries, keys and values are: llama.cpp's mixes give them types of their own."""
    data = {kind: random_blocks(kind, 16, 256, number) for number, kind in enumerate(FORMS)}
    file = write(tmp_path / "m.gguf", {kind: (kind, each) for kind, each in data.items()})
    wanted = {kind: dequantised(kind, each) for kind, each in data.items()}
    tensors = {kind: file.tensor(kind) for kind in FORMS}
    for kinds in itertools.permutations(FORMS, 2):
        matrix = packed([tensors[kind] for kind in kinds], range(256))
        found = matrix.values()
        for number, kind in enumerate(kinds):
            form, most = FORMS[kind]
            if matrix.shape.format != form[0] and matrix.shape.format in ("bf16", "f16"):
                most = BF16
            assert error(found[16 * number : 16 * number + 16], wanted[kind]) < max(most, EXACT), (kinds, kind)


@pytest.mark.parametrize("kind", sorted(kind.upper() for kind, held in HELD.items() if held.fractions))
def test_scales_that_no_half_can_be(kind: str, tmp_path: Path) -> None:
    """A matrix of tiny values would become zeros."""
    size = 2.0**-40 if kind == "MXFP4" else 2.0**-20
    data = random_blocks(kind, ROWS, COLS, size=size)
    wanted = dequantised(kind, data)
    file = write(tmp_path / "m.gguf", {"w": (kind, data)})  # whose memory tensors are
    tensor = file.tensor("w")
    matrix = packed([tensor])
    assert matrix.shape.format == "bf16"
    assert error(matrix.values(), wanted) < BF16


def test_packed_weights_of_other_forms_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")

    def entry() -> packed_cache.PackedModel:
        return packed_cache.PackedModel(source, {})

    with monkeypatch.context() as before:
        lossy = {**HELD, "q6_k": type(HELD["q6_k"])(("i8", 32, False), HELD["q6_k"].levels)}
        before.setattr(packed_cache, "HELD", lossy)
        old = entry()
        with old.locked():
            old.save({}, 3, lambda descriptor: 0)
        old.weights.write_bytes(b"abc")
        assert old.load() is not None
    assert entry().folder != old.folder
    assert entry().load() is None
    with entry().locked():
        entry().save({}, 0, lambda descriptor: 0)
    assert not old.folder.exists()  # and gone once something newer is kept
