# SPDX-License-Identifier: Apache-2.0
"""A decoder on several ranks, each a process on cores of its own; see `inference/ranks`. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.inference.encoders.embedder import embedding_cuts
from anyaccel.inference.ranks.control import EXIT_GRACE, Ranks, plan_ranks
from anyaccel.inference.ranks.processes import RankProcesses
from anyaccel.serve.engine.facts import check_pages, limited, plan_line, served_context, with_own_ends
from anyaccel.serve.engine.step import MultiStep, StepInput, StepOutput
from anyaccel.serve.interface import ModelFacts

if TYPE_CHECKING:
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter
    from anyaccel.serve.engine.settings import EngineSettings


class RanksDecoder:
    """See `StepDecoder`. The ranks end when the thread that made this object ends."""

    multi_step = False  # each step is sent to all ranks

    def __init__(
        self,
        path: Path,
        options: ModelOptions,
        screen: Reporter,
        settings: EngineSettings,
        tokenizer: Any = None,
        replica: int = 0,
    ) -> None:
        plan, summary = plan_ranks(options, replica, settings.replicas)
        self._ranks = Ranks(RankProcesses(plan, "anyaccel.serve.engine.rank"))
        try:
            self._ranks.load(path, options, summary)
            said = self._ranks.loaded(screen)
            self.page_bytes = sum(each["page_bytes"] for each in said)
            self.state_pages = max(each["state_pages"] for each in said)
            states = settings.max_batch * self.state_pages
            self.cache_pages = min(each["cache_pages"] for each in said) - states
            check_pages(self.cache_pages, self.page_bytes, states)
        except BaseException:
            self.close()
            raise
        first = said[0]
        self.shares = first["shares"]
        ends = with_own_ends(first["ends"], path, tokenizer)
        count = f"{options.ranks} ranks" if options.ranks > 1 else "one process"
        where = f"{count} of {first['threads']} threads" if first["threads"] else f"{count} with a device each"
        facts = ModelFacts(
            served_context(first["context"], settings),
            first["vocabulary"],
            frozenset(ends),
            first["hidden"],
            options.dtype,
            plan_line(self, where, options, settings),
            sum(each["weight_bytes"] for each in said),
            sum(each["cache_bytes"] for each in said),
            cuts=embedding_cuts(path, first["hidden"]),
        )
        self.facts = limited(facts, self.cache_pages)

    def apply(self, step: StepInput, multi_step: MultiStep | None = None) -> StepOutput:
        assert multi_step is None
        self._ranks.send("step", step=step.to_message())
        message = self._ranks.outcome(sum(step.run.values()), "output")
        return StepOutput.from_message(message["output"])

    def late(self) -> bool:
        return self._ranks.steps.late()

    def check(self) -> None:
        if self._ranks.processes.code() is not None:
            raise self._ranks.lost()

    def close(self) -> None:
        self._ranks.processes.end(EXIT_GRACE)
