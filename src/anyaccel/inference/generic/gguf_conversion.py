# SPDX-License-Identifier: Apache-2.0
"""Converts the model of a GGUF file to a Hugging Face folder in the user's cache, by transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.conversions import made_once
from anyaccel.inference.checkpoints.counts import check_gguf
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.gguf_unused import check_all_used
from anyaccel.inference.text.gguf_conversion import convert_tokenizer, location, one_reader
from anyaccel.validation import error_text


def converted(source: Path, announce: Callable[[str], object] | None = None) -> Path:
    """The folder with the converted model of the GGUF file `source`, which is made if it does not exist.

    The weights are dequantised, exactly, to float32 safetensors.

    Args:
        announce: called with one line before a conversion, which takes a while.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or has an architecture that transformers cannot read; or the
            cache cannot be written.
    """
    try:
        return made_once(source, "models", announce, _save_model)
    except OSError as error:
        raise ModelError(
            f"{source}: this model needs a converted copy, which cannot be written ({error}); "
            "set ANYACCEL_CACHE_DIR to a folder with room"
        ) from error


@contextmanager
def _noting_unread() -> Iterator[list[str]]:
    """Within the block, list the tensors that transformers silently leaves out of the model that it loads."""
    library: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    unread: list[str] = []
    original = library.TENSOR_PROCESSORS, library.TensorProcessor

    def noting(processor: Any) -> Any:
        def process(self: Any, weights: Any, name: str, **options: Any) -> Any:
            result = processor.process(self, weights=weights, name=name, **options)
            # A result without a name means that the processor has stored the tensor itself, such as that of an expert.
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


def _save_model(source: Path, folder: Path, announce: Callable[[str], object] | None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    if announce is not None:
        announce(f"converting {source.name} once, to {folder.parent}")
    check_gguf(source)
    try:
        with one_reader():
            config = AutoConfig.from_pretrained(**location(source))
            pad_within_vocabulary(config)
            with _noting_unread() as unread:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    **location(source), config=config, dtype=torch.float32, output_loading_info=True
                )
    except Exception as error:  # a damaged file may cause any error
        raise ModelError(f"{source}: transformers cannot read this GGUF file ({error_text(error)})") from error
    model, info = loaded
    tensors = GgufSource(source)
    check_all_used(tensors, set(tensors.names()) - set(unread))
    if missing := sorted(info["missing_keys"]):  # transformers has filled them with random numbers
        raise ModelError(f"{source}: the file lacks {len(missing)} weights of the model, for example {missing[0]!r}")
    # The weights are plain now; transformers would refuse to save a model that still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _write_on_any_rank(model)
    model.save_pretrained(folder)
    convert_tokenizer(source, folder, announce)


def _write_on_any_rank(model: Any) -> None:
    """Let transformers write the files of this model on whichever rank of a job converts it.

    Once torch.distributed has started, transformers silently writes files on the main rank only. The conversion runs
    on the one rank that holds the lock.
    """
    model.should_save_on_this_rank = lambda _is_main_process: True


def pad_within_vocabulary(config: Any) -> None:
    """Remove a padding token outside of the vocabulary, as a family's default may be (Phi-3's).

    nn.Embedding refuses it, and needs it only to know which row gets no gradient.
    """
    text = config.get_text_config()
    pad, vocabulary = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        text.pad_token_id = None
