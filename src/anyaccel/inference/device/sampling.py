# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens on the device, as csrc/llm/model/sampling.cpp does and in its order; one copy to the host a step.

Letters: R rows of logits, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from anyaccel.inference.device.batch import to_device
from anyaccel.inference.device.options import Options

TokenScore = tuple[int, float, list[tuple[int, float]]]

_LEAST_TEMPERATURE = 1e-20


class History:
    """How often tokens are in a prompt and an answer, on the device: what penalties go by."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._counted = 0
        self.seen_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.generated_V = torch.zeros(vocabulary, dtype=torch.float32, device=device)

    def count(self, tokens: Sequence[int], prompt: int) -> None:
        """Take in what has come since the last call; `prompt` of all tokens are the prompt's."""
        if self._counted < 0:  # a signal has ended a call
            self.seen_V.zero_()
            self.generated_V.zero_()
            self._counted = 0
        new = tokens[self._counted :]
        if not new:
            return
        counted, self._counted = self._counted, -1
        numbers = to_device(torch.tensor(new, dtype=torch.int64), self._device)
        self.seen_V.index_fill_(0, numbers, True)
        answered = numbers[max(prompt - counted, 0) :]
        self.generated_V.index_add_(0, answered, torch.ones_like(answered, dtype=torch.float32))
        self._counted = len(tokens)


class Asking(Protocol):
    """What is known of a request when its next token is chosen."""

    options: Options
    mask: torch.Tensor | None
    all_tokens: list[int]

    @property
    def answered(self) -> int: ...
    def history(self, vocabulary: int, device: torch.device) -> History: ...
    def draw(self) -> float: ...


def choose(logits_RV: torch.Tensor, requests: Sequence[Asking], precise: torch.dtype) -> torch.Tensor:
    """The next token of each request, [R] on the device; -1 where the logits are not numbers. Logits are changed.

    Args:
        precise: of sums over the vocabulary: float64 where the device has it.
    """
    for row, request in enumerate(requests):
        if not request.options.is_plain or request.mask is not None:
            _process(logits_RV[row], request)
    highest_R, chosen_R = logits_RV.max(-1)
    for kind in (True, False):
        rows = [i for i, each in enumerate(requests) if each.options.do_sample and each.options.filters == kind]
        if rows:
            drawn = _draw(logits_RV, highest_R, rows, [requests[i] for i in rows], kind, precise)
            if len(rows) == len(requests):
                chosen_R = drawn
            else:
                chosen_R = chosen_R.index_copy(0, _numbers(rows, logits_RV.device), drawn)
    return torch.where(highest_R.isfinite(), chosen_R, -1)


def scores_of(
    logits_RV: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities, by the logits as they are, of a token of each row and of the likeliest ones."""
    most = min(max(*tops, 0), logits_RV.shape[1])
    logprob_RV = logits_RV.log_softmax(-1)
    own = logprob_RV.gather(1, _numbers(tokens, logits_RV.device)[:, None])[:, 0].tolist()
    if not most:
        return [(value, []) for value in own]
    values, indices = logprob_RV.topk(most, -1)
    best = [list(zip(*pair, strict=True)) for pair in zip(indices.tolist(), values.tolist(), strict=True)]
    return [(value, likeliest[: max(top, 0)]) for value, likeliest, top in zip(own, best, tops, strict=True)]


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def _process(logits_V: torch.Tensor, request: Asking) -> None:
    """What changes the logits before anything is chosen."""
    o = request.options
    device = logits_V.device
    if o.bias:
        known = {token: bias for token, bias in o.bias.items() if 0 <= token < len(logits_V)}
        added = torch.tensor(list(known.values()), dtype=torch.float32)
        logits_V.index_add_(0, _numbers(list(known), device), to_device(added, device))
    if o.penalises:
        history = request.history(len(logits_V), device)
        if o.repetition_penalty != 1.0:  # Keskar et al., 2019
            changed = torch.where(logits_V < 0, logits_V * o.repetition_penalty, logits_V / o.repetition_penalty)
            logits_V.copy_(torch.where(history.seen_V, changed, logits_V))
        if o.presence_penalty:
            logits_V.sub_((history.generated_V > 0) * o.presence_penalty)
        if o.frequency_penalty:
            logits_V.sub_(history.generated_V * o.frequency_penalty)
    forbidden = list(_repeating(request.all_tokens, o.no_repeat_ngram))
    if request.answered < o.min_new_tokens:
        forbidden += o.end_tokens
    forbidden = [token for token in forbidden if 0 <= token < len(logits_V)]
    if forbidden:
        logits_V.index_fill_(0, _numbers(forbidden, device), -torch.inf)
    if request.mask is not None:
        logits_V.masked_fill_(~to_device(request.mask, device), -torch.inf)


def _repeating(tokens: Sequence[int], size: int) -> set[int]:
    """Tokens that would complete an n-gram which is there already."""
    known = size - 1
    if size <= 0 or len(tokens) < known:
        return set()
    last = list(tokens[len(tokens) - known :])
    return {tokens[i + known] for i in range(len(tokens) - known) if list(tokens[i : i + known]) == last}


def _draw(
    logits_RV: torch.Tensor,
    highest_R: torch.Tensor,
    rows: Sequence[int],
    requests: Sequence[Asking],
    filters: bool,
    precise: torch.dtype,
) -> torch.Tensor:
    """A token of each of these rows, by one uniform number of each request's own generator."""
    device = logits_RV.device
    if len(rows) < len(logits_RV):
        at = _numbers(rows, device)
        logits_RV, highest_R = logits_RV.index_select(0, at), highest_R.index_select(0, at)
    options = [request.options for request in requests]
    given = [
        [request.draw() for request in requests],
        [max(o.temperature, _LEAST_TEMPERATURE) for o in options],
        [o.top_p if o.top_p < 1 else 2.0 for o in options],
        [o.min_p for o in options],
        [o.typical_p for o in options],
    ]
    uniform, temperature, top_p, min_p, typical = to_device(torch.tensor(given, dtype=precise), device)[..., None]
    order_RV = None
    if filters:
        logits_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    # Subtracting the largest first keeps tiny temperatures finite.
    weights_RV = ((logits_RV - highest_R[:, None]).to(precise) / temperature).exp()
    if filters:
        weights_RV = _filtered(logits_RV, weights_RV, options, top_p, min_p)
        if any(o.typical_p < 1 for o in options):
            weights_RV = _typical(weights_RV, typical)
    sums_RV = weights_RV.cumsum(-1)
    hit_RV = (sums_RV > uniform * sums_RV[:, -1:]) & (weights_RV > 0)
    drawn_R = hit_RV.to(torch.uint8).argmax(-1)  # the first one
    return drawn_R if order_RV is None else order_RV.gather(1, drawn_R[:, None])[:, 0]


def _filtered(
    sorted_RV: torch.Tensor,
    weights_RV: torch.Tensor,
    options: Sequence[Options],
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Top-k, nucleus (Holtzman et al., 2020) and min-p, of tokens with the likeliest first; weights of others are 0."""
    vocabulary = sorted_RV.shape[1]
    if any(0 < o.top_k < vocabulary for o in options):
        last = [min(o.top_k or vocabulary, vocabulary) - 1 for o in options]
        least_R1 = sorted_RV.gather(1, _numbers(last, sorted_RV.device)[:, None])
        weights_RV = torch.where(sorted_RV >= least_R1, weights_RV, 0)  # with all that equal the last one
    if any(o.top_p < 1 for o in options):
        sums_RV = weights_RV.cumsum(-1)
        # Keep a token while those before it have not reached top_p; the first always stays.
        kept_RV = sums_RV - weights_RV < top_p * sums_RV[:, -1:]
        kept_RV[:, 0] = True
        weights_RV = torch.where(kept_RV, weights_RV, 0)
    return torch.where(weights_RV >= min_p * weights_RV[:, :1], weights_RV, 0)


def _typical(weights_RV: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Tokens whose information is nearest to the entropy (Meister et al., "Locally Typical Sampling", 2022)."""
    p_RV = weights_RV / weights_RV.sum(-1, keepdim=True)
    information_RV = -p_RV.log()
    entropy_R1 = torch.where(p_RV > 0, p_RV * information_RV, 0).sum(-1, keepdim=True)
    distance_RV = torch.where(p_RV > 0, (information_RV - entropy_R1).abs(), torch.inf)
    sorted_RV, order_RV = distance_RV.sort(dim=-1, stable=True)
    sums_RV = p_RV.gather(1, order_RV).cumsum(-1)
    last_R1 = (sums_RV < mass).sum(-1, keepdim=True)
    # Rounding may leave the sum of all below the mass: then all of them stay.
    limit_R1 = sorted_RV.gather(1, last_R1.clamp(max=p_RV.shape[1] - 1))
    kept_RV = (distance_RV <= limit_R1) | (mass >= 1)
    return torch.where(kept_RV, weights_RV, 0)
