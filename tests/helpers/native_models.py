# SPDX-License-Identifier: Apache-2.0
"""Models of the native runtime from small random models of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import decoder_reference
import family_cases
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native import shard
from anyaccel.inference.spec.decoder import DecoderSpec, weights


@functools.cache
def whole(name: str, positions: int = 0) -> tuple[Any, DecoderSpec, dict[str, torch.Tensor]]:
    """The model of a case of family_cases, what it is natively, and its weights by their native names."""
    model = family_cases.build(name, positions=positions)
    config = model.config.to_dict()
    family = family_of(config)
    spec = family.spec(config)
    return model, spec, decoder_reference.assemble(family, spec, model.state_dict())


def empty(
    spec: DecoderSpec,
    threads: int = 1,
    cache_limit: int = 1 << 26,
    weight: str = "f32",
    cache: str = "f32",
    group: int = 0,
) -> Any:
    """A native model without weights. Several threads wait long for each other where many tests run at once."""
    from anyaccel import _llm

    matrices, vectors = weights(spec)
    return _llm.DecoderModel(
        spec,
        [replace(each, format=weight, group=group).entry() for each in matrices],
        [(each.name, each.count) for each in vectors],
        threads,
        cache,
        cache_limit,
    )


def fill(model: Any, spec: DecoderSpec, values: Mapping[str, torch.Tensor]) -> Any:
    matrices, vectors = weights(spec)
    for matrix in matrices:
        value = values[matrix.name]
        assert value.shape == (matrix.rows, matrix.cols)
        model.set_rows(matrix.name, 0, matrix.rows, value.data_ptr(), "f32", 4 * matrix.cols)
    for vector in vectors:
        model.set_vector(vector.name, 0, vector.count, values[vector.name].data_ptr(), "f32")
    model.finish()
    return model


def native(name: str, positions: int = 0, **options: Any) -> Any:
    _, spec, values = whole(name, positions)
    return fill(empty(spec, **options), spec, values)


def rank_of(name: str, rank: int, size: int, threads: int = 1, pp: int = 1, **options: Any) -> Any:
    """One rank's model, of `size` ranks in `pp` stages; it is not connected yet."""
    _, spec, values = whole(name)
    size //= pp
    stage, rank = divmod(rank, size)
    own = dict(values)
    for weight, part in shard.slices(spec, rank, size).items():
        if weight not in own:
            continue
        value = own[weight]
        if part.rows:
            value = torch.cat([value[rows.start : rows.stop] for rows in part.rows])
        if part.cols is not None:
            value = value[:, part.cols.start : part.cols.stop]
        own[weight] = (torch.zeros_like(value) if part.zero else value).contiguous()
    sharded = shard.shard(spec, rank, size) if size > 1 else spec
    if pp > 1:
        sizes = [(name, value.numel() * 4) for name, value in values.items()]
        sharded = shard.stage_spec(sharded, shard.split_layers(*shard.bytes_by_layer(spec, sizes), pp), stage)
    return fill(empty(sharded, threads, **options), sharded, own)


def logits_of(model: Any, vocab: int, sequences: Sequence[int], news: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of all new tokens of each sequence."""
    flat = torch.tensor([token for new in news for token in new], dtype=torch.int64)
    out = torch.full((len(flat), vocab), float("nan"))
    model.forward(sequences, [len(new) for new in news], flat.data_ptr(), out.data_ptr(), list(range(len(flat))))
    return out


PROMPTS = [[5, 17, 99, 3, 64], list(range(3, 43)), [8]]


def answers_of(model: Any) -> list[list[int]]:
    """Tokens of answers in company: greedy, sampled, with drafts, of which all ranks have to make the same ones."""
    from anyaccel import _llm

    requests = [
        _llm.Request(model, prompt, {"max_new_tokens": 6, "do_sample": index == 1, "seed": 3})
        for index, prompt in enumerate(PROMPTS)
    ]
    options = {"max_new_tokens": 20, "draft_tokens": 5, "draft_always": True}
    requests.append(_llm.Request(model, [5, 6, 7, 8] * 6, options))
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every request that may have drafts have them: those of such small models seldom pay."""
    from anyaccel import _llm

    made: Any = _llm.Request

    def request(model: Any, prompt: Any, options: Any, *more: Any) -> Any:
        return made(model, prompt, {**options, "draft_always": options.get("draft_tokens", 0) > 0}, *more)

    monkeypatch.setattr(_llm, "Request", request)
