# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `generate` before anything runs, and converts Hugging Face's sampling options to ours."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.numerals import to_integer
from anyaccel.validation import short_repr

_MOST = 2**31 - 1
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# Counts of Hugging Face's `generate`, with their least and largest values; None: limited by the model only.
_COUNTS: dict[str, tuple[int, int | None]] = {
    "max_new_tokens": (1, None),
    "max_length": (0, None),
    "min_new_tokens": (0, _MOST),
    "min_length": (0, _MOST),
    "num_return_sequences": (1, _MOST),
    "num_beams": (1, _MOST),
    "num_beam_groups": (1, _MOST),
    "prompt_lookup_num_tokens": (1, _MOST),
    "assistant_early_exit": (1, _MOST),
    "encoder_no_repeat_ngram_size": (0, _MOST),
}
_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
_FLAGS = ("do_sample", "use_cache", "return_dict_in_generate", "output_scores", "output_logits")
_REALS = ("guidance_scale", "length_penalty", "diversity_penalty", "epsilon_cutoff", "eta_cutoff")


def _must_be_error(name: str, value: Any, must: str) -> UsageError:
    return UsageError(f"{name}={short_repr(value)}: must be {must}")


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value


def _check_token_ids(name: str, value: Any) -> None:
    several = value.tolist() if isinstance(value, torch.Tensor) else value
    for token in several if isinstance(several, list | tuple) else [several]:
        if not _is_whole(token) or not -1 <= operator.index(token) <= _MOST:
            raise _must_be_error(name, value, "the number of a token, or a list of them (-1 or None for none)")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise UsageError for an invalid argument of `generate`; None counts as not given.

    The samplers' arguments are checked by `sampling_options`, and only where they have an effect.
    """
    for name, value in given.items():
        if value is None:
            continue
        if name in _COUNTS:
            least, most = _COUNTS[name]
            if not _is_whole(value):
                raise UsageError(f"{name}={short_repr(value)}: must be a whole number")
            if operator.index(value) < least:
                raise _must_be_error(name, value, f"at least {least}")
            if most is not None and operator.index(value) > most:
                raise _must_be_error(name, value, "below 2**31")
        elif name in _TOKENS:
            _check_token_ids(name, value)
        elif name in _FLAGS and (not isinstance(value, numbers.Number | bool) or value not in (0, 1)):
            raise _must_be_error(name, value, "True or False")
        elif name in _REALS and not _is_real(value):
            raise _must_be_error(name, value, "a number")
        elif name == "max_time" and not (_is_real(value) and value >= 0):
            raise _must_be_error(name, value, "a number of seconds, 0 or above")
        elif name == "generator" and not isinstance(value, torch.Generator):
            raise _must_be_error(name, value, "a torch.Generator; for a number use seed=")
        elif name == "seed" and not (_is_whole(value) and -(2**63) <= operator.index(value) < 2**64):
            raise _must_be_error(name, value, "a whole number of 64 bits")
        elif name == "streamer" and not (
            callable(getattr(value, "put", None)) and callable(getattr(value, "end", None))
        ):
            raise _must_be_error(name, value, "an object with put() and end(), such as a transformers TextStreamer")
        elif name in ("stopping_criteria", "logits_processor"):
            if not isinstance(value, list | tuple) or not all(map(callable, value)):
                raise _must_be_error(name, value, "a list of callables")
        elif name == "stop_strings":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
                raise _must_be_error(name, value, "a text, or a list of texts, that are not empty")
        elif name == "attention_mask" and not isinstance(value, torch.Tensor):
            raise _must_be_error(name, value, f"a tensor, got {type(value).__name__}")


def check_input_ids(value: Any) -> None:
    """Raise UsageError unless `value` is a dense integer tensor [rows, tokens] with values."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"input_ids={short_repr(value)}: must be a tensor of shape [rows, tokens], got {type(value).__name__}"
        )
    if value.layout != torch.strided or value.is_meta:
        where = "on the meta device" if value.is_meta else f"of layout {value.layout}"
        raise UsageError(f"input_ids {where}: must be a dense tensor that has values")
    if value.dim() != 2:
        raise UsageError(f"input_ids of shape {tuple(value.shape)}: must be of shape [rows, tokens]")
    check_whole("input_ids", value)


def mask_bits(mask: Any) -> torch.Tensor:
    """A mask of 0 and 1 as bits, on the CPU.

    Raises:
        UsageError: it is not a tensor, or has other values.
    """
    check_arguments({"attention_mask": mask})
    mask = mask.cpu()
    bits: torch.Tensor = mask != 0
    strange = mask[bits & (mask != 1)]
    if strange.numel():
        raise UsageError(
            f"attention_mask has the value {strange[0].item()}: must be 1 (counts) or 0 (padding) everywhere"
        )
    return bits


def check_whole(name: str, numbers: torch.Tensor) -> None:
    """Raise UsageError unless these token ids or positions are of an integer dtype."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise UsageError(f"{name} of dtype {numbers.dtype}: must be whole numbers; convert them with .long()")


def check_tokens(ids: torch.Tensor, vocabulary: int) -> None:
    """Raise UsageError for token ids outside of the vocabulary, or of a dtype that is not an integer type."""
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


def sampling_options(**given: Any) -> dict[str, Any]:
    """Fields of the native SamplingOptions, from Hugging Face's names for them; an option that is None is off.

    Raises:
        UsageError: a value is out of its range.
    """
    values = {name: value for name, value in given.items() if value is not None}
    sample = values.get("do_sample", False)
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        "temperature": (
            lambda v: _LEAST <= v <= _LARGEST,
            "must be above 0 in float32 (1.2e-38 to 3.4e38); for greedy decoding use do_sample=False",
        ),
        "top_k": (lambda v: 0 <= v < 2**31, "must be 0 (off) or above, and below 2**31"),
        "top_p": (lambda v: _LEAST <= v <= 1, "must be above 0 and at most 1"),
        "min_p": (lambda v: 0 <= v <= 1, "must be from 0 to 1"),
        "typical_p": (lambda v: _LEAST <= v <= 1, "must be above 0 and at most 1"),
        "repetition_penalty": (lambda v: _LEAST <= v <= _LARGEST, "must be above 0 in float32 (1.2e-38 to 3.4e38)"),
        "no_repeat_ngram_size": (lambda v: 0 <= v < 2**31, "must be 0 (off) or above, and below 2**31"),
    }
    warpers = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    whole = ("top_k", "no_repeat_ngram_size")
    for name, (fits, text) in ranges.items():
        value = values.get(name)
        if value is None or (name in warpers and not sample):
            values.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
            raise UsageError(f"{name}={short_repr(value)}: {text}")
        elif name in whole:
            values[name] = to_integer(name, value)
    if "no_repeat_ngram_size" in values:
        values["no_repeat_ngram"] = values.pop("no_repeat_ngram_size")
    return values
