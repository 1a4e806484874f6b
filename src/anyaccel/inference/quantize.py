# SPDX-License-Identifier: Apache-2.0
"""Quantises a model's linear layers into a compressed-tensors checkpoint ("pack-quantized"). Torch-free.

The checkpoint is read by this package, by transformers with compressed-tensors, and by vLLM. int4 has a scale for each
group of columns, the one with the least squared error that a search finds (csrc/llm/pack/kernels_pack.cpp), and with
`asymmetric` a zero point; int8 has a scale a row. Embedding, head, norms and routers stay in 16 bits: this package
brings embedding and head to 8 bits a row when it loads the model with dtype int4 or int8.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.calibration.summary import QuantisedMatrix, Summary
from anyaccel.inference.checkpoints.compressed_config import compressed_config
from anyaccel.inference.checkpoints.model_path import named_path, no_such_model
from anyaccel.inference.checkpoints.new_folder import check_room, new_folder
from anyaccel.inference.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from anyaccel.inference.checkpoints.sources import BLOCKS, TensorView, entry_of
from anyaccel.inference.checkpoints.stored_values import (
    as_bf16,
    floats_of,
    kept_dtype,
    packed_words,
    relative_error,
    rows_of,
    shape_of,
    stored_bytes,
    with_zero_points,
)
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.checkpoint import Checkpoint, find_untied_head, read_checkpoint
from anyaccel.inference.native.formats import ALWAYS_FLOAT, AT_LEAST_16_BITS, Precision
from anyaccel.inference.options import GROUP_SIZES
from anyaccel.inference.spec.decoder import MatrixShape, each_weight
from anyaccel.inference.spec.mapping import first_stored

Progress = Callable[[int, int], object]

_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".index.json")
# What a model folder is made of; one with anything else in it is not removed.
_MODEL_FILES = (
    *(".json", ".safetensors", ".bin", ".jinja", ".txt", ".model", ".tiktoken", ".md", ".py"),
    *(".gitattributes", "LICENSE", "NOTICE"),
)
_MAX_COPIED = 512 << 20
_CHUNK_BYTES = 16 << 20  # of rows that are quantised at a time
_NOT_LINEAR = ("embed", "head", *ALWAYS_FLOAT, *AT_LEAST_16_BITS)  # native weights that stay as they are


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    dtype: str = "int4",
    group: int = 32,
    asymmetric: bool = False,
    calibrate: str | Path | None = None,
    tokens: int | None = None,
    bits: float | None = None,
    size: int | None = None,
    format: str = "compressed-tensors",
    force: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], object] | None = None,
) -> Summary:
    """Write a quantised copy of a model; `out` appears when it is complete, or not at all.

    Args:
        model: Hugging Face folder (safetensors) or GGUF file.
        out: folder to make; a .gguf file for format "gguf".
        dtype: int4 or int8.
        calibrate: a text file, or "builtin": make up for errors by what the model computes on it.
        tokens: of that text that are used.
        format: compressed-tensors; or gguf, for a calibrated copy of a GGUF file in the K types.
        bits: stored for a weight of the calibrated matrices, on average at most: each gets what it needs.
        size: bytes of the file at most, of format "gguf": embedding and head, too, get what they need.
        group: columns that share a scale in int4: 32, 64 or 128; less where a matrix needs it.
        asymmetric: int4 with a zero point for each group.
        force: replace `out` when it exists and is a model folder, with nothing else in it.
        progress: called with (bytes read, bytes in all).
        announce: called with a line before something that takes a while.

    Raises:
        UsageError: an argument is wrong, or `out` exists; with `force`, or is no model folder.
        Unsupported: the native runtime has no such model. ModelError: the model is damaged or quantised already.
    """
    start = time.perf_counter()
    source, target = named_path(str(model)), Path(out).expanduser()
    if dtype not in ("int4", "int8"):
        raise UsageError(f"dtype {dtype!r}: quantize makes int4 or int8")
    Precision(dtype, group, asymmetric)
    if calibrate is not None and dtype != "int4":
        raise UsageError("--calibrate is for int4; int8 loses almost nothing without it")
    if tokens is not None and calibrate is None:
        raise UsageError("--calibration-tokens is the number of tokens of a text; give --calibrate TEXT too")
    if bits is not None and calibrate is None:
        raise UsageError("--bits: what each matrix needs is measured on a text; give --calibrate too")
    if size is not None and (format != "gguf" or bits is not None):
        raise UsageError("--size is that of a GGUF file: give --format gguf and --calibrate too, and no --bits")
    if format == "gguf" and (asymmetric or group != 32):
        raise UsageError("--group-size and --asymmetric are for folders; types of GGUF have groups of their own")
    if asymmetric and dtype != "int4":
        raise UsageError("asymmetric is for int4 only; int8 does not need it")
    if not source.exists():
        raise UsageError(no_such_model(model))

    def check() -> None:
        if format == "gguf":
            _check_gguf(source, target, calibrate, force)
        else:
            _check_target(source, target, force)

    check()
    checkpoint = read_checkpoint(source)
    if checkpoint.config.get("quantization_config"):
        raise ModelError(
            f"{source}: its weights are quantised already; give the model that it was made from, in 16 or 32 bits"
        )
    summary = Summary(str(source), str(target), dtype, group if dtype == "int4" else 0, asymmetric)
    if format == "gguf":
        from anyaccel.inference.calibration.gguf_copy import copy_gguf

        copy_gguf(source, target, check, checkpoint, summary, str(calibrate), tokens, bits, size, progress, announce)
        summary.seconds = time.perf_counter() - start
        return summary
    work = _Work(checkpoint, summary, progress)
    check_room(target.parent, work.bytes_after)
    if calibrate is not None:
        work.calibrate(source, str(calibrate), tokens, bits, announce)
    with new_folder(target, check) as beside:
        work.write(beside)
        _write_configs(source, beside, checkpoint, work, announce)
    summary.seconds = time.perf_counter() - start
    return summary


def _check_gguf(source: Path, target: Path, calibrate: Any, force: bool) -> None:
    if calibrate is None:
        raise UsageError("--format gguf: for calibrated copies only; give --calibrate too")
    if not source.is_file():
        raise UsageError(
            f"{source}: --format gguf copies a GGUF file; llama.cpp's convert_hf_to_gguf.py makes one in 16 bits"
        )
    if target.suffix != ".gguf":
        raise UsageError(f"{target}: call the new file NAME.gguf")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no such folder as {target.parent}; make it first")
    if os.path.lexists(target) and (not force or not target.is_file() or target.samefile(source)):
        raise UsageError(f"{target}: exists already; give another name, or --force to replace another model's file")


def _check_target(source: Path, target: Path, force: bool) -> None:
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists already; give another folder, or --force to replace it")
    if target.exists() and (not target.is_dir() or target.resolve() in (source.resolve(), *source.resolve().parents)):
        raise UsageError(f"{target}: is the model itself, or no folder; give another one")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no such folder as {target.parent}; make it first")
    if target.exists():
        entries = sorted(target.iterdir())
        strange = [each.name for each in entries if not each.is_file() or not each.name.endswith(_MODEL_FILES)]
        if strange:
            raise UsageError(f"{target}: holds {strange[0]!r}, which is no part of a model; give another folder")
        if entries and not (target / "config.json").is_file():
            raise UsageError(f"{target}: is no model folder (it has no config.json); give another one")


class _Work:
    """The tensors of one checkpoint: which are quantised, and how."""

    def __init__(self, checkpoint: Checkpoint, summary: Summary, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self.source: Any = checkpoint.source
        self.summary = summary
        self._progress = progress
        self._bits = 4 if summary.dtype == "int4" else 8
        family = family_of(checkpoint.config)
        self.untied = find_untied_head(self.source, family, family.spec(checkpoint.config)) is not None
        self._linears = self._linear_names(checkpoint)
        self._groups: dict[str, int] = {}  # tensor -> columns that share a scale, 0 for all
        for name in self.source.names():
            group = self._group_of(name)
            if group is not None:
                self._groups[name] = group
        if not self._groups:
            raise ModelError(f"{summary.model}: no matrix of it can be quantised")
        self._total = sum(stored_bytes(self.source.tensor(name)) for name in self.source.names())
        self._done = 0
        self._squares = [0.0, 0.0]
        self._grids: dict[str, Any] = {}  # of calibrated matrices
        self._calibrated: Any = None  # where calibrated matrices come from, block by block

    @property
    def bytes_after(self) -> int:
        """Of all tensors that will be written."""
        return sum(each.bytes for name in self.source.names() for each in self._planned(name))

    def calibrate(self, source: Path, text: str, tokens: int | None, bits: float | None, announce: Any) -> None:
        """Have the matrices of the decoder's blocks quantised by what they compute on a text."""
        from anyaccel.inference.calibration.session import Calibration

        def steps(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(done * self._total // total, self._total)

        config = self._checkpoint.config
        self._calibrated = Calibration(source, self.source, config, text, tokens, announce, steps)
        self.summary.calibration = self._calibrated.told
        menus = {name: self._menu(name, bits) for name in self._groups}
        self._grids = self._calibrated.choose(menus, bits)

    def _menu(self, name: str, bits: float | None) -> list[Any]:
        """What a matrix can be: 4 bits, for a target with fewer or more scales, and 8 bits."""
        from anyaccel.inference.calibration.grids import IntGrid

        if bits is None:
            return [IntGrid(4, self._groups[name], self.summary.asymmetric)]
        cols = shape_of(self.source.tensor(name))[1]
        return [
            *(IntGrid(4, group, True) for group in reversed(GROUP_SIZES) if cols % group == 0),
            IntGrid(8, cols, False),
        ]

    def _has_zeros(self, name: str) -> bool:
        return self._grids[name].asymmetric if name in self._grids else self.summary.asymmetric

    def _bits_of(self, name: str) -> int:
        return self._grids[name].q_bits if name in self._grids else self._bits

    def _group_of_grid(self, name: str) -> int:
        """Columns that share a scale, 0 for all."""
        if name not in self._grids:
            return self._groups[name]
        return self._grids[name].group if self._grids[name].q_bits == 4 else 0

    def _linear_names(self, checkpoint: Checkpoint) -> set[str]:
        """Tensors that are whole nn.Linear weights: what the matrices of the native runtime are made of."""
        family = family_of(checkpoint.config)
        spec = family.spec(checkpoint.config)
        found: set[str] = set()
        used: set[str] = set()
        for shape in each_weight(spec):
            alternatives = family.names.parts(spec, shape.name)
            chosen = first_stored(alternatives, self.source)
            used |= {tensor for part in chosen or () for tensor in part.tensors}
            if not isinstance(shape, MatrixShape) or shape.name.rsplit(".", 1)[-1] in _NOT_LINEAR:
                continue
            if chosen is None:
                missing = next(part.tensor for part in alternatives[0] if part.tensor not in self.source)
                raise ModelError(f"{self.summary.model}: the checkpoint has no tensor {missing!r} of {shape.name}")
            found |= {part.tensor for part in chosen if part.index is None and not part.transposed}
        if checkpoint.check_all_used is not None:  # what the model does not use would be lost
            checkpoint.check_all_used(used)
        return found

    def _group_of(self, name: str) -> int | None:
        tensor = self.source.tensor(name)
        if name not in self._linears or len(tensor.shape) != 2 or not name.endswith(".weight"):
            return None
        if self._bits == 8:
            return 0 if tensor.shape[1] % 4 == 0 else None
        wanted = [
            group for group in reversed(GROUP_SIZES) if group <= self.summary.group and tensor.shape[1] % group == 0
        ]
        return wanted[0] if wanted else None

    def write(self, folder: Path) -> None:
        names = sorted(self.source.names())
        if self._calibrated is not None:  # blocks after all else, in the order in which they are computed
            names.sort(key=self._calibrated.place)
        planned = [each for name in names for each in self._planned(name)]
        writer = SafetensorsWriter(folder, planned, {"format": "pt"})
        self.summary.bytes_after = writer.total
        self.summary.bytes_before = self._total
        try:
            for name in names:
                self._write_tensor(writer, name)
                self.source.release(name)
            writer.finish()
        finally:
            writer.close()
        self.summary.relative_error = relative_error(*self._squares)

    def _planned(self, name: str) -> Iterator[Planned]:
        tensor = self.source.tensor(name)
        shape = shape_of(tensor)
        group = self._groups.get(name)
        if group is None:
            yield Planned(name, kept_dtype(tensor), shape)
            return
        rows, cols = shape
        group, bits = self._group_of_grid(name), self._bits_of(name)
        groups = cols // group if group else 1
        stem = name.removesuffix(".weight")
        yield Planned(f"{stem}.weight_packed", "I32", (rows, cols * bits // 32))
        yield Planned(f"{stem}.weight_scale", "F16" if bits == 4 else "F32", (rows, groups))
        yield Planned(f"{stem}.weight_shape", "I64", (2,))
        if self._has_zeros(name):
            yield Planned(f"{stem}.weight_zero_point", "I32", (-(-rows // 8), groups))

    def _write_tensor(self, writer: SafetensorsWriter, name: str) -> None:
        tensor = self.source.tensor(name)
        if name not in self._groups:
            self.summary.kept.append(name)
            writer.write(name, self._kept(name, tensor))
            return

        rows, cols = shape_of(tensor)
        if self._calibrated is not None and self._calibrated.has(name):
            from anyaccel.inference.calibration.session import as_rows

            matrix = self._calibrated.matrix(name)
            q, scale, zero = as_rows(matrix.rounded)
            words = packed_words(q, self._bits_of(name))
            self._write_matrix(writer, name, (rows, cols), [words], [scale], [zero], list(matrix.errors))
            return
        packed, scales, zeros = [], [], []
        error = [0.0, 0.0]
        step = max(_CHUNK_BYTES // (4 * cols) // 16, 1) * 16
        for first in range(0, rows, step):
            part = range(first, min(first + step, rows))
            q, scale, zero, squares = self._quantised(tensor, part, self._groups[name])
            packed.append(packed_words(q, self._bits))
            scales.append(scale)
            zeros.append(zero)
            error = [a + b for a, b in zip(error, squares, strict=True)]
            self._advance(stored_bytes(tensor) * len(part) // rows, tensor, part)
        if not math.isfinite(sum(error)):
            raise ModelError(f"{tensor.where}: has values that are infinite or not numbers")
        self._write_matrix(writer, name, (rows, cols), packed, scales, zeros, error)

    def _write_matrix(
        self,
        writer: SafetensorsWriter,
        name: str,
        shape: tuple[int, ...],
        packed: Any,
        scales: Any,
        zeros: Any,
        error: Any,
    ) -> None:
        """One matrix, of which there are some rows after others."""
        import numpy

        rows, cols = shape
        stem = name.removesuffix(".weight")
        size = writer.write(f"{stem}.weight_packed", packed)
        stored = "f2" if self._bits_of(name) == 4 else "f4"
        size += writer.write(f"{stem}.weight_scale", [each.astype(stored) for each in scales])
        size += writer.write(f"{stem}.weight_shape", [numpy.array([rows, cols], "i8")])
        if self._has_zeros(name):
            zero = numpy.concatenate(zeros)
            padded = numpy.pad(zero, ((0, -len(zero) % 8), (0, 0))).astype("u1")
            words = numpy.ascontiguousarray(packed_words(numpy.ascontiguousarray(padded.T), 4).T)
            size += writer.write(f"{stem}.weight_zero_point", [words])
        self._squares = [a + b for a, b in zip(self._squares, error, strict=True)]
        group, kind = self._group_of_grid(name), f"int{self._bits_of(name)}"
        self.summary.matrices.append(QuantisedMatrix(name, rows, cols, group, size, relative_error(*error), kind))

    def _kept(self, name: str, tensor: Any) -> Iterator[Any]:
        """The values of a tensor that is not quantised, in 16 bits or as they are; of a norm, what became of them."""
        dtype = kept_dtype(tensor)
        if not tensor.shape:  # one number
            tensor = replace(tensor, shape=(1,), strides=(BLOCKS[tensor.type][1],))
        divided = None if self._calibrated is None else self._calibrated.divided(name)
        entries = [tensor] if len(tensor.shape) < 3 else [entry_of(tensor, i) for i in range(tensor.shape[0])]
        for entry in entries:
            rows = entry.shape[0]
            step = rows if entry.transposed else max(_CHUNK_BYTES // max(4 * math.prod(entry.shape[1:]), 1), 1)
            for first in range(0, rows, step):
                part = range(first, min(first + step, rows))
                values = floats_of(entry, part)
                if divided is not None:
                    values = (values + divided[1]) / divided[0][part.start : part.stop] - divided[1]
                yield as_bf16(values) if dtype == "BF16" else values.astype("f2" if dtype == "F16" else "f4")
                self._advance(stored_bytes(entry) * len(part) // rows, entry, part)

    def _advance(self, size: int, tensor: Any, rows: range) -> None:
        if isinstance(tensor, TensorView) and tensor.order is None:
            tensor.done(rows)
        self._done += size
        if self._progress is not None and self._calibrated is None:
            self._progress(min(self._done, self._total), self._total)

    def _quantised(self, tensor: Any, rows: range, group: int) -> tuple[Any, Any, Any, tuple[float, float]]:
        """Unsigned q, scales, zero points (None without), and the squared sums of error and values."""
        import numpy

        from anyaccel import _llm

        cols = tensor.shape[1]
        address, kind, stride, floats = rows_of(tensor, rows)
        shape = (len(rows), cols // group if group else 1)
        q = numpy.empty((len(rows), cols), numpy.uint8)
        scales = numpy.empty(shape, numpy.float32)
        minima = numpy.empty(shape, numpy.float32) if self.summary.asymmetric else None
        kind_of_q = "i4" if self._bits == 4 else "i8"
        squares = _llm.quantise(
            address, kind, stride, len(rows), cols, kind_of_q, group, minima is not None, q.ctypes.data,
            scales.ctypes.data, minima.ctypes.data if minima is not None else 0,
        )  # fmt: skip
        if minima is not None:
            if floats is None:
                floats = floats_of(tensor, rows)
            return with_zero_points(floats, scales, minima, group)
        return (q if self._bits == 4 else q ^ 0x80), scales, None, squares

    def quantization_config(self) -> dict[str, Any]:
        """The config's `quantization_config`: matrices with a group of their own are named, and so is what stays."""
        by_group: dict[tuple[int, int, bool], list[str]] = {}
        for name in self._groups:
            kind = self._bits_of(name), self._group_of_grid(name), self._has_zeros(name)
            by_group.setdefault(kind, []).append(name.removesuffix(".weight"))
        ignored = {name.removesuffix(".weight") for name in self.source.names() if name.endswith(".weight")}
        ignored = {
            name
            for name in ignored - {n for names in by_group.values() for n in names}
            if len(self.source.tensor(f"{name}.weight").shape) == 2 and "embed" not in name
        }
        return compressed_config(by_group, ignored)


def _write_configs(source: Path, folder: Path, checkpoint: Checkpoint, work: _Work, announce: Any) -> None:
    """config.json, and whatever else a model folder has beside its weights."""
    others = source
    if source.is_file():
        from anyaccel.inference.text.gguf_conversion import converted_tokenizer

        others = converted_tokenizer(source, announce)
        (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=1))
    for file in sorted(others.iterdir()):
        small = file.is_file() and not file.name.endswith(_NOT_COPIED) and file.stat().st_size <= _MAX_COPIED
        if small and file.name not in ("config.json", "anyaccel.json"):
            shutil.copyfile(file, folder / file.name)
    config = {key: value for key, value in checkpoint.config.items() if key not in ("torch_dtype", "dtype")}
    config |= {"dtype": "bfloat16", "quantization_config": work.quantization_config()}
    if work.untied:  # what the source's config.json says is not what its weights are
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=1))
