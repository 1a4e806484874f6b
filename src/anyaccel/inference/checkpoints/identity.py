# SPDX-License-Identifier: Apache-2.0
"""What tells a model's files from others that have been put in their places, without reading them. Torch-free.

Size and modification time do not: `cp -p`, `rsync -t`, `tar` and `touch -r` give another file the time of the old one.
So the file's number and the time of its last change of any kind count, too, which nobody can set. The number of the
device does not: that of a network file system, btrfs or a container is another one on each host or after each mount.
Some file systems (of images, of object stores) have neither a file number nor such a time of their own; blocks from
all over a file tell what is in it there. What is small is read whole, and then its times are nothing to it.

Whoever cannot be told from the old one is taken for another: a model is then packed once more than it had to be.
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

from anyaccel.outside import open_file

# Of these the whole content counts, up to a size that no real one has.
_CONFIGS = frozenset(
    ("config.json", "generation_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
)
_SPLIT = re.compile(r"(.*)-\d{5}(-of-\d{5}\.gguf)", re.DOTALL)
_MOST_READ = 64 << 20
_BLOCK = 4096
_BLOCKS, _LEAST_BLOCKS = 64, 4  # that are read of all files of a model together, and of one file at least


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


def _indexed(index: Path) -> set[str]:
    """The files that an index names; none where it cannot be read, which the loading of the weights reports."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        if index.stat().st_size <= _MOST_READ:
            with open_file(index) as file:
                named = json.loads(file.read())["weight_map"].values()
            return {name for name in named if Path(name).name == name and (index.parent / name).is_file()}
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
    files = [path for path in files_of(source_path(source)) if path.name not in _CONFIGS]
    if any(path.suffix == ".safetensors" for path in files):  # then nothing is read from others
        files = [path for path in files if path.suffix == ".safetensors"]
    blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(files)))
    return {path.name: [path.stat().st_size, _digest(path, blocks)] for path in files}


def has_changed(found: dict[str, Any]) -> bool:
    """Whether the files are others than when `identity` told this, from what the file system says.

    Raises:
        OSError: one is gone. KeyError, TypeError: this is nothing that `identity` has told.
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
        elif hasattr(os, "posix_fadvise"):  # the system is to read nothing between the blocks
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for place in places:
            digest.update(os.pread(file.fileno(), length, place))
    return digest.hexdigest()
