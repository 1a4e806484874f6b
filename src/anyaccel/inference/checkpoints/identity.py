# SPDX-License-Identifier: Apache-2.0
"""Identifies a model's files, to notice when others have been put in their places, without reading them. Torch-free.

Size and modification time are not enough: `cp -p`, `rsync -t`, `tar` and `touch -r` preserve the time of the old file.
So the inode number and the time of the last status change count too, which nobody can set. The device number does not:
on a network file system, btrfs or in a container it differs between hosts or mounts. Some file systems (of images, of
object stores) have no stable inode number or change time, so blocks from all over a file are hashed too. Small
configuration files are hashed completely, and their times do not count.

In doubt a file counts as another one, and a model is packed once more than necessary.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from anyaccel.inference.checkpoints.folder_files import is_inside
from anyaccel.validation import open_file

# Files whose whole content is hashed, up to a size that no real one has.
_CONFIGS = frozenset(
    (
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    )
)
_SPLIT = re.compile(r"(.*)-\d{5}(-of-\d{5}\.gguf)", re.DOTALL)
_MOST_READ = 64 << 20
_BLOCK = 4096
_BLOCKS, _LEAST_BLOCKS = 64, 4  # blocks that are hashed, of all files of a model together and at least of each file


def source_path(source: Path) -> Path:
    """The path with links resolved; a file of a split model keeps its name, by which its other files are found."""
    absolute = source.absolute()
    return absolute.parent.resolve() / absolute.name if _SPLIT.fullmatch(source.name) else source.resolve()


def files_of(source: Path) -> list[Path]:
    """The files of a model: weights and configs of a folder, or a GGUF file and the others it was split into."""
    if source.is_dir():
        with os.scandir(source) as entries:
            names = {e.name for e in entries if e.name in _CONFIGS or e.name.endswith((".safetensors", ".bin"))}
        for index in [name for name in names if name.endswith(".index.json")]:
            names |= _indexed(source / index)
        return sorted(source / name for name in names)
    split = _SPLIT.fullmatch(source.name)
    if split is None:
        return [source]
    others = source.parent.glob(f"{glob.escape(split[1])}-*{glob.escape(split[2])}")
    return sorted({source, *(each for each in others if _SPLIT.fullmatch(each.name))})


def size_of(source: Path) -> int:
    """Bytes of the files of a model."""
    size = 0
    for file in files_of(source):
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return size


def _indexed(index: Path) -> set[str]:
    """The files that an index names; none if it cannot be read, which is reported when the weights are loaded."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        if index.stat().st_size <= _MOST_READ:
            with open_file(index) as file:
                named = json.loads(file.read())["weight_map"].values()
            return {name for name in named if is_inside(name) and (index.parent / name).is_file()}
    return set()


def identity(source: Path) -> dict[str, Any]:
    """What identifies a model's files, as JSON values.

    Raises:
        OSError: one is gone.
    """
    source = source_path(source)
    files = files_of(source)
    blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(files)))
    return {"path": str(source), "files": [[*_status(path), _digest(path, blocks)] for path in files]}


def weights_of(source: Path) -> dict[str, list[Any]]:
    """Size and digest of each file with weights, as JSON values: equal for copies of a model on several hosts.

    Raises:
        OSError: one is gone.
    """
    source = source_path(source)
    files = [path for path in files_of(source) if path.name not in _CONFIGS]
    if any(path.suffix == ".safetensors" for path in files):  # other files are not read then
        files = [path for path in files if path.suffix == ".safetensors"]
    blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(files)))
    folder = source if source.is_dir() else source.parent
    return {str(path.relative_to(folder)): [path.stat().st_size, _digest(path, blocks)] for path in files}


def has_changed(found: dict[str, Any]) -> bool:
    """Whether the files have changed since `identity` returned `found`, without reading them.

    Raises:
        OSError: one is gone. KeyError, TypeError: `found` is not a result of `identity`.
    """
    return [_status(path) for path in files_of(Path(found["path"]))] != [each[:-1] for each in found["files"]]


def _status(path: Path) -> list[Any]:
    status = path.stat()
    if path.name in _CONFIGS:
        return [path.name, status.st_size]
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest(path: Path, blocks: int) -> str:
    """A digest of a whole file when it is a small config, else of `blocks` blocks that are spread over it."""
    digest = hashlib.blake2b(digest_size=16)
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _BLOCK)
        places = sorted({last * number // (blocks - 1) for number in range(blocks)})
        length = _BLOCK
        if path.name in _CONFIGS and size <= _MOST_READ:
            places, length = [0], size
        elif hasattr(os, "posix_fadvise"):  # no read-ahead between the blocks
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for place in places:
            digest.update(os.pread(file.fileno(), length, place))
    return digest.hexdigest()
