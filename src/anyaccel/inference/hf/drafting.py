# SPDX-License-Identifier: Apache-2.0
"""Draft models of engines and of Hugging Face's `generate`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel import _llm
from anyaccel.errors import UsageError
from anyaccel.inference.native.draft import (
    TextBridge,
    attach,
    check_draft_path,
    lacks_draft,
    same_tokens,
    say_if_useless,
)
from anyaccel.inference.native.runtime import NativeModel, Progress

if TYPE_CHECKING:
    from anyaccel.inference.config import InferenceConfig

logger = logging.getLogger(__name__)

# Loads a rank's part of a model, given its rank, the number of ranks on its host, and what to call while it loads.
Load = Callable[[int, int, Progress | None], NativeModel]


def draft_for(
    native: NativeModel, model: Any, settings: InferenceConfig, join: Callable[[Load, Path | None], NativeModel]
) -> None:
    """Give a model the draft model that `settings` name.

    Args:
        model: the path or module that `native` was made from.
        join: makes all ranks load their part of a path, and connects them.

    Raises:
        UsageError, ModelError: it cannot draft for this model.
    """
    given = settings.draft
    if not isinstance(given, str | Path):
        draft = native_of(given)
        if draft is None or draft is native:
            raise UsageError(f"draft={type(given).__name__}: must be the path of a model, or a native engine")
        _check_vocabulary(native, draft)
        attach(native, draft)
        say_if_useless(native, "the draft model", logger.warning)
        return
    path = Path(given).expanduser()
    check_draft_path(path)
    alone = settings.tensor_parallel.tp_size * settings.pipeline_parallel.size == 1
    texts = None if not isinstance(model, str | Path) else _texts(Path(model).expanduser(), path)
    if texts is not None and not alone:
        raise UsageError(
            f"draft={str(path)!r}: its tokens are not those of {model}; only one process drafts through text"
        )
    from anyaccel.inference.device.loading import load_decoder
    from anyaccel.inference.spec.mapping import Unsupported

    own = replace(settings, draft=None, dtype="auto" if path.is_file() else "int4", kv_cache="auto", cache_bytes=0)
    try:
        draft = join(lambda rank, on_host, told: load_decoder(path, own, rank, on_host, told, "native"), path)
    except Unsupported as lack:
        raise lacks_draft(path, lack.feature) from None
    if texts is None:
        _check_vocabulary(native, draft)
    attach(native, draft, texts)
    say_if_useless(native, path.name, logger.warning)


def _texts(model: Path, draft: Path) -> TextBridge | None:
    """A bridge between the tokens of two models; None if they have the same tokens."""
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    own, other = load_text_tokenizer(model), load_text_tokenizer(draft)
    return None if same_tokens(own, other) else TextBridge(own, other)


def _check_vocabulary(native: NativeModel, draft: NativeModel) -> None:
    """Refuse a draft model with another vocabulary size; models in memory have no tokenizers to compare."""
    own, other = native.whole_spec.vocab, draft.whole_spec.vocab
    if own != other:
        raise UsageError(f"the draft model has {other} tokens and the model {own}: give paths, which have tokenizers")


def native_of(model: Any) -> NativeModel | None:
    """The native model of an engine or of a module that runs natively; None for anything else."""
    found = getattr(model, "native", None) or getattr(model, "_native", None)
    return found if isinstance(found, NativeModel) and isinstance(found.model, _llm.DecoderModel) else None


class _HuggingFaceTokenizer:
    """Hugging Face's tokenizer as an `inference.native.draft.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, tokens: list[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text


def can_assist(native: NativeModel, assistant: Any, tokenizer: Any, other: Any) -> bool:
    """Whether an `assistant_model` of `generate` drafts natively.

    Args:
        tokenizer, other: of the model and of the assistant, where the call has them.
    """
    draft = native_of(assistant)
    if draft is None or draft.model is native.model or draft.draft is not None or draft.ranks != native.ranks:
        return False
    if tokenizer is not None and other is not None:
        return native.ranks == 1
    return other is None and draft.whole_spec.vocab == native.whole_spec.vocab


@contextmanager
def assisted(native: NativeModel, assistant: Any, tokenizer: Any, other: Any) -> Iterator[None]:
    """Let an assistant for which `can_assist` holds draft within the block; None: keep the model's own drafts."""
    if assistant is None:
        yield
        return
    before, draft = native.draft, native_of(assistant)
    texts = None
    if tokenizer is not None and other is not None and tokenizer.get_vocab() != other.get_vocab():
        texts = TextBridge(_HuggingFaceTokenizer(tokenizer), _HuggingFaceTokenizer(other))
    attach(native, draft, texts)
    try:
        yield
    finally:
        attach(native, before)
