# SPDX-License-Identifier: Apache-2.0
"""The native loop of `generate`; rows that have finished leave the batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anyaccel import _llm
from anyaccel.inference.native.runtime import NativeModel, logits_error
from anyaccel.inference.text.stopping import StopStrings

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.inference.native.runtime import NativeModel


@dataclass
class Job:
    """One call of `generate`, checked and translated into the terms of the native loop.

    Attributes:
        mask: which of input_ids are not padding, on the CPU.
        prompts: the tokens of each row without its padding.
        copies: number of answers to each prompt.
        options: options of every Request.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    prompts: list[list[int]]
    copies: int
    max_new: int
    options: dict[str, Any]
    pad: int
    stop: StopStrings | None
    criteria: Any
    streamer: Any
    max_time: float | None
    keep_logits: bool
    output_logits: bool
    output_scores: bool
    as_dict: bool
    use_cache: bool
    seed: int = 0
    started: float = field(default_factory=time.monotonic)


class _Row:
    """One answer that is being generated."""

    def __init__(self, request: _llm.Request, prompt: list[int], stop: StopStrings | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.stop = None if stop is None else stop.begin(prompt)
        self.done = self.freed = False

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if self.request.finished or (self.stop is not None and self.stop.add(token)):
            self.end()

    def end(self) -> None:
        self.done = True

    def free(self) -> None:
        """Release its part of the cache."""
        if not self.freed:
            self.freed = True
            self.request.finish()


class _Loop:
    """The steps of one job."""

    def __init__(self, native: NativeModel, job: Job) -> None:
        self.native = native
        self.job = job
        self.rows: list[_Row] = []
        self.logits: list[torch.Tensor] = []
        # Prompts and answers so far with padding, for the caller's stopping criteria.
        self.ids = job.input_ids.repeat_interleave(job.copies, dim=0)

    def request(self, index: int, prompt: list[int], prefix: _llm.Request | None) -> _Row:
        own = {"seed": (self.job.seed + index * 0x9E3779B97F4A7C15) % 2**64, "keep_states": self.job.copies > 1}
        options = self.job.options | own
        request = _llm.Request(self.native.model, prompt, options, prefix, self.job.keep_logits)
        return _Row(request, prompt, self.job.stop)

    def first_step(self) -> list[int]:
        """Compute each prompt once, and sample the first token of all its answers, which share its cache."""
        job = self.job
        leaders = {row: self.request(row * job.copies, prompt, None) for row, prompt in enumerate(job.prompts)}
        tokens = dict(zip(leaders, self.native.model.step([row.request for row in leaders.values()]), strict=True))
        self.rows = []
        followers = []
        first: list[int] = []
        for number, prompt in enumerate(job.prompts):
            leader = leaders[number]
            self.rows.append(leader)
            first.append(tokens[number])
            for copy in range(1, job.copies):
                follower = self.request(number * job.copies + copy, prompt, leader.request)
                followers.append(len(self.rows))
                self.rows.append(follower)
                first.append(-1)
        if followers:
            more = self.native.model.step([self.rows[index].request for index in followers])
            for index, token in zip(followers, more, strict=True):
                first[index] = token
        return first

    def step(self) -> bool:
        """Add a token to every row that is not done; returns whether any row is left."""
        if not self.rows:
            active = list(range(len(self.job.prompts) * self.job.copies))
            tokens = self.first_step()
        else:
            active = [index for index, row in enumerate(self.rows) if not row.done]
            tokens = self.native.model.step([self.rows[index].request for index in active])
        if min(tokens) < 0:
            raise logits_error(self.native.dtype)
        if self.job.keep_logits:
            self._keep_logits(active)
        column = torch.full((len(self.rows),), self.job.pad, dtype=self.ids.dtype)
        for index, token in zip(active, tokens, strict=True):
            self.rows[index].add(token)
            column[index] = token
        if self.job.criteria:
            self.ids = torch.cat([self.ids, column[:, None].to(self.ids.device)], dim=1)
            scores = tuple(self.logits) if self.job.output_scores else None
            for row, ended in zip(self.rows, _ended_by_criteria(self.job.criteria, self.ids, scores), strict=True):
                if ended:
                    row.end()
        if self.job.max_time is not None and time.monotonic() - self.job.started > self.job.max_time:
            for row in self.rows:
                row.end()
        for row in self.rows:
            if row.done:
                row.free()
        if self.job.streamer is not None:
            self.job.streamer.put(column)
        return not all(row.done for row in self.rows)

    def _keep_logits(self, active: list[int]) -> None:
        logits_RV = torch.zeros(len(self.rows), self.native.whole_spec.vocab)
        for index in active:
            self.rows[index].request.copy_logits(logits_RV[index].data_ptr())
        self.logits.append(logits_RV)

    def close(self) -> None:
        for row in self.rows:
            row.free()


def _ended_by_criteria(criteria: Any, ids: torch.Tensor, scores: Any) -> list[bool]:
    """Whether one of the caller's stopping criteria ends each row; a criterion may answer for all rows at once."""
    ended = torch.zeros(ids.shape[0], dtype=torch.bool)
    for one in criteria:
        answer = one(ids, scores)
        ended |= answer.cpu().bool() if isinstance(answer, torch.Tensor) else bool(answer)
    result: list[bool] = ended.tolist()
    return result


def run(native: NativeModel, job: Job) -> Any:
    """Generate the answers of a job, and return what Hugging Face's `generate` returns."""
    loop = _Loop(native, job)
    if job.streamer is not None:
        job.streamer.put(job.input_ids.cpu())
    try:
        while loop.step():
            pass
    finally:
        loop.close()
    if job.streamer is not None:
        job.streamer.end()
    start = job.input_ids.repeat_interleave(job.copies, dim=0)
    longest = max(len(row.tokens) for row in loop.rows)
    answer = torch.tensor(
        [row.tokens + [job.pad] * (longest - len(row.tokens)) for row in loop.rows],
        dtype=start.dtype,
        device=start.device,
    )
    sequences = torch.cat([start, answer], dim=1)
    if not job.as_dict:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    cache = None
    if job.use_cache:
        from anyaccel.inference.hf.cache import NativeCache

        kept = torch.cat([job.mask.repeat_interleave(job.copies, dim=0), torch.ones_like(answer).cpu() != 0], dim=1)
        # Without the last token, as in the cache that transformers' loop returns.
        cache = NativeCache.from_tokens(native.model, native.spec.max_tokens, sequences.cpu()[:, :-1], kept[:, :-1])
        if native.ranks > 1:
            cache.fill()  # collective: all ranks call it here, but a single rank may use the cache later
    parts: dict[str, Any] = {
        "past_key_values": cache,
        "sequences": sequences,
        "logits": tuple(loop.logits) if job.output_logits else None,
        "scores": tuple(loop.logits) if job.output_scores else None,
    }
    return GenerateDecoderOnlyOutput(**parts)
