# SPDX-License-Identifier: Apache-2.0
"""What a decoder is to the engine, and what is known of a model that serves. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.errors import UsageError
from anyaccel.serve.contract import ModelFacts
from anyaccel.serve.pages import PAGE
from anyaccel.serve.slots import Ahead, Outcome, Work

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel
    from anyaccel.inference.ranks.options import ModelOptions
    from anyaccel.serve.settings import EngineSettings

ONLY_NATIVE = "anyaccel serve has models of the native and the device runtime only"
ONLY_ALONE = "anyaccel serve has replicas of a model on the host's own processor only; start a server for each device"


def lacking(feature: str) -> UsageError:
    """The error for a model that needs what these do not have."""
    return UsageError(
        f"{ONLY_NATIVE}, which have no {feature}; anyaccel generate and anyaccel chat run other models too, through "
        "transformers' own code"
    )


class Decoder(Protocol):
    """A model that takes steps.

    Attributes:
        page_bytes: of a page of keys and values, on all ranks together.
        cache_pages: how many there may be.
        shares: whether what one request has computed holds for others.
        goes_ahead: whether apply() takes several steps when it is given leave.
    """

    facts: ModelFacts
    page_bytes: int
    cache_pages: int
    shares: bool
    goes_ahead: bool

    def apply(self, work: Work, ahead: Ahead | None = None) -> Outcome:
        """Take a step.

        Raises:
            AnyAccelError: it is of no use any more.
        """

    def check(self) -> None:
        """Whether it lives, while it has nothing to do.

        Raises:
            AnyAccelError: it is of no use any more.
        """

    def late(self) -> bool:
        """Whether its step takes much longer than those before it; asked in any thread."""

    def close(self) -> None:
        """Leave nothing behind."""


def shares_of(native: NativeModel) -> bool:
    """Whether what one request has computed holds for others.

    With longrope and dynamic NTK, what is in the cache depends on how long the whole text is.
    """
    return not any(rope.long_inv_freq or rope.dynamic_from for rope in native.spec.ropes)


def check_pages(pages: int, page_bytes: int) -> None:
    """What a cache must have room for.

    Raises:
        UsageError: not even for one page.
    """
    if pages < 1:
        raise UsageError(
            f"the key/value cache has no room for its smallest part, {PAGE} tokens of {page_bytes} bytes in all; "
            "--cache-bytes sets its size"
        )


def limited(facts: ModelFacts, cache_pages: int) -> ModelFacts:
    """The facts, with no longer context than the cache has room for."""
    room = cache_pages * PAGE
    return replace(facts, context=min(facts.context or room, room))


def context_of(context: int, settings: EngineSettings) -> int:
    """The model's context, or what is left of it.

    Raises:
        UsageError: the settings want a longer one.
    """
    if not settings.max_context:
        return context
    if 0 < context < settings.max_context:
        raise UsageError(f"max_context={settings.max_context}: the model's context has {context} tokens")
    return settings.max_context


def plan_line(decoder: Decoder, where: str, options: ModelOptions, settings: EngineSettings) -> tuple[str, ...]:
    """How the model runs, for people."""
    size = decoder.cache_pages * decoder.page_bytes / 2**20
    return (
        f"plan: {where}, {options.dtype}; key/value cache of {decoder.cache_pages * PAGE} tokens, {size:.0f} MiB; "
        f"up to {settings.max_batch} requests at once",
    )


def with_own_ends(ends: list[int], path: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a text; a GGUF file's tokenizer has its own."""
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    if not path.is_file():
        return ends
    tokenizer = tokenizer or load_text_tokenizer(path)
    return sorted({*ends, *tokenizer.end_tokens})
