# SPDX-License-Identifier: Apache-2.0
"""A model that guesses tokens for another one: by the same numbers, or through the text. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from anyaccel.errors import UsageError
from anyaccel.inference.checkpoints.model_path import check_model_path
from anyaccel.inference.families.eagle import draft_tokens, is_eagle3
from anyaccel.validation import read_json

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.inference.native.runtime import NativeModel

MTP = "mtp"  # stands for the layer of the model's own checkpoint that drafts (multi-token prediction)
MOST_DRAFTS = 15  # of a pass, beside the token that it chooses anyway
_KEPT = 16  # answers whose text is remembered
_CONTEXT = 8  # tokens around a seam that are decoded together, as some take part of their text from others
_BROKEN = "\ufffd"  # what a character of which bytes are missing is decoded as
# Of config.json: heads that guess from the hidden states of the model they belong to.
_HEADS = ("eagle", "medusa", "nextn", "mtp", "hydra")


class Tokenizer(Protocol):
    """What is asked of a tokenizer: see `inference.text.tokenizer.TextTokenizer`."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def decode(self, tokens: list[int], special: bool = False) -> str: ...


def check_draft_path(path: Path) -> bool:
    """Whether it is the head of a model that drafts here; refuse what is no model, and other heads.

    Raises:
        UsageError, ModelError: see `check_model_path`.
    """
    if path.is_dir() and (path / "config.json").is_file() and is_eagle3(read_json(path / "config.json")):
        return True
    check_model_path(path)
    if not path.is_dir():
        return False
    config = read_json(path / "config.json")
    kinds = config.get("architectures")
    names = [*(kinds if isinstance(kinds, list) else []), config.get("model_type")]
    found = [name for name in names if isinstance(name, str) and any(head in name.lower() for head in _HEADS)]
    if found or "eagle_config" in config:
        raise UsageError(
            f"draft {path}: {found[0] if found else 'eagle_config'} is a head that guesses from the hidden states of "
            "its model, of a kind that is not supported: give a model of its own, or an EAGLE-3 head"
        )
    return False


def borrow(native: NativeModel, draft: NativeModel, path: Path) -> None:
    """Let a head that drafts compute with the embedding, and the head, of its model.

    Raises:
        UsageError: it is not this model's.
    """
    from anyaccel.inference.native.checkpoint import read_checkpoint

    inputs = draft.spec.hidden_inputs
    assert inputs is not None
    head, model = cast("_llm.DecoderModel", draft.model), cast("_llm.DecoderModel", native.model)
    try:
        head.borrow(model, draft_tokens(read_checkpoint(path).source, draft.spec) if inputs.draft_vocab else [])
    except UsageError as error:
        raise UsageError(f"draft {path}: it is not a head of this model ({error})") from None


def find_native(model: Any) -> NativeModel | None:
    """The native model of an engine or of a module that runs natively; None for anything else."""
    from anyaccel import _llm

    native = getattr(model, "native", None) or getattr(model, "_native", None)
    return native if isinstance(getattr(native, "model", None), _llm.DecoderModel) else None


def same_tokens(tokenizer: Any, other: Any, count: int) -> bool:
    """Whether two tokenizers number their first `count` tokens alike."""
    return all(tokenizer.piece(token) == other.piece(token) for token in range(count))


def attach(native: NativeModel, draft: NativeModel | None, texts: TextBridge | None = None) -> None:
    """Let `draft` guess for `native`; None ends it.

    Args:
        texts: between their tokens, where these are not the same.

    Raises:
        UsageError: they are divided among other ranks, or are one.
    """
    if draft is None:
        native.model.set_draft(None)
    elif texts is None:
        native.model.set_draft(draft.model)
    else:
        native.model.set_draft(draft.model, texts.to_draft, texts.from_draft)
    native.draft = draft


def warn_if_useless(native: NativeModel, name: str, line: Callable[[str], object]) -> None:
    """Warn of a draft model that reads so much for a token that its drafts cannot pay: it is never asked for any."""
    cost = native.model.draft_cost
    if cost is not None and not native.model.draft_can_pay:
        line(f"drafts: {name} reads {cost:.0%} of the model's bytes for a token, so drafts cannot pay and are not made")


class TextBridge:
    """Tokens of a model as those of its draft model, and back, through the text.

    The text that is new is tokenised, together with what the draft model's last tokens stand for. What it says is
    tokenised behind the model's last tokens.
    """

    def __init__(self, tokenizer: Tokenizer, draft: Tokenizer) -> None:
        self._own = tokenizer
        self._draft = draft
        self._known: list[tuple[list[int], list[int]]] = []  # the latest last

    def to_draft(self, tokens: list[int]) -> list[int]:
        """The draft model's tokens; none where the text breaks off within a character."""
        known = max((each for each in self._known if tokens[: len(each[0])] == each[0]), key=_length, default=None)
        found = None if known is None else self._longer(tokens, *known)
        if found is None:
            text = self._own.decode(tokens, special=True)
            found = [] if text.endswith(_BROKEN) else self._draft.encode(text)
        if not found:
            return []
        if known is not None:
            self._known.remove(known)
        self._known = [*self._known[1 - _KEPT :], (list(tokens), found)]
        return found

    def _longer(self, tokens: list[int], known: list[int], found: list[int]) -> list[int] | None:
        """What was found for the first ones, with what has come since; None where it does not go on like that."""
        text = _decode_following(self._own, known, tokens[len(known) :])
        if text is None:
            return None
        if text.endswith(_BROKEN):
            return []
        rest, last = found[:-_CONTEXT], found[-_CONTEXT:]
        ending = self._draft.decode(last, special=True)
        if rest and self._draft.encode(ending, special=False) == last:  # tokens may join those before them
            return rest + self._draft.encode(ending + text, special=False)
        return found + self._draft.encode(text, special=False)

    def from_draft(self, tokens: list[int], before: list[int], said: list[int]) -> list[int]:
        """The model's tokens of what the draft model says behind `before`, which stands for `tokens`."""
        text = _decode_following(self._draft, before, said)
        if not text:
            return []
        text = text.rstrip(_BROKEN)
        last = tokens[-_CONTEXT:]
        together = self._own.encode(self._own.decode(last, special=True) + text, special=False)
        if together[: len(last)] == last:
            return together[len(last) :]
        return self._own.encode(text, special=False)


def _length(known: tuple[list[int], list[int]]) -> int:
    return len(known[0])


def _decode_following(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str | None:
    """The text of tokens that follow others; None where these have another text with them."""
    start = tokenizer.decode(before[-_CONTEXT:], special=True)
    text = tokenizer.decode([*before[-_CONTEXT:], *tokens], special=True)
    return text[len(start) :] if text.startswith(start) else None
