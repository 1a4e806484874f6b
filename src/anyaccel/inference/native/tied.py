# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint has a head of its own where its configuration ties the head to the embedding. Torch-free.

Such a checkpoint comes of training that untied the two and left the flag. transformers believes the weights then.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from anyaccel.inference.checkpoints.sources import BLOCKS, TensorSource, TensorView
from anyaccel.inference.families.family import Family
from anyaccel.inference.spec.decoder import DecoderSpec

_CHUNK_BYTES = 4 << 20  # of each of the two, compared and given back at a time


def own_head(source: TensorSource, family: Family, spec: DecoderSpec) -> tuple[str, str] | None:
    """The tensors of embedding and head, where `spec` ties them and both are stored with different values."""
    if not spec.tied:
        return None
    untied = replace(spec, tied=False)
    stored = []
    for name in ("embed", "head"):
        alternatives = family.names.parts(untied, name)
        found = next((each for each in alternatives if all(part.tensor in source for part in each)), None)
        if found is None:
            return None
        stored.append(found[0].tensor)
    return None if _equal(source, stored[0], stored[1]) else (stored[0], stored[1])


def _equal(source: TensorSource, embedding: str, head: str) -> bool:
    a, b = source.tensor(embedding), source.tensor(head)
    if not isinstance(a, TensorView) or not isinstance(b, TensorView):
        return embedding == head  # not compared: nobody stores one quantised matrix under two names
    if (a.type, a.shape) != (b.type, b.shape) or len(a.shape) != 2:
        return False
    if (a.address, a.strides) == (b.address, b.strides):
        return True
    if BLOCKS[a.type][0] > 1:
        return False
    try:
        step = max(_CHUNK_BYTES // max(a.shape[1] * BLOCKS[a.type][1], 1), 1)
        chunks = (range(first, min(first + step, a.shape[0])) for first in range(0, a.shape[0], step))
        return all(_same_rows(a, b, rows) for rows in chunks)
    finally:
        a.done(range(a.shape[0]))
        b.done(range(b.shape[0]))


def _same_rows(a: TensorView, b: TensorView, rows: range) -> bool:
    """Whether these rows have the same bytes in both."""
    import numpy

    same = numpy.array_equal(_rows(a, rows), _rows(b, rows))
    for each in (a, b):
        if each.is_by_rows:
            each.done(rows)
    return bool(same)


def _rows(tensor: TensorView, rows: range) -> Any:
    """The bits of rows, as unsigned numbers in place."""
    import numpy

    size = BLOCKS[tensor.type][1]
    length = (len(rows) - 1) * tensor.strides[0] + (tensor.shape[1] - 1) * tensor.strides[1] + size
    memory: Any = (ctypes.c_ubyte * length).from_address(tensor.address + rows.start * tensor.strides[0])
    return numpy.ndarray((len(rows), tensor.shape[1]), f"u{size}", memory, strides=tensor.strides)
