# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file, or its tokenizer alone, once, to a Hugging Face folder in the user's cache."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel import env
from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.inference.cache_lock import locked, remove_if_free
from anyaccel.inference.counts import check_gguf
from anyaccel.inference.gguf_tokenizer import write_tokenizer
from anyaccel.inference.identity import identity
from anyaccel.inference.runtimes.gguf_file import GgufSource
from anyaccel.inference.runtimes.gguf_unused import check_all_used
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.outside import open_file, told

logger = logging.getLogger(__name__)

_MANIFEST = "anyaccel.json"
_FORMAT = 5  # raise it when a conversion changes, so that old ones are made again


# Fills a folder from a file, and says what takes a while.
_Save = Callable[[Path, Path, Callable[[str], object] | None], None]


def _fingerprint(source: Path) -> dict[str, object]:
    return {"format": _FORMAT, "source": identity(source)}


def _is_complete(folder: Path, fingerprint: dict[str, object]) -> bool:
    """True when the folder was made from this very file and each of its files still has its content."""
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        recorded = json.loads(manifest.read_bytes())
        if recorded["made_from"] != fingerprint:
            return False
        damaged = [name for name, checksum in recorded["files"].items() if _checksum(folder / name) != checksum]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s: damaged (%s); converting again", manifest, str(error) or type(error).__name__)
        return False
    if damaged:
        logger.warning("%s: its checksum is another one; converting again", folder / damaged[0])
    return not damaged


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def converted(source: Path, announce: Callable[[str], object] | None = None) -> Path:
    """The folder with the converted model of the GGUF file `source`, made when it is not there yet.

    The weights are dequantised to float32 safetensors: exactly the values that the file stands for.

    Args:
        announce: called with one line before a conversion, which takes a while.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or has an architecture that transformers cannot read; or the
            cache cannot be written.
    """
    try:
        return _made_once(source, "models", announce, _save_model)
    except OSError as error:
        raise ModelError(
            f"{source}: this model needs a converted copy, which cannot be written ({error}); "
            "set ANYACCEL_CACHE_DIR to a folder with room"
        ) from error


def converted_tokenizer(source: Path, announce: Callable[[str], object] | None = None) -> Path:
    """The folder with the tokenizer of the GGUF file `source` and its chat template, made when it is not there yet.

    Args:
        announce: called with one line before a conversion that needs transformers, which takes some seconds.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or its tokenizer is none that can be read.
        OSError: the cache cannot be written.
    """
    return _made_once(source, "tokenizers", announce, convert_tokenizer)


def _made_once(source: Path, kind: str, announce: Callable[[str], object] | None, save: _Save) -> Path:
    source = source.resolve()
    with open_file(source) as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{source}: not a GGUF file (it does not start with 'GGUF')")
    fingerprint = _fingerprint(source)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    parent = env.cache_dir() / kind
    folder = parent / f"{source.stem}-{key}"
    if _is_complete(folder, fingerprint):
        return folder
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(parent / f"{folder.name}.lock"):
        if not _is_complete(folder, fingerprint):  # another process may have made it meanwhile
            _make(source, folder, fingerprint, save, announce)
            _remove_former(folder, source)
    return folder


def _remove_former(folder: Path, source: Path) -> None:
    """Remove what was made of the file that was at `source` before."""
    for other in folder.parent.glob(f"{glob.escape(source.stem)}-*"):
        if other == folder or not (other / _MANIFEST).is_file():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            made_from = json.loads((other / _MANIFEST).read_bytes())["made_from"]
            if made_from["format"] == _FORMAT and made_from["source"]["path"] == str(source):
                remove_if_free(other)


@contextmanager
def _one_reader() -> Iterator[None]:
    """Parse the file once, and quickly: transformers does it for tokenizer, configuration and weights, 6 s each."""
    library: Any = importlib.import_module("gguf")
    array: Any = importlib.import_module("numpy").ndarray
    originals = library.GGUFReader, library.get_tensor_name_map

    @functools.cache
    def read(path: str) -> Any:
        reader = originals[0](path)
        for field in reader.fields.values():  # as what they are, numpy.memmap, they take thrice as long to go through
            field.parts[:] = [part.view(array) for part in field.parts]
        return reader

    library.GGUFReader = read
    library.get_tensor_name_map = functools.cache(originals[1])  # asked for anew for each module of a model
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = originals


@contextmanager
def _noting_unread() -> Iterator[list[str]]:
    """The names of tensors that transformers passes over while it loads a file, without a word."""
    library: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    unread: list[str] = []
    original = library.TENSOR_PROCESSORS, library.TensorProcessor

    def noting(processor: Any) -> Any:
        def process(self: Any, weights: Any, name: str, **options: Any) -> Any:
            result = processor.process(self, weights=weights, name=name, **options)
            # Without a name the processor has put it where it belongs itself.
            if result.name is not None and result.name not in options["tensor_key_mapping"]:
                unread.append(name)
            return result

        return type(processor.__name__, (processor,), {"process": process})

    library.TENSOR_PROCESSORS = {kind: noting(processor) for kind, processor in original[0].items()}
    library.TensorProcessor = noting(original[1])
    try:
        yield unread
    finally:
        library.TENSOR_PROCESSORS, library.TensorProcessor = original


def _make(
    source: Path,
    folder: Path,
    fingerprint: dict[str, object],
    save: _Save,
    announce: Callable[[str], object] | None,
) -> None:
    """Fill a folder beside `folder` and rename it."""
    for left in folder.parent.glob(f".{folder.name}-*"):  # of a conversion that was killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(source, beside, announce)
        files = [file for file in beside.rglob("*") if file.is_file()]
        checksums = {str(file.relative_to(beside)): _checksum(file) for file in files}
        (beside / _MANIFEST).write_text(json.dumps({"made_from": fingerprint, "files": checksums}, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _location(source: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "trust_remote_code": False}


def convert_tokenizer(source: Path, folder: Path, announce: Callable[[str], object] | None = None) -> None:
    """The tokenizer of the GGUF file `source` into the empty `folder`, by transformers where we lack something for it.

    Args:
        announce: called with one line before that.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or its tokenizer is none that can be read.
    """
    try:
        write_tokenizer(source, folder)
    except Unsupported as lacking:
        (announce or logger.warning)(f"no {lacking.feature}; transformers converts it, once")
        _tokenizer_by_transformers(source, folder)


def _tokenizer_by_transformers(source: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise AnyAccelError(f"reading a GGUF file needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    try:
        with _one_reader():
            AutoTokenizer.from_pretrained(**_location(source)).save_pretrained(folder)
    except Exception as error:  # the readers raise whatever a damaged file leads them to
        raise ModelError(f"{source}: transformers cannot read this GGUF file's tokenizer ({told(error)})") from error


def _save_model(source: Path, folder: Path, announce: Callable[[str], object] | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from anyaccel.inference.loading import pad_within_vocabulary

    if announce is not None:
        announce(f"converting {source.name} once, to {folder.parent}")
    check_gguf(source)
    try:
        with _one_reader():
            config = AutoConfig.from_pretrained(**_location(source))
            pad_within_vocabulary(config)
            with _noting_unread() as unread:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    **_location(source), config=config, dtype=torch.float32, output_loading_info=True
                )
    except Exception as error:  # the readers raise whatever a damaged file leads them to
        raise ModelError(f"{source}: transformers cannot read this GGUF file ({told(error)})") from error
    model, info = loaded
    tensors = GgufSource(source)
    check_all_used(tensors, set(tensors.names()) - set(unread))
    if missing := sorted(info["missing_keys"]):  # transformers makes them up
        raise ModelError(f"{source}: the file lacks {len(missing)} weights of the model, for example {missing[0]!r}")
    # The weights are plain now; transformers would refuse to save a model that still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    convert_tokenizer(source, folder, announce)
