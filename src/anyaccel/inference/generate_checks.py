# SPDX-License-Identifier: Apache-2.0
"""What must hold for a generation before anything runs, and Hugging Face's sampling options as native ones."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.errors import UsageError
from anyaccel.inference.generate import whole_number

if TYPE_CHECKING:
    from anyaccel.inference.runtimes.cpu import NativeModel


def check_whole(name: str, numbers: torch.Tensor) -> None:
    """Raise UsageError for numbers of tokens or positions that are not of a whole type."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise UsageError(f"{name} of dtype {numbers.dtype}: must be whole numbers; convert them with .long()")


def check_tokens(ids: torch.Tensor, vocabulary: int) -> None:
    """Raise UsageError for a token that the model does not have, and for what is no number of a token."""
    check_whole("input_ids", ids)
    if ids.numel() == 0:
        return
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest < 0 or highest >= vocabulary:
        token = lowest if lowest < 0 else highest
        raise UsageError(f"token {token} is outside the model's vocabulary of {vocabulary}")


def check_context(prompt: int, new: int, limit: int) -> None:
    """Raise UsageError when prompt and answer together exceed the model's context."""
    if limit and prompt + new > limit:
        raise UsageError(f"{prompt} prompt tokens and {new} new ones exceed the model's context of {limit}")


def check_memory(native: NativeModel, prompts: Sequence[int], copies: int, new: int) -> None:
    """Raise UsageError, with the bytes, when the cache of a batch cannot fit."""
    page = 64
    model = native.model
    tokens = sum(-(-(length + new) // page) * page + (copies - 1) * (-(-new // page) + 1) * page for length in prompts)
    needed = tokens * model.cache_bytes_per_token()
    if needed > model.cache_limit_bytes:
        raise UsageError(
            f"{len(prompts) * copies} sequences of up to {max(prompts) + new} tokens need {needed / 2**20:.0f} MiB of "
            f"key/value cache ({needed} bytes), its limit is {model.cache_limit_bytes / 2**20:.0f} MiB: use a smaller "
            "batch, fewer new tokens, kv_cache='int8' or a larger cache_bytes"
        )


def sampling_options(**given: Any) -> dict[str, Any]:
    """Fields of the native SamplingOptions from Hugging Face's names; None is what switches an option off.

    Raises:
        UsageError: a value is out of its range.
    """
    values = {name: value for name, value in given.items() if value is not None}
    sample = values.get("do_sample", False)
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        "temperature": (lambda v: 0 < v < float("inf"), "must be above 0; for greedy decoding use do_sample=False"),
        "top_k": (lambda v: 0 <= v < 2**31, "must be 0 (off) or above, and below 2**31"),
        "top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        "min_p": (lambda v: 0 <= v <= 1, "must be from 0 to 1"),
        "typical_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        "repetition_penalty": (lambda v: 0 < v < float("inf"), "must be above 0"),
        "no_repeat_ngram_size": (lambda v: 0 <= v < 2**31, "must be 0 (off) or above, and below 2**31"),
    }
    warpers = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    whole = ("top_k", "no_repeat_ngram_size")
    for name, (fits, text) in ranges.items():
        value = values.get(name)
        if value is None or (name in warpers and not sample):
            values.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
            raise UsageError(f"{name}={value!r}: {text}")
        elif name in whole:
            values[name] = whole_number(name, value)
    if "no_repeat_ngram_size" in values:
        values["no_repeat_ngram"] = values.pop("no_repeat_ngram_size")
    return values
