# SPDX-License-Identifier: Apache-2.0
"""From residuals to what requests want to know: next tokens, log-probabilities, pooled hidden states."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyaccel.errors import CommError, ModelError
from anyaccel.inference.device.batch import to_device
from anyaccel.inference.device.decoder import Decoder
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.passes import Work
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.request import Request
from anyaccel.inference.device.sampling import choose, scores_of

_MOST_ROWS = 128  # of logits of a prompt in memory


@dataclass
class Wanted:
    """A token whose logits or hidden state are wanted; `position` in its request."""

    index: int
    request: Request
    position: int


def wanted_of(requests: Sequence[Request]) -> tuple[list[Wanted], list[Wanted]]:
    """Tokens whose logits are wanted, and those whose hidden states are; by their place in the step."""
    logits: list[Wanted] = []
    hidden: list[Wanted] = []
    first = 0
    for request in requests:
        begin, end = request.in_cache, request.in_cache + request.passing
        place = first - begin
        if request.options.prompt_logprobs >= 0:
            last = min(end, request.prompt - 1)
            logits += [Wanted(place + at, request, at) for at in range(begin, last)]
        if request.options.goal == "mean":
            hidden += [Wanted(place + at, request, at) for at in range(begin, end)]
        if end == len(request.all_tokens):
            if request.answering:
                logits.append(Wanted(place + end - 1, request, end - 1))
            elif request.options.goal == "last":
                hidden.append(Wanted(place + end - 1, request, 0))
        first += request.passing
    return logits, hidden


class Results:
    """What is made of the residuals of one step.

    Attributes:
        asked: the step's requests, by whose places an error names one.
        chosen: id() of a request -> its next token.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KvPages,
        precise: torch.dtype,
        asked: Sequence[Request],
        ranks: TensorRanks | None = None,
    ) -> None:
        self._decoder, self._cache, self._precise, self._asked, self._ranks = decoder, cache, precise, asked, ranks
        self._checksum = 0
        self.chosen: dict[int, int] = {}

    def begin(self, work: Sequence[Work]) -> None:
        """What this step computes; the ranks tell by it whether they compute the same."""
        if self._ranks is not None:
            told = repr([(each.tokens, each.context) for each in work])
            self._checksum = zlib.crc32(told.encode(), self._checksum)

    def _of_all_ranks(self, tokens: torch.Tensor) -> list[int]:
        """The step's one copy to the host. Rank 0's choice is everybody's, whatever rounds differently elsewhere.

        Raises:
            CommError: a rank computes another step than rank 0.
        """
        if self._ranks is None:
            return tokens.tolist()
        told = self._ranks.first(torch.cat([tokens, tokens.new_full((1,), self._checksum)])).tolist()
        if told.pop() != self._checksum:
            raise CommError("the ranks disagree: this one computes other requests or tokens than rank 0 in this step")
        return told

    def take(self, residuals: torch.Tensor, wanted: Sequence[tuple[int, Wanted]]) -> None:
        """From residuals to tokens and log-probabilities."""
        answers = [(row, each) for row, each in wanted if each.position + 1 == len(each.request.all_tokens)]
        others = [(row, each) for row, each in wanted if each.position + 1 < len(each.request.all_tokens)]
        for begin in range(0, len(others), _MOST_ROWS):
            some = others[begin : begin + _MOST_ROWS]
            nexts = [each.request.all_tokens[each.position + 1] for _, each in some]
            tops = [each.request.options.prompt_logprobs for _, each in some]
            scored = scores_of(self._logits_of(residuals, [row for row, _ in some]), nexts, tops)
            for (_, each), token, (own, best) in zip(some, nexts, scored, strict=True):
                self._check_numbers(own, each.request)
                each.request.of_prompt[each.position] = (token, own, best)
        if not answers:
            return
        requests = [each.request for _, each in answers]
        logits = self._logits_of(residuals, [row for row, _ in answers])
        for row, request in enumerate(requests):
            if request.keep_logits:
                request.logits = logits[row].clone()
        kept = logits.clone() if any(request.options.logprobs >= 0 for request in requests) else None
        tokens = self._of_all_ranks(choose(logits, requests, self._precise))
        for request, token in zip(requests, tokens, strict=True):
            self._check_numbers(0.0 if token >= 0 else float("nan"), request)
            self.chosen[id(request)] = token
        if kept is not None:
            scored = scores_of(kept, tokens, [request.options.logprobs for request in requests])
            for request, token, (own, best) in zip(requests, tokens, scored, strict=True):
                if request.options.logprobs >= 0:
                    request.scores.append((token, own, best))

    def _logits_of(self, residuals: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if list(rows) != list(range(len(residuals))):
            residuals = residuals.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), residuals.device))
        return self._decoder.logits(self._decoder.hidden(residuals))

    def _check_numbers(self, value: float, request: Request) -> None:
        if value - value == 0:
            return
        self._cache.clear(request.sequence)
        number = next(index for index, each in enumerate(self._asked) if each is request)
        raise ModelError(
            f"the model's logits are NaN or infinite, for request {number} of the step: its weights may be damaged; or "
            "try another dtype, such as fp32"
        )

    def pool(self, residuals: torch.Tensor, wanted: Sequence[tuple[int, Wanted]]) -> None:
        runs: list[tuple[int, int, Wanted]] = []  # first row and count of neighbours of one request
        for row, each in wanted:
            if runs and runs[-1][2].request is each.request and runs[-1][0] + runs[-1][1] == row:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
            else:
                runs.append((row, 1, each))
        for row, count, each in runs:
            each.request.pool(self._decoder.hidden(residuals[row : row + count]), each.position)
