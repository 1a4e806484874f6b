# SPDX-License-Identifier: Apache-2.0
"""Packs a checkpoint's tensors into a native decoder: each native weight is made of parts of tensors, cut to a rank."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.adapters import MergedTensor
from anyaccel.inference.checkpoints.gguf_blocks import GgufBlocks, TransposedBlocks
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES
from anyaccel.inference.checkpoints.quantised_layout import Dequantised, QuantisedTensor, StoredMatrix, row_index
from anyaccel.inference.checkpoints.sources import (
    BLOCKS,
    TensorView,
    dense_strides,
    entry_of,
)
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.native.checkpoint import Checkpoint, find_untied_head
from anyaccel.inference.native.formats import (
    ALWAYS_FLOAT,
    AT_LEAST_16_BITS,
    Precision,
    choose,
    forms,
    holds,
    stored_format,
)
from anyaccel.inference.native.shard import WeightSlice, bytes_by_layer, shard, slices, split_layers, stage_spec
from anyaccel.inference.spec.decoder import DecoderSpec, MatrixShape, VectorShape, each_weight, weights
from anyaccel.inference.spec.mapping import Part, Unsupported, first_stored
from anyaccel.inference.spec.packed_formats import FORMATS, QUANTISED, Format, ScaleKind
from anyaccel.validation import error_text

if TYPE_CHECKING:
    from anyaccel import _llm

_BLOCK_ROWS = 16
# Read, packed and given back at a time: what is in memory beside the packed weights.
_CHUNK_BYTES = 4 << 20
_MOST_CONVERTERS = 8  # threads; packing is what takes longer then

_WEIGHT = re.compile(r"\.(weight|bias)$")
_BUFFER = re.compile(r"\.(attn|attention)\.bias$")  # a mask that old checkpoints of GPT-2 and GPT-NeoX have

Rows = range | Sequence[int]


@dataclass(frozen=True)
class _Tensor:
    """A part with the tensor that it is of, after `index` and `transposed`; `rows` are as they are stored."""

    name: str
    tensor: Any
    rows: Rows
    cols: int
    plus: float
    times: float

    def with_own_scales(self, cols: range) -> tuple[ScaleKind, Any] | None:
        """What `_llm` packs of these columns with the scales that they have, and of which kind these are."""
        if self.times != 1 or not isinstance(self.tensor, GgufBlocks | QuantisedTensor):
            return None
        return self.tensor.with_own_scales(cols)


def with_own_scales(shape: MatrixShape, parts: list[_Tensor], cols: range) -> tuple[MatrixShape, list[_Tensor]]:
    """A matrix and its parts as `_llm` packs them, whose scales are of one kind; else they are as they were."""
    own = {stored_format(each.tensor, cols) for each in parts}
    found = [each.with_own_scales(cols) for each in parts]
    kept = [replace(part, tensor=each[1]) for part, each in zip(parts, found, strict=True) if each]
    kinds = {each[0] for each in found if each}
    same = own == {(shape.format, shape.group, shape.minimum)} and len(kinds) == 1 and len(kept) == len(parts)
    if shape.format not in QUANTISED or not same:
        return shape, parts
    return replace(shape, scales=kinds.pop()), kept


_Chunk = tuple[_Tensor, Rows, Callable[[], Any]]
_Chunks = Callable[[MatrixShape, range], Iterator[_Chunk]]


class Plan:
    """Which tensors' rows go where in the packed weights of one rank.

    Args:
        whole: what is computed, where that is not all that the checkpoint's config says.
        stage, stages: of pipeline parallelism.

    Raises:
        Unsupported, ModelError: see `load_native`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        rank: int,
        size: int,
        whole: DecoderSpec | None = None,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        self.source = checkpoint.source
        self.config = checkpoint.config
        self.family = checkpoint.family
        self.whole = whole or self.family.spec(checkpoint.config)
        if checkpoint.rounded is not None:
            # Those of long texts (longrope) are computed when they are needed.
            ropes = tuple(replace(rope, inv_freq=checkpoint.rounded(rope.inv_freq)) for rope in self.whole.ropes)
            self.whole = replace(self.whole, ropes=ropes)
        # Tensors of an embedding and a head that the config ties and the checkpoint has with different values.
        if checkpoint.headless and not self.whole.tied and not self._has_head():
            self.whole = replace(self.whole, tied=True)  # it is there, and nobody asks for it
        self.untied = find_untied_head(self.source, self.family, self.whole)
        if self.untied:
            self.whole = replace(self.whole, tied=False)
        self._known: set[str] = set()  # tensors that the model's weights may be called
        # All weights are found before anything is made of them: a count of layers or experts that the file has no
        # tensors for ends here, at the first one that is missing.
        found: dict[str, list[_Tensor]] = {}
        self._whole_matrices: dict[str, MatrixShape] = {}
        for shape in each_weight(self.whole):
            if isinstance(shape, MatrixShape):
                self._whole_matrices[shape.name] = shape
                found[shape.name] = self._find(shape.name, shape.rows, shape.cols)
            else:
                found[shape.name] = self._find(shape.name, shape.count, None)
        self._all_used = checkpoint.check_all_used is not None
        if checkpoint.check_all_used is not None:
            checkpoint.check_all_used(part.name for parts in found.values() for part in parts)
        self.spec = shard(self.whole, rank, size) if size > 1 else self.whole
        self._slices = slices(self.whole, rank, size)
        if stages > 1:
            self.spec = stage_spec(self.spec, self._layers_of_stages(found, precision, stages), stage)
        self._others = {part.name for parts in found.values() for part in parts}
        matrices, self.vectors = weights(self.spec)
        mine = [each.name for each in matrices]
        mine += [each.name for each in self.vectors if not self._slice(each.name).zero]
        self._parts = {name: found[name] for name in mine}
        self.matrices = [self._with_format(shape, precision) for shape in matrices]

    def _has_head(self) -> bool:
        heads = self.family.names.parts(self.whole, "head")
        return any(part.tensor in self.source for parts in heads for part in parts)

    def _layers_of_stages(
        self, found: Mapping[str, Sequence[_Tensor]], precision: Precision, stages: int
    ) -> list[range]:
        """The layers of each stage, by the bytes of the whole model's packed weights: the same on every rank."""
        sizes = []
        for name, shape in self._whole_matrices.items():
            form = choose(shape, precision, [stored_format(each.tensor, range(shape.cols)) for each in found[name]])
            sizes.append((name, shape.rows * shape.cols * FORMATS[form.format].bits // 8))
        return split_layers(*bytes_by_layer(self.whole, sizes), stages)

    def shapes(self) -> dict[str, Any]:
        """The weights as `_llm.DecoderModel` takes them."""
        return {
            "matrices": [shape.entry() for shape in self.matrices],
            "vectors": [(v.name, v.count) for v in self.vectors],
        }

    def forms(self) -> dict[str, list[str]]:
        """What the matrices are stored as -> what they run as, in words, the most common first."""
        return forms(
            (part.tensor.type, shape)
            for shape in self.matrices
            for part in {each.tensor.type: each for each in self._parts[shape.name]}.values()
        )

    def dequantised(self) -> list[Dequantised]:
        """The quantised matrices of a checkpoint that run as floats for what was asked, one for each of their parts."""
        found = []
        for shape in self.matrices:
            if shape.format in QUANTISED or shape.name.rsplit(".", 1)[-1] in (*ALWAYS_FLOAT, *AT_LEAST_16_BITS):
                continue
            for part in self._parts[shape.name]:
                if isinstance(part.tensor, StoredMatrix):
                    rows, cols = len(part.rows), len(self._slice(shape.name).cols or range(part.cols))
                    held = part.tensor.format(range(part.cols))[0] in QUANTISED
                    stored = part.tensor.stored_bytes * rows * cols / math.prod(part.tensor.shape)
                    bits = FORMATS[shape.format].bits
                    found.append(Dequantised(part.tensor.type, held, stored, rows * cols * bits / 8, shape.format))
        return found

    def unread(self) -> list[str]:
        """Weights of the decoder's layers that the configuration does not know: unexpected ones.

        Those of a layer that drafts are not, whether it is used or not. Nor has a GGUF file any, whose tensors are
        checked already and may have several names here.
        """
        if self.whole.hidden_inputs is not None or self._all_used:
            return []
        found = [part.name for name, parts in self._parts.items() if name.startswith("layers.") for part in parts]
        layers = re.split(r"\d", found[0], maxsplit=1)[0]
        head = self.family.of_draft_head(self.config)
        drafts = () if head is None else tuple(base.body + head.names.layer for base in head.names.bases)
        return [
            name
            for name in self.source.names()
            if name.startswith(layers)
            and not name.startswith(drafts)
            and name not in self._known
            and _WEIGHT.search(name)
            and not _BUFFER.search(name)
        ]

    def _slice(self, name: str) -> WeightSlice:
        return self._slices.get(name, WeightSlice(()))

    def _with_format(self, shape: MatrixShape, precision: Precision) -> MatrixShape:
        whole = self._whole_matrices[shape.name]
        cols = self._slice(shape.name).cols or range(whole.cols)
        return choose(shape, precision, [stored_format(each.tensor, cols) for each in self._parts[shape.name]])

    def fit_to_llm(self, precision: Precision) -> None:
        """Have matrices in forms that only `_llm` has: scales as they are stored, values in a format of their own."""
        self.matrices = [own for shape in self.matrices for own in self._divided(shape, precision)]
        for number, shape in enumerate(self.matrices):
            cols = self._slice(shape.name).cols or range(shape.cols)
            self.matrices[number], self._parts[shape.name] = with_own_scales(shape, self._parts[shape.name], cols)

    def _divided(self, shape: MatrixShape, precision: Precision) -> list[MatrixShape]:
        """`qkv` without its values, and these, where a format that holds both would be larger than each one's own."""
        at, _, name = shape.name.rpartition(".")
        if name != "qkv" or self._slice(shape.name).cols is not None:
            return [shape]
        pieces = list(self._row_slices(shape.name))
        attention = self.spec.layers[int(at.split(".")[1]) - self.spec.first_layer].attention
        if attention is None or attention.gated or len(pieces) != 3:
            return [shape]
        if len(pieces[2][1]) != attention.kv_heads * attention.value_dim:
            return [shape]
        found = []
        for native, chosen in ((shape.name, pieces[:2]), (f"{at}.v", pieces[2:])):
            wanted = replace(shape, name=native, rows=sum(len(rows) for _, rows in chosen))
            own = [stored_format(part.tensor, range(part.cols)) for part, _ in chosen]
            found.append((choose(wanted, precision, own), [replace(part, rows=rows) for part, rows in chosen]))
        if len({(each.format, each.group, each.minimum) for each, _ in found}) == 1:
            return [shape]
        for each, parts in found:
            self._parts[each.name], self._slices[each.name] = parts, WeightSlice(())
        return [each for each, _ in found]

    def _find(self, name: str, rows: int, cols: int | None) -> list[_Tensor]:
        """The parts of a native weight: the first alternative whose tensors all exist."""
        alternatives = self.family.names.parts(self.whole, name)
        self._known.update(tensor for each in alternatives for part in each for tensor in part.tensors)
        chosen = first_stored(alternatives, self.source)
        if chosen is None:
            missing = next(part.tensor for part in alternatives[0] if part.tensor not in self.source)
            raise ModelError(f"{self._where()}the checkpoint has no tensor {missing!r}, which {name} is made of")
        found = [self._resolve(part, vector=cols is None) for part in chosen]
        if sum(len(each.rows) for each in found) != rows or any(cols not in (None, each.cols) for each in found):
            shapes = ", ".join(f"{each.name} {tuple(each.tensor.shape)}" for each in found)
            wanted = f"{rows}" if cols is None else f"{rows} x {cols}"
            raise ModelError(f"{found[0].tensor.where}: wrong shape: {shapes} should give {name} of {wanted}")
        return found

    def _where(self) -> str:
        first = next(iter(self.source.names()), None)
        where = self.source.tensor(first).where if first is not None else ""
        return f"{where.split(': tensor ')[0]}: " if ": tensor " in where else ""

    def _resolve(self, part: Part, vector: bool) -> _Tensor:
        tensor: Any = self.source.tensor(part.tensor)
        if part.index is not None:
            tensor = entry_of(tensor, part.index)
        if part.adapter:
            down, up = (floats_of(self.source.tensor(name)) for name in part.adapter)
            if (up.shape[0], *down.shape[::-1]) != (*tensor.shape, up.shape[1]):
                shapes = f"{down.shape} and {up.shape}"
                raise ModelError(f"{tensor.where}: wrong shape {tuple(tensor.shape)}: its adapter is of {shapes}")
            tensor = MergedTensor(tensor, up, down)
        if not vector and len(tensor.shape) == 1 and isinstance(tensor, TensorView):  # one row
            tensor = replace(tensor, shape=(1, *tensor.shape), strides=(0, *tensor.strides))
        if vector and len(tensor.shape) != 1 and isinstance(tensor, TensorView):
            tensor = _flattened(tensor)  # Cohere's norms are [heads, head_dim], Apertus has single values
        if len(tensor.shape) != (1 if vector else 2):
            wanted = "a vector" if vector else "a matrix"
            raise ModelError(f"{tensor.where}: wrong shape {tuple(tensor.shape)}: {wanted} is needed")
        # Libraries that quantise have a Conv1D's weight as a linear's, [out, in].
        as_linear = isinstance(tensor, StoredMatrix) and part.transposed and not tensor.transposed
        if part.transposed != tensor.transposed and not as_linear:
            tensor = _transposed(tensor)
        count = tensor.shape[0]
        rows: Rows = range(part.first, count if part.count < 0 else part.first + part.count)
        if part.order is not None:
            rows = part.order
        if len(rows) and (min(rows) < 0 or max(rows) >= count):
            raise ModelError(f"{tensor.where}: wrong shape {tuple(tensor.shape)}: row {max(rows)} is needed")
        if tensor.order is not None:
            rows = [tensor.order[row] for row in rows]
        return _Tensor(part.tensor, tensor, rows, 1 if vector else tensor.shape[1], part.plus + tensor.plus, part.times)

    def fill(self, model: _llm.DecoderModel, report: Callable[[int, int], object]) -> None:
        """Pack everything into `model`.

        Args:
            report: called with (bytes packed, bytes in all).
        """
        converters = min(len(os.sched_getaffinity(0)), _MOST_CONVERTERS)
        with ThreadPoolExecutor(converters) as threads:
            self._fill(model, report, functools.partial(self._chunks, threads=threads, most=converters))

    def _fill(self, model: _llm.DecoderModel, report: Callable[[int, int], object], chunks: _Chunks) -> None:
        last = self._last_uses()
        ahead = [name for name in self._parts if name in self._whole_matrices]
        progress = _Progress(self.matrices, model.weight_bytes, report)
        for number, shape in enumerate(self.matrices):
            for following in ahead[number + 1 : number + 2]:
                for part in self._parts[following]:
                    part.tensor.will_need()
            self._fill_matrix(model, shape, progress, chunks)
            for name in last.get(shape.name, ()):
                self.source.release(name)
        for vector in self.vectors:
            self._fill_vector(model, vector)
            for name in last.get(vector.name, ()):
                self.source.release(name)
        if self.spec.stages > 1:
            for name in self._others - {part.name for parts in self._parts.values() for part in parts}:
                self.source.release(name)  # of other stages
        progress.end()

    def _last_uses(self) -> dict[str, list[str]]:
        """Native weight -> tensors whose memory it needs last: one parameter of a module may have several names."""
        order = [*(each.name for each in self.matrices), *(each.name for each in self.vectors)]
        tensors = {part.name: self.source.tensor(part.name) for name in order for part in self._parts.get(name, [])}
        memory = {name: each.address if isinstance(each, TensorView) else name for name, each in tensors.items()}
        last = {memory[part.name]: name for name in order for part in self._parts.get(name, [])}
        found: dict[str, list[str]] = {}
        for name in tensors:
            found.setdefault(last[memory[name]], []).append(name)
        return found

    def _row_slices(self, name: str) -> Iterator[tuple[_Tensor, Rows]]:
        """The rank's rows of a native weight, in order: tensors and their rows."""
        parts = self._parts[name]
        for wanted in self._slice(name).rows or (range(sum(len(each.rows) for each in parts)),):
            at = 0
            for part in parts:
                first, last = max(wanted.start, at), min(wanted.stop, at + len(part.rows))
                if first < last:
                    yield part, part.rows[first - at : last - at]
                at += len(part.rows)

    def _fill_matrix(self, model: _llm.DecoderModel, shape: MatrixShape, progress: _Progress, chunks: _Chunks) -> None:
        cols = self._slice(shape.name).cols or range(shape.cols)
        at = 0
        for part, chunk, values in chunks(shape, cols):
            try:
                _pack(model, shape, at, part, chunk, cols, values())
            except (ValueError, OverflowError) as error:
                if isinstance(error, ModelError):
                    raise
                raise ModelError(
                    f"{part.tensor.where}: cannot be packed as {shape.format} ({error_text(error)})"
                ) from error
            at += len(chunk)
            if isinstance(part.tensor, TensorView):
                part.tensor.done(chunk)
            progress.add(len(chunk) * shape.cols, shape)

    def _chunks(self, shape: MatrixShape, cols: range, threads: ThreadPoolExecutor, most: int) -> Iterator[_Chunk]:
        """Tensors, rows of them, and a function that returns these rows' values where they have to be converted.

        Rows of quantised tensors are converted in threads, ahead of what is packed: numpy lets go of Python's lock.
        """
        waiting: deque[_Chunk] = deque()
        at = 0
        for part, rows in self._row_slices(shape.name):
            for chunk in _chunks(part, rows, at):
                convert = functools.partial(_converted, shape, part, chunk, cols)
                ahead = (
                    threads.submit(convert).result if isinstance(part.tensor, GgufBlocks | QuantisedTensor) else convert
                )
                waiting.append((part, chunk, ahead))
                at += len(chunk)
                if len(waiting) > most:
                    yield waiting.popleft()
        yield from waiting

    def _fill_vector(self, model: _llm.DecoderModel, shape: VectorShape) -> None:
        if self._slice(shape.name).zero:
            zeros = (ctypes.c_float * shape.count)()
            model.set_vector(shape.name, 0, shape.count, ctypes.addressof(zeros), "f32")
            return
        at = 0
        for part, rows in self._row_slices(shape.name):
            tensor = part.tensor
            if not isinstance(tensor, TensorView) or BLOCKS[tensor.type][0] > 1:
                raise Unsupported(f"vector of type {tensor.type} ({tensor.where})")
            for first, count, step in _runs(rows):
                stride = tensor.strides[0]
                address = tensor.address + first * stride
                model.set_vector(shape.name, at, count, address, tensor.type, step * stride, part.plus)
                at += count


def _transposed(tensor: Any) -> Any:
    """The transpose of a stored matrix.

    Raises:
        Unsupported: it is in blocks that are not GGUF's.
    """
    if isinstance(tensor, TensorView) and BLOCKS[tensor.type][0] == 1:
        return replace(tensor, shape=tensor.shape[::-1], strides=tensor.strides[::-1])
    if isinstance(tensor, TensorView) and tensor.file is not None:
        begin = tensor.address - tensor.file.address
        tensor = GgufBlocks(tensor.where, tensor.type, tensor.shape, tensor.file, begin, tensor.strides[0])
    if not isinstance(tensor, GgufBlocks):
        raise Unsupported(f"matrix of type {tensor.type} that runs along its columns ({tensor.where})")
    return TransposedBlocks(tensor)


def _flattened(tensor: TensorView) -> TensorView:
    """A dense tensor as one vector."""
    values, size = BLOCKS[tensor.type]
    if values > 1 or tensor.strides != dense_strides(tensor.shape, size):
        raise Unsupported(f"vector that is not dense ({tensor.where})")
    return replace(tensor, shape=(math.prod(tensor.shape),), strides=(size,))


class _Progress:
    """Counts values as bytes of the packed weights."""

    def __init__(self, matrices: Sequence[MatrixShape], total: int, report: Callable[[int, int], object]) -> None:
        self._report = report
        self._total = total
        self._all = sum(each.rows * each.cols * FORMATS[each.format].bits for each in matrices)
        self._done = 0

    def add(self, values: int, shape: MatrixShape) -> None:
        self._done += values * FORMATS[shape.format].bits
        self._report(min(self._total * self._done // max(self._all, 1), self._total - 1), self._total)

    def end(self) -> None:
        self._report(self._total, self._total)


def _chunks(part: _Tensor, rows: Rows, at: int) -> Iterator[Rows]:
    """`rows` in chunks of a few megabytes that end, in the packed matrix, where a block of rows does."""
    row_bytes = part.cols * 4
    if isinstance(part.tensor, TensorView):
        values, size = BLOCK_BYTES[part.tensor.type]
        row_bytes = part.cols // values * size
        if not part.tensor.is_by_rows:
            yield rows
            return
    step = max(_CHUNK_BYTES // max(row_bytes, 1) // _BLOCK_ROWS, 1) * _BLOCK_ROWS
    begin = 0
    while begin < len(rows):
        end = min((at + begin + step) // _BLOCK_ROWS * _BLOCK_ROWS - at, len(rows))
        yield rows[begin:end]
        begin = end


def _pack(
    model: _llm.DecoderModel, shape: MatrixShape, at: int, part: _Tensor, rows: Rows, cols: range, values: Any
) -> None:
    """Give `_llm` some rows; `values` are those that `_converted` returns."""
    tensor = part.tensor
    if isinstance(tensor, TensorView) and part.times == 1:
        row_stride, col_stride = tensor.strides
        values, size = BLOCK_BYTES[tensor.type]
        if values > 1:
            if cols.start % values or cols.stop % values:
                raise Unsupported(f"{tensor.type} blocks that ranks would share ({tensor.where})")
            address, col_stride = tensor.address + cols.start // values * size, 0
        else:
            address = tensor.address + cols.start * col_stride
        order = None
        if isinstance(rows, range):
            address += rows.start * row_stride
        else:
            order = list(rows)
        model.set_rows(shape.name, at, len(rows), address, tensor.type, row_stride, col_stride, order)
        return
    if isinstance(values, tuple):
        q, scales, minima = values
        kept = minima.ctypes.data if shape.minimum else 0
        model.set_quantised_rows(shape.name, at, len(rows), q.ctypes.data, scales.ctypes.data, kept)
        return
    model.set_rows(shape.name, at, len(rows), values.ctypes.data, "f32", values.strides[0], values.strides[1])


def _converted(shape: MatrixShape, part: _Tensor, rows: Rows, cols: range) -> Any:
    """Rows as arrays: (values, scales, minima) where the matrix holds them, else floats; None for what `_llm` reads."""
    tensor, times = part.tensor, part.times
    if isinstance(tensor, TensorView):
        return None if times == 1 else _floats(tensor, rows, cols) * times
    own = tensor.format(cols)
    if not holds(shape, own):
        values = tensor.floats(rows, cols)
        return values if times == 1 else values * times
    q, scales, minima = _values(shape, tensor, own, rows, cols)
    if times == 1:
        return q, scales, minima
    return q, scales * times, None if minima is None else minima * times


def _floats(tensor: TensorView, rows: Rows, cols: range) -> Any:
    """float32 values of stored rows."""
    import numpy

    if BLOCKS[tensor.type][0] > 1:
        raise Unsupported(f"factors of weights of type {tensor.type} ({tensor.where})")
    size = BLOCKS[tensor.type][1]
    kind: Any = {"f32": numpy.float32, "f64": numpy.float64, "f16": numpy.float16, "bf16": numpy.uint16}[tensor.type]
    extent = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.strides, strict=True)) + size
    memory: Any = (ctypes.c_ubyte * extent).from_address(tensor.address)
    whole = numpy.ndarray(tensor.shape, kind, memory, 0, tensor.strides)
    values = whole[row_index(rows), cols.start : cols.stop]
    if tensor.type == "bf16":
        values = (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return numpy.ascontiguousarray(values, numpy.float32)


def _values(shape: MatrixShape, tensor: Any, own: Format, rows: Rows, cols: range) -> tuple[Any, Any, Any]:
    """Values, scales and minima in the format of `shape`, which holds `own`: nothing is rounded."""
    import numpy

    q, scales, minima = tensor.values(rows, cols, shape.group)
    held, to = FORMATS[own[0]], FORMATS[shape.format]
    if held is not to:
        if held.codes is not None:
            q = numpy.array(held.codes, numpy.int8)[q]
        elif not shape.minimum:
            q = q.astype(numpy.int8) + numpy.int8(to.zero - held.zero)
        q = numpy.ascontiguousarray(q, numpy.int8 if to.bits == 8 else numpy.uint8)
    if shape.minimum and minima is None:
        minima = numpy.zeros_like(scales)
    return q, scales, minima


def _runs(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Rows as (first, count, step)."""
    if isinstance(rows, range):
        yield rows.start, len(rows), 1
        return
    begin = 0
    while begin < len(rows):
        step = rows[begin + 1] - rows[begin] if begin + 1 < len(rows) else 1
        end = begin + 1
        while step > 0 and end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        yield rows[begin], end - begin, max(step, 1)
        begin = end
