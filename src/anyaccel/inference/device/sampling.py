# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens on the device where nothing but a temperature and filters of likely tokens is asked for.

The tokens are those that csrc/llm/model/sampling.cpp would choose. One copy to the host a step.

Letters: R rows of logits, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyaccel.inference.device.batch import to_device

# As `_llm.Executor.run` gets it: row, temperature (0: the likeliest token), top_k, top_p, min_p, uniform number, and
# that of the token behind it.
Pick = tuple[int, float, int, float, float, float, float]

_LEAST_TEMPERATURE = 1e-20


def choose(logits_RV: torch.Tensor, picks: Sequence[Pick], precise: torch.dtype) -> torch.Tensor:
    """The next token of each row, [R] on the device; -1 where the logits are not numbers.

    Args:
        precise: of sums over the vocabulary: float64 where the device has it.
    """
    highest_R, chosen_R = logits_RV.max(-1)
    for filters in (True, False):
        rows = [i for i, pick in enumerate(picks) if pick[1] > 0 and _filters(pick) == filters]
        if rows:
            drawn = _draw(logits_RV, highest_R, rows, [picks[i] for i in rows], filters, precise)
            if len(rows) == len(picks):
                chosen_R = drawn
            else:
                chosen_R = chosen_R.index_copy(0, _numbers(rows, logits_RV.device), drawn)
    return torch.where(highest_R.isfinite(), chosen_R, -1)


def _filters(pick: Pick) -> bool:
    """Whether sampling is from some of the tokens only."""
    _, _, top_k, top_p, min_p, *_ = pick
    return top_k > 0 or top_p < 1 or min_p > 0


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def _draw(
    logits_RV: torch.Tensor,
    highest_R: torch.Tensor,
    rows: Sequence[int],
    picks: Sequence[Pick],
    filters: bool,
    precise: torch.dtype,
) -> torch.Tensor:
    """A token of each of these rows, by the uniform number of each."""
    device = logits_RV.device
    if len(rows) < len(logits_RV):
        at = _numbers(rows, device)
        logits_RV, highest_R = logits_RV.index_select(0, at), highest_R.index_select(0, at)
    given = [
        (max(temperature, _LEAST_TEMPERATURE), top_p if top_p < 1 else 2.0, min_p, uniform)
        for _, temperature, _, top_p, min_p, uniform, _ in picks
    ]
    columns = to_device(torch.tensor(given, dtype=precise), device).T[..., None]
    temperature, top_p, min_p, uniform = columns[0], columns[1], columns[2], columns[3]
    order_RV = None
    if filters:
        logits_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    # Subtracting the largest first keeps tiny temperatures finite.
    weights_RV = ((logits_RV - highest_R[:, None]).to(precise) / temperature).exp()
    if filters:
        weights_RV = _filtered(logits_RV, weights_RV, picks, top_p, min_p)
    sums_RV = weights_RV.cumsum(-1)
    hit_RV = (sums_RV > uniform * sums_RV[:, -1:]) & (weights_RV > 0)
    drawn_R = hit_RV.to(torch.uint8).argmax(-1)  # the first one
    return drawn_R if order_RV is None else order_RV.gather(1, drawn_R[:, None])[:, 0]


def _filtered(
    sorted_RV: torch.Tensor,
    weights_RV: torch.Tensor,
    picks: Sequence[Pick],
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Top-k, nucleus (Holtzman et al., 2020) and min-p, of tokens with the likeliest first; weights of others are 0."""
    vocabulary = sorted_RV.shape[1]
    top_k = [pick[2] for pick in picks]
    if any(0 < k < vocabulary for k in top_k):
        last = [min(k or vocabulary, vocabulary) - 1 for k in top_k]
        least_R1 = sorted_RV.gather(1, _numbers(last, sorted_RV.device)[:, None])
        weights_RV = torch.where(sorted_RV >= least_R1, weights_RV, 0)  # with all that equal the last one
    if any(pick[3] < 1 for pick in picks):
        sums_RV = weights_RV.cumsum(-1)
        # Keep a token while those before it have not reached top_p; the first always stays.
        kept_RV = sums_RV - weights_RV < top_p * sums_RV[:, -1:]
        kept_RV[:, 0] = True
        weights_RV = torch.where(kept_RV, weights_RV, 0)
    return torch.where(weights_RV >= min_p * weights_RV[:, :1], weights_RV, 0)
