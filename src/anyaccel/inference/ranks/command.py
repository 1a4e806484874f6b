# SPDX-License-Identifier: Apache-2.0
"""The ranks of `generate --tp` and `chat --tp`, which the command starts, controls and ends.

The command has the terminal and the text; the ranks compute (`rank.py`). They are in a session of their own, so that
Ctrl-C reaches the command only. In between is a launcher (`anyaccel.launch`), which binds the ranks, ends all of them
and reports why if one dies, and ends with the command. Each rank has a socket pair to the command, or on another host a
connection (`on_hosts.py`), over which the ranks also meet before they have shared memory.

All ranks must stop at the same token. So each rank takes at most as many steps as the command has allowed; the command
allows one more with each token that it receives, and to end an answer it sends all ranks the same last limit.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyAccelError
from anyaccel.host_memory import high_water_mark
from anyaccel.inference.ranks.control import EXIT_GRACE, RankError, Ranks, plan_ranks
from anyaccel.inference.ranks.processes import Processes, RankProcesses

if TYPE_CHECKING:
    from anyaccel.inference.generate import Generation, SamplingOptions
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter
    from anyaccel.launch.cluster.cluster import ClusterOptions

_AHEAD = 2  # steps that the ranks may be ahead, so that they go on while the command shows a token


def start(
    path: Path,
    options: ModelOptions,
    screen: Reporter,
    *,
    keep_on_interrupt: bool = True,
    cluster: ClusterOptions | None = None,
) -> RanksBackend:
    """Start the model's ranks and load it on them.

    Args:
        keep_on_interrupt: whether Ctrl-C ends only an answer, with all ranks at the same token, and not the command.
        cluster: the hosts to start them on; None: this machine.

    Raises:
        UsageError: there are too few CPUs, or the hosts have another number of slots.
        AnyAccelError: the model cannot be read, or a rank failed.
    """
    processes: Processes
    if cluster is None:
        plan, summary = plan_ranks(options)
        processes = RankProcesses(plan)
    else:
        from anyaccel.inference.ranks.on_hosts import HostProcesses, describe, find_ranks

        hosts = find_ranks(cluster, options)
        summary = describe(hosts, cluster.launcher)
        processes = HostProcesses(cluster, hosts)
    backend = RanksBackend(processes, keep_on_interrupt)
    try:
        backend.load(path, options, summary, screen)
    except BaseException:
        backend.close()
        raise
    return backend


class RanksBackend:
    """A model on ranks; see `Backend`."""

    first = True

    def __init__(self, processes: Processes, keep_on_interrupt: bool) -> None:
        self._keep_on_interrupt = keep_on_interrupt
        self._closed = False
        self._ranks = Ranks(processes, self._uninterrupted)
        self._held = 0
        self._interrupted = False
        self._handlers: dict[int, Any] = {}
        if callable(signal.getsignal(signal.SIGINT)):
            self._handle(signal.SIGINT, self._on_interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handle(number, self._on_termination)

    # --- signals

    def _handle(self, number: int, handler: Callable[[int, Any], object]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self._held:
            self._interrupted = True
        else:
            self._handlers[signal.SIGINT](number, frame)  # raises KeyboardInterrupt

    @staticmethod
    def _on_termination(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Defer Ctrl-C within the block, so that a message is not sent to some of the ranks only."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._interrupted and not self._held:
            self._interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A context for the time in which the command waits for the user, which the end of the ranks interrupts.

        Raises:
            RankError: the ranks have ended.
        """

        def check_ranks(_number: int = 0, _frame: Any = None) -> None:
            if self._ranks.processes.code() is not None:
                raise self._ranks.lost()

        before = signal.signal(signal.SIGCHLD, check_ranks)
        try:
            check_ranks()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)

    # --- the methods of a Backend

    def load(self, path: Path, options: ModelOptions, summary: str, screen: Reporter) -> None:
        """Make the ranks load the model and meet, and show their progress.

        Args:
            summary: the description of machine and plan, for the screen.

        Raises:
            AnyAccelError: a rank has failed, or the model has no tokenizer.
        """
        from anyaccel.inference.checkpoints.model_path import check_decoder_only
        from anyaccel.inference.text.tokenizer import load_text_tokenizer

        check_decoder_only(path)
        self._ranks.load(path, options, summary)
        problem: AnyAccelError | None = None
        try:
            self.tokenizer: Any = load_text_tokenizer(path, screen.line)
        except AnyAccelError as error:
            problem = error  # raised below, as an error of the weights has priority
        first = self._ranks.loaded(screen)[0]
        if problem is not None:
            raise problem
        self.runtime, self.accelerator = first["runtime"], first["accelerator"]
        self.context, self.vocabulary = first["context"], first["vocabulary"]
        self.ends = sorted({*first["ends"], *self.tokenizer.end_tokens}) if path.is_file() else first["ends"]

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: SamplingOptions, result: Generation
    ) -> Generator[int, None, None]:
        """Generate, reusing the common prefix in the ranks' caches.

        Ctrl-C or closing the generator ends the answer after at most two more steps of the ranks.
        """
        from anyaccel.inference.generate import check_prompt

        check_prompt(ids, max_new_tokens, self.vocabulary, self.context, getattr(self.tokenizer, "where", ""))
        result.prompt_tokens = len(ids)
        limit, under_way = _AHEAD, False
        result.begin()
        try:
            with self._uninterrupted():
                under_way = True
                how = vars(sampling)
                self._ranks.send(
                    "generate", ids=ids, max_new_tokens=max_new_tokens, sampling=how, ends=self.ends, limit=limit
                )
            while True:
                message = self._ranks.outcome(1 if result.tokens else len(ids), "token", "done")
                if message["kind"] == "done":
                    under_way = False
                    return
                result.add(message["token"])
                result.drafted, result.accepted = message["drafts"]
                if limit < max_new_tokens:  # at max_new_tokens the ranks end by themselves
                    limit += 1
                    with self._uninterrupted():
                        self._ranks.send("limit", limit=limit)
                yield result.tokens[-1]
        except (RankError, SystemExit):  # the ranks have ended, or are being ended
            under_way = False
            raise
        except KeyboardInterrupt:
            under_way = under_way and self._keep_on_interrupt
            raise
        finally:
            if under_way and not self._closed:
                with self._uninterrupted():
                    self._ranks.send("stop", limit=limit)
                    # This skips the tokens that are still under way.
                    self._ranks.outcome(1 if result.tokens else len(ids), "stopped")

    def clear_cache(self) -> None:
        with self._uninterrupted():
            self._ranks.send("clear_cache")

    def peaks(self) -> list[int]:
        """Peak memory of each rank in bytes."""
        with self._uninterrupted():
            self._ranks.send("peak")
            peaks = dict(self._ranks.next(self._ranks.timeout) for _ in self._ranks.channels)
        return [peaks[rank]["bytes"] for rank in sorted(peaks)]

    def own_peak(self) -> int:
        return high_water_mark()

    def close(self) -> None:
        """End the ranks and wait until nothing is left of them."""
        self._closed = True
        self._held += 1  # defers Ctrl-C for good, as the ranks are being ended already
        try:
            self._ranks.processes.end(EXIT_GRACE)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
