# SPDX-License-Identifier: Apache-2.0
"""What passes through a decoder at once: new tokens of several sequences, one after the other, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anyaccel.inference.device.pages import PAGE, KvPages
from anyaccel.inference.device.rotary import Angles, depends_on_context


@dataclass(frozen=True)
class Segment:
    """New tokens of a sequence, which has room for them already.

    Attributes:
        start: position of the first one.
        context: tokens of the sequence that rotary positions go by.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    context: int


@dataclass
class Group:
    """Sequences with equally many new tokens, whose attention is one call.

    Attributes:
        first: the first of their tokens in the batch.
        queries: new tokens of each sequence.
        keys: tokens of the longest one.
        positions: [sequences, queries] of the new tokens.
        states: numbers [sequences] of their recurrent states, 0 where the model has none.
        pages: numbers [sequences * pages], as many for each as the longest has and page 0 behind them; None where the
            only sequence's pages are one stretch of the cache, from `begin` on.
        plain: nothing has to be hidden but what comes after a token: "all" of the keys are seen, or it is "causal".
        made: masks by what they are made for; all layers share them.
        chosen: numbers [sequences, queries, top_k] of the tokens that each sees, by the last indexer; None: all.
    """

    first: int
    sequences: int
    queries: int
    keys: int
    positions: torch.Tensor
    states: torch.Tensor
    pages: torch.Tensor | None
    begin: int
    plain: str
    made: dict[object, torch.Tensor] = field(default_factory=dict)
    chosen: torch.Tensor | None = None


@dataclass
class Batch:
    """What one pass computes.

    Attributes:
        tokens, positions: [tokens].
        rows: [tokens], the rows of the cache where their keys and values go.
        angles: of each of the decoder's ropes, for all tokens, as `rotary.Angles` gives them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    angles: list[torch.Tensor]
    groups: list[Group]


def groups_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Single tokens together, and each prompt by itself."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if len(segment.tokens) == 1 and groups and len(groups[-1][0].tokens) == 1:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def make_batch(
    segments: Sequence[Segment], cache: KvPages, ropes: Sequence[Angles], device: torch.device, sinks: bool
) -> Batch:
    """The batch of segments, by one copy to the device (and one for each rope that depends on the context).

    Args:
        sinks: whether a layer has them: they need page 0, which is in no stretch of pages.
    """
    tokens = [token for segment in segments for token in segment.tokens]
    positions = [segment.start + i for segment in segments for i in range(len(segment.tokens))]
    rows = [
        cache.pages(segment.sequence)[at // PAGE] * PAGE + at % PAGE
        for segment in segments
        for at in range(segment.start, segment.start + len(segment.tokens))
    ]
    plans = []
    numbers = [cache.state(segment.sequence) for segment in segments]
    for group in groups_of(segments):
        ends = [segment.start + len(segment.tokens) for segment in group]
        count = -(-max(ends) // PAGE)
        held = [cache.pages(segment.sequence)[:count] for segment in group]
        together = len(group) == 1 and not sinks and held[0] == list(range(held[0][0], held[0][0] + count))
        plans.append((group, ends, count, held[0][0] * PAGE if together else -1))
        if not together:
            for each in held:
                numbers += each + [0] * (count + 1 - len(each))
    whole = to_device(torch.tensor(tokens + positions + rows + numbers, dtype=torch.int64), device)
    size = len(tokens)
    position_N = whole[size : 2 * size]
    groups: list[Group] = []
    first, state, page = 0, 3 * size, 3 * size + len(segments)
    for members, ends, count, begin in plans:
        queries = len(members[0].tokens)
        pages = None
        if begin < 0:
            pages = whole[page : page + len(members) * (count + 1)]
            page += len(members) * (count + 1)
        plain = ""
        if queries == 1 and min(ends) == max(ends):
            plain = "all"
        elif queries == ends[0]:
            plain = "causal"
        of_group = position_N[first : first + len(members) * queries].view(len(members), queries)
        states = whole[state : state + len(members)]
        groups.append(Group(first, len(members), queries, max(ends), of_group, states, pages, max(begin, 0), plain))
        first += len(members) * queries
        state += len(members)
    angles = [angles_of(rope, segments, position_N, max(positions) + 1, device) for rope in ropes]
    return Batch(whole[:size], position_N, whole[2 * size : 3 * size], angles, groups)


def angles_of(
    rope: Angles,
    segments: Sequence[Segment],
    positions: torch.Tensor,
    most: int,
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Those of the segments' tokens, whose `positions` on the device are below `most`; in `out`, if given."""
    found = rope.at(positions, most, out)
    first = 0
    for segment in segments:
        count = len(segment.tokens)
        if depends_on_context(rope.rope, segment.context):
            own = rope.of_context(range(segment.start, segment.start + count), segment.context)
            found[first : first + count].copy_(to_device(own, device))
        first += count
    return found


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that does not wait for the device."""
    return values.to(device, non_blocking=True)
