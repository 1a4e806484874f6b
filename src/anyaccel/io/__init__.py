# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, read and written in parallel: `save(state_dict, path)` and `load(path)`.

`FileSystemWriter` and `FileSystemReader` do the same for checkpoints of torch.distributed.checkpoint.

Importing this package does not import torch; names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel._lazy import lazy

if TYPE_CHECKING:
    from anyaccel.io.checkpoints import FileSystemReader, FileSystemWriter
    from anyaccel.io.reading import load
    from anyaccel.io.writing import save

__all__ = ["FileSystemReader", "FileSystemWriter", "load", "save"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "FileSystemReader": "anyaccel.io.checkpoints",
        "FileSystemWriter": "anyaccel.io.checkpoints",
        "load": "anyaccel.io.reading",
        "save": "anyaccel.io.writing",
    },
)
