# SPDX-License-Identifier: Apache-2.0
"""A calibrated copy of a GGUF file: the same metadata and tensors, the matrices in the K types (llama.cpp reads it)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.calibration.compensation import nearest
from anyaccel.inference.calibration.gguf_grids import GRIDS, SMALL, packed
from anyaccel.inference.calibration.grids import Grid
from anyaccel.inference.calibration.layers import Progress
from anyaccel.inference.calibration.mixed import Outside
from anyaccel.inference.calibration.session import Calibration
from anyaccel.inference.calibration.summary import QuantisedMatrix, Summary
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES
from anyaccel.inference.checkpoints.new_folder import check_room, new_file
from anyaccel.inference.checkpoints.stored_values import floats_of, relative_error

_MENU = ("q4_k", "q5_k", "q6_k", "q8_0")
_SMALL_MENU = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # where columns are no multiple of 256
_PLAIN = ("f32", "f16", "bf16", "f64", "q8_0")  # types that have lost nothing, or next to nothing
_ALIGNMENT = 32  # of each tensor: at most so many bytes before it
_ROWS = 1024  # of an embedding that are rounded at a time
_QUANTISATION_VERSION = 2  # of llama.cpp's types
_FILE_TYPE = 15  # "mostly Q4_K - medium": the name that tools show
# What the copy says itself; its tensors are aligned to 32 bytes, as readers expect of a file that does not say.
_OWN_KEYS = (
    *("GGUF.", "split.", "general.architecture", "general.file_type", "general.quantization_version"),
    "general.alignment",
)


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the new file: `type` and the name by which it is calibrated; copied: its bytes as they are.

    copied with a name: a norm, whose values may be divided.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    calibrated: str | None = None
    copied: bool = False

    @property
    def bytes(self) -> int:
        values, size = BLOCK_BYTES[self.type]
        return int(numpy.prod(self.shape)) // values * size


class GgufCopy:
    """What a copy consists of.

    Attributes: bytes_before, bytes_after: of all tensors. matrices, errors: of what is written, the squared sums.

    Raises:
        ModelError: its weights are quantised already.
    """

    def __init__(
        self, path: Path, source: Any, calibration: Calibration, bits: float | None, size: int | None = None
    ) -> None:
        self._path = path
        self._names = source
        self._file = GgufSource(path)
        self._calibration = calibration
        infos = {name: self._file.file_of(name).infos[name] for name in self._file.names()}
        for name, info in infos.items():
            if len(info.shape) > 1 and info.type not in _PLAIN:
                raise ModelError(
                    f"{path}: tensor {name!r} is {info.type}: its weights are quantised already; give the model "
                    "that it was made from, in 16 or 32 bits"
                )
        own = {name: where for name in source.names() if (where := source.stored(name)) is not None}
        menus = {
            name: _menu(infos[stored].shape[1], bits is not None or size is not None)
            for name, (stored, _) in own.items()
            if len(infos[stored].shape) == 2 and infos[stored].shape[1] % 32 == 0
        }
        outside = None if bits is None and size is None else _outside(infos, own, menus)
        if size is not None:
            taken = calibration.linears().keys() & menus.keys()
            if outside is not None:
                taken |= {outside.embedding, outside.head}
            bits = self._bits_for(size, infos, {own[name][0]: menus[name][0] for name in taken})
        elif outside is not None:  # they have their usual types
            for name in {outside.embedding, outside.head}:
                stored = own[name][0]
                usual = self._planned(stored, infos[stored], None, {}, "output.weight" in infos)
                menus[name] = [GRIDS[usual.type]]
        norms = {
            stored: name
            for name, (stored, order) in own.items()
            if len(infos[stored].shape) == 1 and infos[stored].type == "f32" and order is None
        }
        calibration.keep(norms.values())
        grids = calibration.choose(menus, bits, outside)
        self._orders: dict[str, Sequence[int] | None] = {name: own[name][1] for name in grids}
        by_stored = {own[name][0]: name for name in grids}
        beside = () if outside is None else (outside.embedding, outside.head)
        self._outside = {own[name][0]: name for name in beside}  # what is rounded beside the blocks, by what they know
        self._tensors = [
            self._planned(name, infos[name], by_stored.get(name), grids, "output.weight" in infos)
            if name not in norms
            else _Tensor(name, infos[name].shape, infos[name].type, norms[name], copied=True)
            for name in infos
        ]
        # Matrices in the order in which they are computed, behind all that stays.
        self._tensors.sort(key=lambda each: calibration.place(each.calibrated) if each.calibrated else 0)
        self.bytes_before = sum(info.end - info.begin for info in infos.values())
        self.bytes_after = sum(each.bytes for each in self._tensors)
        self.matrices: list[QuantisedMatrix] = []
        self.errors: list[tuple[float, float]] = []

    def _planned(self, name: str, info: Any, calibrated: str | None, grids: dict[str, Grid], untied: bool) -> _Tensor:
        if calibrated is not None:
            inside = self._calibration.has(calibrated)
            return _Tensor(name, info.shape, grids[calibrated].name, calibrated if inside else None)
        if name in ("output.weight", "token_embd.weight") and info.shape[-1] % 32 == 0:
            # As llama.cpp does: the head has more bits; an embedding that is the head too has them as well.
            kind = "q4_k" if name == "token_embd.weight" and untied else "q6_k"
            return _Tensor(name, info.shape, kind if info.shape[-1] % 256 == 0 else SMALL[kind])
        return _Tensor(name, info.shape, info.type, copied=True)

    def _bits_for(self, size: int, infos: dict[str, Any], smallest: dict[str, Grid]) -> float:
        """Bits a weight that the matrices may have in a file of `size` bytes; `smallest`: what each can be.

        Raises:
            UsageError: that size cannot be reached.
        """
        first: int = min(info.begin for info in infos.values())  # what stands before all tensors stays about as large
        others = sum(
            self._planned(name, infos[name], None, {}, "output.weight" in infos).bytes
            for name in infos
            if name not in smallest
        )
        fixed = first + others + len(infos) * _ALIGNMENT
        weights = {name: int(numpy.prod(infos[name].shape)) for name in smallest}
        least = fixed + sum(weights[name] * grid.bits / 8 for name, grid in smallest.items())
        if size < least:
            megabytes = math.ceil(least / 1e4) / 100
            raise UsageError(f"--size {size / 1e6:g}MB: too small; the smallest of {self._path} is {megabytes:.2f} MB")
        return 8 * (size - fixed) / sum(weights.values())

    def write(self, out: Path) -> None:
        import gguf

        known = gguf.GGUFReader(self._path)
        writer = gguf.GGUFWriter(out, str(self._file.metadata["general.architecture"]))
        for key, value in known.fields.items():
            if not key.startswith(_OWN_KEYS):
                of = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, value.contents(), value.types[0], sub_type=of)
        writer.add_file_type(_FILE_TYPE)
        writer.add_quantization_version(_QUANTISATION_VERSION)
        for each in self._tensors:
            kind = gguf.GGMLQuantizationType[each.type.upper()]
            values, size = BLOCK_BYTES[each.type]
            row_bytes = each.shape[-1] // values * size
            shape = (*each.shape[:-1], row_bytes)
            writer.add_tensor_info(each.name, shape, numpy.dtype(numpy.uint8), each.bytes, kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for each in self._tensors:
                writer.write_tensor_data(self._data(each))
        finally:
            writer.close()

    def _data(self, tensor: _Tensor) -> Any:
        if tensor.copied:
            file = self._file.file_of(tensor.name)
            info = file.infos[tensor.name]
            divided = self._calibration.divided(tensor.calibrated) if tensor.calibrated is not None else None
            if divided is not None:  # files hold what is multiplied with
                return (floats_of(self._file.tensor(tensor.name)) / divided[0]).astype("f4").view("u1")
            return numpy.frombuffer(bytes(file.file.bytes(info.begin, info.end - info.begin)), numpy.uint8)
        if tensor.calibrated is None:
            return numpy.concatenate(list(self._nearest(tensor)))
        matrix = self._calibration.matrix(tensor.calibrated)
        data = packed(matrix.rounded)
        order = self._orders[tensor.calibrated]
        if order is not None:  # row i of the model is the stored row order[i]
            stored = numpy.empty_like(data)
            stored[numpy.asarray(order)] = data
            data = stored
        rows, cols = tensor.shape
        error = relative_error(*matrix.errors)
        group = GRIDS[tensor.type].group
        self.matrices.append(QuantisedMatrix(tensor.calibrated, rows, cols, group, tensor.bytes, error, tensor.type))
        self.errors.append(matrix.errors)
        return data

    def _nearest(self, tensor: _Tensor) -> Iterator[Any]:
        values: Any = self._file.tensor(tensor.name)
        for first in range(0, tensor.shape[0], _ROWS):
            rows = torch.from_numpy(floats_of(values, range(first, min(first + _ROWS, tensor.shape[0]))))
            outside = self._outside.get(tensor.name)
            if outside is None:
                yield packed(nearest(rows, GRIDS[tensor.type]))
            else:
                yield packed(self._calibration.rounded(outside, rows))


def copy_gguf(
    source: Path,
    target: Path,
    check: Callable[[], object],
    checkpoint: Any,
    summary: Summary,
    text: str,
    tokens: int | None,
    bits: float | None,
    size: int | None,
    progress: Progress | None,
    announce: Callable[[str], object] | None,
) -> None:
    """Write a calibrated copy; `summary` is filled. `check`: as that of `new_file`."""
    before = source.stat().st_size

    def steps(done: int, total: int) -> None:
        if progress is not None:
            progress(done * before // total, before)

    calibration = Calibration(source, checkpoint.source, checkpoint.config, text, tokens, announce, steps)
    copy = GgufCopy(source, checkpoint.source, calibration, bits, size)
    check_room(target.parent, copy.bytes_after)
    summary.calibration = calibration.told
    summary.bytes_before, summary.bytes_after = copy.bytes_before, copy.bytes_after
    with new_file(target, check) as beside:
        copy.write(beside)
    summary.asymmetric, summary.group = True, 32
    summary.matrices = copy.matrices
    errors = [sum(each) for each in zip(*copy.errors, strict=True)]
    summary.relative_error = relative_error(errors[0], errors[1])


def _menu(cols: int, mixed: bool) -> list[Grid]:
    if mixed:
        return [GRIDS[each] for each in (_MENU if cols % 256 == 0 else _SMALL_MENU)]
    return [GRIDS["q4_k" if cols % 256 == 0 else SMALL["q4_k"]]]


def _outside(infos: dict[str, Any], own: Mapping[str, Any], menus: Mapping[str, Any]) -> Outside | None:
    """Embedding and head, where the file has them as matrices that can be quantised."""
    names = {stored: name for name, (stored, _) in own.items()}
    embedding = names.get("token_embd.weight")
    head = names.get("output.weight") if "output.weight" in infos else embedding
    if embedding is None or head is None or not {embedding, head} <= menus.keys():
        return None
    return Outside(embedding, head, int(numpy.prod(infos["token_embd.weight"].shape)))
