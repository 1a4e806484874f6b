# SPDX-License-Identifier: Apache-2.0
"""save(): writes tensors to a safetensors file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.io.progress import progress_bar
from anyaccel.io.reading import new_handle
from anyaccel.ops._dense import why_no_memory
from anyaccel.ops.aio.requests import MemoryRange, PathLike
from anyaccel.safetensors.header import is_unicode, make_header
from anyaccel.safetensors.tensors import NAMES, file_layout


def save(
    state_dict: Mapping[str, torch.Tensor],
    path: PathLike,
    *,
    metadata: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> None:
    """Write tensors to a safetensors file.

    The file is written beside, synced and renamed: at `path` is the old file or all of the new one, whatever happens.
    So `path` is a regular file or a new name, no device or FIFO.
    Strided tensors and those of an accelerator are copied first.

    Args:
        metadata: text that goes into the header.
        progress: a progress bar when it takes longer than a second; None: if stderr is a terminal.

    Raises:
        ModelError: a value is no dense tensor, has a dtype that the format lacks, or shares memory with another.
        AioError: the file cannot be written, or there is no space.
        UsageError: a device, FIFO or socket is at `path`; `state_dict` or `metadata` is no dict.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"save(): the first argument must be a dict of tensors, not a {type(state_dict).__name__}")
    for name, tensor in state_dict.items():
        _check(name, tensor)
    if metadata is not None:
        if not isinstance(metadata, Mapping):
            raise UsageError(f"save(): metadata= must be a dict of text, not a {type(metadata).__name__}")
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ModelError(f"metadata {key!r}: {value!r} must be text; use str() or json.dumps()")
            if not is_unicode(key) or not is_unicode(value):
                raise ModelError(f"metadata {key!r}: {value!r} has an unpaired surrogate, which UTF-8 cannot hold")
    _check_sharing(state_dict)
    # The widest elements first, so that every tensor is aligned.
    names = sorted(state_dict, key=lambda name: (-state_dict[name].element_size(), name))
    hosts = [state_dict[name].detach().resolve_conj().resolve_neg().cpu().contiguous() for name in names]
    header, offsets = make_header(
        [(name, *file_layout(host.dtype, tuple(host.shape))) for name, host in zip(names, hosts, strict=True)], metadata
    )
    first = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    pieces = [MemoryRange.of(first, 0)]
    pieces += [MemoryRange.of(host, offset) for offset, host in zip(offsets, hosts, strict=False) if host.nbytes]
    with progress_bar(Path(os.fsdecode(path)).name, offsets[-1], progress) as show:
        new_handle().transfer(path, pieces, write=True, write_atomic=True, progress=show)


def _check(name: str, tensor: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":
        raise ModelError(f"{name!r} cannot be the name of a tensor in a safetensors file")
    if not is_unicode(name):
        raise ModelError(f"the name {name!r} has an unpaired surrogate, which a safetensors file cannot hold")
    if not isinstance(tensor, torch.Tensor):
        raise ModelError(f"{name!r} is a {type(tensor).__name__}; a safetensors file has tensors only")
    kind = "quantized" if tensor.is_quantized else why_no_memory(tensor)
    if kind:
        raise ModelError(f"tensor {name!r} is {kind}; a safetensors file has dense tensors only")
    if tensor.dtype not in NAMES:
        raise ModelError(f"tensor {name!r} has dtype {tensor.dtype}, which a safetensors file cannot have")
    if tensor.dtype == torch.float4_e2m1fn_x2 and not tensor.dim():
        raise ModelError(f"tensor {name!r} of {tensor.dtype} has no dimension along which its two values could lie")


def _check_sharing(state_dict: Mapping[str, torch.Tensor]) -> None:
    spans = []
    for name, tensor in state_dict.items():
        if tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + (reach + 1) * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(spans):
        if device == other_device and begin < end:
            raise ModelError(
                f"tensors {name!r} and {other!r} share memory, which a safetensors file cannot express; leave one out "
                "or save a clone() of it"
            )
