# SPDX-License-Identifier: Apache-2.0
"""Models by the names of the Hugging Face Hub, in the cache that all of its programs share. Torch-free.

`hf:org/name` is a repository's folder, `hf:org/name:Q4_K_M` its GGUF file of that quantisation. What is local is found
without huggingface_hub, whose import takes long; only `pull` needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.checkpoints.folder_files import read_index

PREFIX = "hf:"
_NAME = re.compile(r"hf:([\w.\-]+/[\w.\-]+)(?::([\w.\-]+))?", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISED = re.compile(r"(?:^|[-._])((?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE)
_DEFAULT = "q4_k_m"  # of the GGUF files of a repository, as with llama.cpp and Ollama
_CONFIGS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubName:
    """A name.

    Attributes:
        variant: the quantisation of a GGUF file, or the file's name; "": there is none.
    """

    repository: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Raises UsageError if it is no such name."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in text or "--" in text:
            raise UsageError(
                f"{text}: must be hf:ORGANISATION/NAME, or hf:ORGANISATION/NAME:QUANTISATION for a GGUF file"
            )
        return cls(found[1], found[2] or "")

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f":{self.variant}" if self.variant else "")

    @property
    def folder(self) -> Path:
        """Its folder in the cache."""
        return cache_folder() / f"models--{self.repository.replace('/', '--')}"


@dataclass(frozen=True)
class LocalModel:
    """A model in the cache.

    Attributes:
        path: the folder or file that commands take.
        size: bytes of its files.
        pulled: when, in seconds since 1970.
        complete: whether all of its weights are there.
    """

    name: HubName
    path: Path
    size: int
    pulled: float
    complete: bool = True


def cache_folder() -> Path:
    """The folder of the hub's cache, by the variables that all of its programs follow."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if given := os.environ.get(variable):
            return Path(given).expanduser() / below
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def local_models() -> list[LocalModel]:
    """All that the cache has, by name."""
    found: list[LocalModel] = []
    with contextlib.suppress(OSError):
        for folder in sorted(cache_folder().glob("models--*--*")):
            _, *parts = folder.name.split("--")
            if len(parts) == 2:
                found += _models_of(HubName("/".join(parts)))
    return found


def local_path(text: str) -> Path:
    """The folder or file of a name.

    Raises:
        UsageError: it is no such name, or is not here; the error says how to get it.
    """
    name = HubName.parse(text)
    found = _chosen(name, _models_of(name))
    if found is None or not found.complete:
        what = "is not here" if found is None else "is here in parts only"
        others = ", ".join(str(each.name) for each in _models_of(name) if each.complete)
        hint = f"; here is {others}" if others else ""
        raise UsageError(f"{name} {what}{hint}: get it with `anyaccel models pull {name}`")
    return found.path


def _models_of(name: HubName) -> list[LocalModel]:
    """The models in the repository's folder: that of the last pull."""
    snapshot = _snapshot(name)
    if snapshot is None:
        return []
    files = [file for file in snapshot.rglob("*") if file.is_file()]
    pulled = max((file.stat().st_mtime for file in files), default=0.0)
    found = []
    if (snapshot / "config.json").is_file():
        weights = [file for file in files if file.suffix in (".safetensors", ".bin")]
        if weights:
            size = sum(file.stat().st_size for file in files if file.suffix != ".gguf")
            found.append(LocalModel(HubName(name.repository), snapshot, size, pulled, _has_all(snapshot)))
    for first, parts in gguf_files(str(file.relative_to(snapshot)) for file in files).items():
        size = sum((snapshot / part).stat().st_size for part in parts)
        complete = len(parts) == _count_of(first)
        found.append(
            LocalModel(HubName(name.repository, variant_of(first)), snapshot / parts[0], size, pulled, complete)
        )
    return found


def _snapshot(name: HubName) -> Path | None:
    """The folder of the repository's files as of the last pull."""
    with contextlib.suppress(OSError):
        commit = (name.folder / "refs" / "main").read_text().strip()
        if re.fullmatch(r"[0-9a-f]{4,64}", commit) and (found := name.folder / "snapshots" / commit).is_dir():
            return found
    with contextlib.suppress(OSError):
        folders = [each for each in (name.folder / "snapshots").iterdir() if each.is_dir()]
        return max(folders, key=lambda each: each.stat().st_mtime, default=None)
    return None


def _has_all(snapshot: Path) -> bool:
    """Whether the weights that an index names are there."""
    try:
        for index in snapshot.glob("*.index.json"):
            read_index(index)
    except AnyAccelError:
        return False
    return True


def gguf_files(names: Iterator[str] | Sequence[str]) -> dict[str, list[str]]:
    """GGUF files of language models: the first file's name -> all that it was split into."""
    found: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not Path(name).name.startswith("mmproj"):
            stem = _PART.sub("", name.removesuffix(".gguf"))
            found.setdefault(firsts.setdefault(stem, name), []).append(name)
    return found


def _count_of(first: str) -> int:
    found = re.search(r"-of-(\d{5})\.gguf$", first)
    return int(found[1]) if found else 1


def variant_of(file: str) -> str:
    """What a name says behind the colon for a GGUF file: its quantisation, or its whole name."""
    stem = _PART.sub("", Path(file).name.removesuffix(".gguf"))
    found = _QUANTISED.search(stem)
    return found[1] if found else stem


def _chosen(name: HubName, found: Sequence[LocalModel]) -> LocalModel | None:
    """The model that a name means: without a variant the folder, or the GGUF file that is taken by default."""
    if name.variant:
        return next((each for each in found if each.name.variant.lower() == name.variant.lower()), None)
    folder = next((each for each in found if not each.name.variant), None)
    usual = next((each for each in found if each.name.variant.lower() == _DEFAULT), None)
    return folder or usual or (found[0] if len(found) == 1 else None)


# Pulling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as the hub lists it.

    Attributes:
        sha256: of a large file.
        blob: git's id of another one.
    """

    name: str
    size: int
    sha256: str = ""
    blob: str = ""


def pull(text: str, quiet: bool = False) -> LocalModel:
    """Download a model, or what is missing of it, and check every file.

    Raises:
        UsageError: there is no such name, or it has several GGUF files and none was chosen.
        AnyAccelError: the hub cannot be reached, refuses, or a file is not what the hub says.
    """
    name = HubName.parse(text)
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise AnyAccelError(f"pulling models needs another package: pip install huggingface_hub ({error})") from None
    if quiet:
        import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        info = hub.HfApi().model_info(name.repository, files_metadata=True)
        files = wanted_files(name, [_remote(each) for each in info.siblings or ()])
        cache = cache_folder()
        for file in files:
            for attempt in range(2):  # a damaged file in the cache is downloaded again, once
                path = Path(
                    hub.hf_hub_download(
                        name.repository,
                        file.name,
                        revision=info.sha,
                        cache_dir=cache,
                        force_download=attempt > 0,
                    )
                )
                if is_intact(path, file):
                    break
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            else:
                raise AnyAccelError(
                    f"{name}: {file.name} is not what the hub says it is (its checksum differs); try again"
                )
        reference = name.folder / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(str(info.sha))
    except AnyAccelError:
        raise
    except Exception as error:
        raise AnyAccelError(_failure(name, error)) from error
    found = _chosen(name, _models_of(name))
    if found is None or not found.complete:
        raise AnyAccelError(f"{name}: the repository has no weights that can be read here (safetensors, bin or GGUF)")
    return found


def _remote(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    return RemoteFile(sibling.rfilename, sibling.size or 0, lfs.sha256 if lfs else "", sibling.blob_id or "")


def wanted_files(name: HubName, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files of a repository that a name means: weights in one form, and what belongs to them.

    Raises:
        UsageError: there are several GGUF files and none was chosen, or there is no such file.
    """
    by_name = {file.name: file for file in files}
    top = [file for file in files if "/" not in file.name]
    weights = [file for file in top if file.name.endswith(".safetensors") and not file.name.startswith("consolidated")]
    weights = weights or [file for file in top if file.name.endswith(".bin") and "training_args" not in file.name]
    ggufs = gguf_files(list(by_name))
    if not name.variant and weights and "config.json" in by_name:
        other = ".bin" if weights[0].name.endswith(".safetensors") else ".safetensors"
        kept = [file for file in top if file.name.endswith(_CONFIGS) and not file.name.endswith(f"{other}.index.json")]
        return [*kept, *weights]
    wanted = name.variant.lower() or _DEFAULT
    for first, parts in ggufs.items():
        if variant_of(first).lower() == wanted or (not name.variant and len(ggufs) == 1):
            return [by_name[part] for part in parts]
    there = ", ".join(sorted(f"{PREFIX}{name.repository}:{variant_of(first)}" for first in ggufs))
    if not there:
        what = f"no GGUF file {name.variant}" if name.variant else "no weights that can be read here"
        raise UsageError(f"{name}: the repository has {what}")
    raise UsageError(f"{name}: which of its GGUF files? There is {there}")


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Whether a file on the disk is what the hub has."""
    if path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open(path, "rb") as opened:
        while part := opened.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest() == (file.sha256 or file.blob or digest.hexdigest())


def _failure(name: HubName, error: Exception) -> str:
    """What to do about an error of the hub's library."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    text = " ".join(str(error).split())[:300]
    if "GatedRepoError" in kinds:
        return (
            f"{name}: its authors give it to those who accept their terms: do that on its page, and run `hf auth login`"
        )
    if "RepositoryNotFoundError" in kinds:
        return f"{name}: no such repository, or a private one: check the name, or run `hf auth login`"
    if "OfflineModeIsEnabled" in kinds:
        return f"{name}: HF_HUB_OFFLINE is set, and pulling needs the network; `anyaccel models` lists what is here"
    if isinstance(error, OSError) and not {"HfHubHTTPError", "ConnectionError"} & set(kinds):
        return f"{name}: {text or kinds[0]}"
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return (
        f"{name}: {where} does not answer as it should ({text or kinds[0]}): what has been downloaded is kept, so try "
        "again later; `anyaccel models` lists what is here"
    )


# Removing -------------------------------------------------------------------------------------------------


def remove(text: str) -> int:
    """Delete a model from the cache; returns how many bytes that has freed.

    Raises:
        UsageError: it is no such name, or is not here.
    """
    name = HubName.parse(text)
    found = _models_of(name)
    if name.variant:
        chosen = _chosen(name, found)
        if chosen is None:
            raise UsageError(f"{name} is not here; `anyaccel models` lists what is")
        if len(found) > 1:
            return _remove_files(chosen)
    if not name.folder.is_dir():
        raise UsageError(f"{name} is not here; `anyaccel models` lists what is")
    size = sum(file.stat().st_size for file in name.folder.rglob("*") if file.is_file() and not file.is_symlink())
    shutil.rmtree(name.folder)
    shutil.rmtree(cache_folder() / ".locks" / name.folder.name, ignore_errors=True)
    return size


def _remove_files(model: LocalModel) -> int:
    """Delete the files of one GGUF model of several."""
    stem = _PART.sub("", model.path.name.removesuffix(".gguf"))
    size = 0
    for file in model.path.parent.iterdir():
        if file.suffix == ".gguf" and _PART.sub("", file.name.removesuffix(".gguf")) == stem:
            blob = file.resolve()
            size += blob.stat().st_size
            file.unlink()
            blob.unlink(missing_ok=True)
    return size
