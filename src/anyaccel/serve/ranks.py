# SPDX-License-Identifier: Apache-2.0
"""A decoder on several ranks, each a process on cores of its own; see `inference/ranks`. Torch-free."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import CommTimeoutError
from anyaccel.inference.ranks.gathered import FAREWELL, RankError, Ranks, plan_ranks
from anyaccel.inference.ranks.processes import RankProcesses
from anyaccel.serve.contract import ModelFacts
from anyaccel.serve.facts import context_of, limited, plan_line, with_own_ends
from anyaccel.serve.slots import Ahead, Outcome, Work

if TYPE_CHECKING:
    from anyaccel.inference.ranks.loading import Watcher
    from anyaccel.inference.ranks.options import ModelOptions
    from anyaccel.serve.settings import EngineSettings

# Seconds that every step has, however short the others were; how many times what it should need; and the seconds that a
# token should need while no step has said more: both together let 70 billion parameters pass at 28 GFLOP/s.
_LEAST_S = 60.0
_TIMES = 20.0
_TOKEN_S = 0.25


class Patience:
    """How long the ranks may take for a step. Whoever takes longer hangs: the slowest machine has many times what its
    longest step has taken, in proportion where a step has more tokens than any before it."""

    def __init__(self) -> None:
        self._longest_s = _TOKEN_S
        self._most = 1

    def seconds(self, tokens: int) -> float:
        """For a step of so many tokens."""
        return _LEAST_S + _TIMES * self._longest_s * max(1.0, tokens / self._most)

    def took(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._longest_s = max(self._longest_s, seconds)
        self._most = max(self._most, tokens)


class RanksDecoder:
    """See `decoders.Decoder`. It belongs to the thread that made it: the ranks end with that thread."""

    goes_ahead = False  # each step is told to all ranks

    def __init__(
        self, options: ModelOptions, screen: Watcher, settings: EngineSettings, tokenizer: Any = None, replica: int = 0
    ) -> None:
        self._patience = Patience()
        plan, summary = plan_ranks(options.tp, replica, settings.replicas)
        self._ranks = Ranks(RankProcesses(plan, "anyaccel.serve.rank"))
        try:
            self._ranks.load(options, summary)
            said = self._ranks.loaded(screen)
        except BaseException:
            self.close()
            raise
        first = said[0]
        self.page_bytes = sum(each["page_bytes"] for each in said)
        self.cache_pages = min(each["cache_pages"] for each in said)
        self.shares = first["shares"]
        ends = with_own_ends(first["ends"], Path(options.model), tokenizer)
        count = f"{options.tp} ranks" if options.tp > 1 else "one process"
        where = f"{count} of {first['threads']} threads"
        facts = ModelFacts(
            context_of(first["context"], settings),
            first["vocabulary"],
            frozenset(ends),
            first["hidden"],
            options.dtype,
            plan_line(self, where, options, settings),
        )
        self.facts = limited(facts, self.cache_pages)

    def apply(self, work: Work, ahead: Ahead | None = None) -> Outcome:
        assert ahead is None
        self._ranks.send("step", work=asdict(work))
        tokens = sum(count for _, count in work.run)
        patience, start = self._patience.seconds(tokens), time.monotonic()
        try:
            while (message := self._ranks.next(patience)[1])["kind"] != "outcome":
                pass
        except CommTimeoutError:
            # Whoever closes this decoder, as the engine does then, kills ranks that do not end.
            raise RankError(f"a rank hangs: no step has ended within {patience:.0f} s; is it stopped?") from None
        self._patience.took(tokens, time.monotonic() - start)
        return Outcome(**message["outcome"])

    def check(self) -> None:
        if self._ranks.processes.code() is not None:
            raise self._ranks.lost()

    def close(self) -> None:
        self._ranks.processes.end(FAREWELL)
