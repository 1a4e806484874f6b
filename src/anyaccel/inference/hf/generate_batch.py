# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `generate_batch`: prompts of any number and length, through the native loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.errors import UsageError
from anyaccel.inference.native.runtime import cache_bytes, check_memory
from anyaccel.numerals import to_integer
from anyaccel.validation import short_repr

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

_MOST_ROWS = 256  # of a step; more do not make it faster


def generate_batch(
    model: Any,
    native: NativeModel,
    inputs: Any,
    generation_config: Any,
    max_new_tokens: int | None,
    record_timestamps: bool,
    bar: bool,
) -> dict[str, Any]:
    """The answers to `inputs`, a list of prompts that are lists of token ids, by the names that transformers gives.

    Args:
        model: a Hugging Face model, or an engine with one.
        native: what its `generate` computes them on.

    Raises:
        UsageError: an argument has a wrong value, or is one that `generate` has but `generate_batch` not.
    """
    from tqdm import tqdm
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    prompts = [_prompt(index, each) for index, each in enumerate(inputs)]
    config = model.generation_config if generation_config is None else generation_config
    if config.stop_strings:
        raise UsageError("stop_strings: generate_batch has no tokenizer for them; use generate(..., tokenizer=...)")
    if record_timestamps:
        raise UsageError("record_timestamps: not known to the native runtime; leave it out")
    new = config.max_new_tokens if max_new_tokens is None else to_integer("max_new_tokens", max_new_tokens)
    new = 20 if new is None else new  # as in transformers
    copies = config.num_return_sequences or 1
    found: dict[str, Any] = {}
    with tqdm(total=len(prompts) * copies, disable=not bar, unit="request") as shown_bar:
        for rows in _batches(native, [len(each) for each in prompts], copies, new):
            answers = _answers(model, [prompts[row] for row in rows], config, new)
            for row, several in zip(rows, answers, strict=True):
                # The last of the answers to a prompt has the name of the request, as in transformers.
                names = [*(f"req_{row}__child#{child}" for child in range(copies - 1)), f"req_{row}"]
                for name, tokens in zip(names, several, strict=True):
                    found[name] = GenerationOutput(
                        name, prompt_ids=prompts[row], generated_tokens=tokens, status=RequestStatus.FINISHED
                    )
            shown_bar.update(len(rows) * copies)
    return found


def _prompt(index: int, tokens: Any) -> list[int]:
    several = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    if not isinstance(several, list | tuple) or not several:
        raise UsageError(f"inputs[{index}]={short_repr(tokens)}: must be a list of at least one token id")
    return [to_integer(f"a token of inputs[{index}]", token) for token in several]


def _batches(native: NativeModel, lengths: Sequence[int], copies: int, new: int) -> Iterator[list[int]]:
    """Rows in order, as many at a time as the cache has room for.

    Raises:
        UsageError: it has no room for one of them.
    """
    batch: list[int] = []
    for row, length in enumerate(lengths):
        size = cache_bytes(native, [lengths[r] for r in (*batch, row)], copies, new)
        if batch and (len(batch) * copies >= _MOST_ROWS or size > native.model.cache_limit_bytes):
            yield batch
            batch = []
        if not batch:
            check_memory(native, [length], copies, new)
        batch.append(row)
    if batch:
        yield batch


def _answers(model: Any, prompts: list[list[int]], config: Any, new: int) -> list[list[list[int]]]:
    """For each prompt the tokens of each of its answers, the end token that it ended with included."""
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    config = copy.deepcopy(config)
    config.max_new_tokens = new
    rows = model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)
    several = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    answers = [_until_end(row, set(several)) for row in rows[:, longest:].tolist()]
    each = config.num_return_sequences or 1
    return [answers[row * each : (row + 1) * each] for row in range(len(prompts))]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]
