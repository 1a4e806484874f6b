# SPDX-License-Identifier: Apache-2.0
"""The engine's interface to a decoder, and facts about its model. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.step import MultiStep, StepInput, StepOutput
from anyaccel.serve.interface import ModelFacts

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel
    from anyaccel.inference.options import ModelOptions
    from anyaccel.serve.engine.settings import EngineSettings

NATIVE_RANKS = (
    "anyaccel serve divides and copies models of the native and the device runtime only; one process alone runs "
    "others too"
)
ONLY_ALONE = "anyaccel serve has replicas of a model on the host's own processor only; start a server for each device"


def lacking(feature: str) -> UsageError:
    """The error for a model on several ranks that needs what neither the native nor the device runtime has."""
    return UsageError(f"{NATIVE_RANKS} (these have no {feature})")


class StepDecoder(Protocol):
    """A model that computes steps.

    Attributes:
        page_bytes: the size of a page of keys and values, on all ranks together.
        cache_pages: the number of pages that the cache has room for, beside the recurrent states of all requests that
            may run at once.
        state_pages: as how many pages a recurrent state counts; 0: the model has none.
        shares: whether requests may share cached prefixes.
        multi_step: whether apply() can take several steps in one call.
    """

    facts: ModelFacts
    page_bytes: int
    cache_pages: int
    state_pages: int
    shares: bool
    multi_step: bool

    def apply(self, step: StepInput, multi_step: MultiStep | None = None) -> StepOutput:
        """Compute a step, or several if `multi_step` allows it.

        Raises:
            AnyAccelError: the decoder has failed for good.
        """

    def check(self) -> None:
        """Check an idle decoder.

        Raises:
            AnyAccelError: the decoder has failed for good.
        """

    def late(self) -> bool:
        """Whether the step under way takes much longer than those before it; may be called in any thread."""

    def close(self) -> None:
        """Free all memory, and end all processes."""


def shares_prefixes(native: NativeModel) -> bool:
    """Whether requests may share cached prefixes.

    With longrope and dynamic NTK they may not: the keys in the cache depend on the length of the whole text.
    """
    return not any(rope.long_inv_freq or rope.dynamic_from for rope in native.spec.ropes)


def check_pages(pages: int, page_bytes: int, states: int = 0) -> None:
    """Check that the cache has room for at least one page.

    Args:
        states: pages that the recurrent states of all requests that run at once take beside.

    Raises:
        UsageError: it has not.
    """
    if pages < 1 and states:
        size = states * page_bytes / 2**20
        raise UsageError(
            f"the cache has no room for the recurrent states of all requests that may run at once, {size:.0f} MiB; "
            "--max-batch sets how many there are, --cache-bytes the cache's size"
        )
    if pages < 1:
        raise UsageError(
            f"the key/value cache has no room for a single page, {PAGE} tokens of {page_bytes} bytes in all; "
            "--cache-bytes sets its size"
        )


def limited(facts: ModelFacts, cache_pages: int) -> ModelFacts:
    """The facts, with the context limited to what the cache has room for."""
    room = cache_pages * PAGE
    return replace(facts, context=min(facts.context or room, room))


def served_context(context: int, settings: EngineSettings) -> int:
    """The model's context, or the shorter one of the settings.

    Raises:
        UsageError: the settings have a longer one.
    """
    if not settings.max_context:
        return context
    if 0 < context < settings.max_context:
        raise UsageError(f"max_context={settings.max_context}: the model's context has {context} tokens")
    return settings.max_context


def plan_line(decoder: StepDecoder, where: str, options: ModelOptions, settings: EngineSettings) -> tuple[str, ...]:
    """A line that tells the user how the model runs."""
    size = decoder.cache_pages * decoder.page_bytes / 2**20
    return (
        f"plan: {where}, {options.dtype}; key/value cache of {decoder.cache_pages * PAGE} tokens, {size:.0f} MiB; "
        f"up to {settings.max_batch} requests at once",
    )


def with_own_ends(ends: list[int], path: Path, tokenizer: Any) -> list[int]:
    """The tokens that end a text, with those of a GGUF file's own tokenizer."""
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    if not path.is_file():
        return ends
    tokenizer = tokenizer or load_text_tokenizer(path)
    return sorted({*ends, *tokenizer.end_tokens})
