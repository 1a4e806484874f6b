# SPDX-License-Identifier: Apache-2.0
"""The ranks of `generate --tp` and `chat --tp`: started, told what to do, and ended by the command itself.

The command keeps the terminal and the text, the ranks compute (`rank.py`). They are in a session of their own, so that
Ctrl-C reaches the command alone; between both is a launcher (`anyaccel.launch`), which binds the ranks, ends all when
one dies and says why, and ends with the command. Each rank has a socket pair to the command; over it the ranks also
meet, before they have shared memory.

All ranks stop at the same token: each may take the steps that it was allowed and no more, the command allows a step
more with each token that comes, and whoever ends an answer tells all ranks the highest number that any was allowed.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel import env
from anyaccel.errors import AnyAccelError, CommTimeoutError, UsageError
from anyaccel.host_memory import high_water_mark
from anyaccel.inference.ranks.processes import RankProcesses

if TYPE_CHECKING:
    from anyaccel.inference.generate import Generation, Sampling
    from anyaccel.inference.ranks.loading import Watcher
    from anyaccel.inference.ranks.options import ModelOptions

_AHEAD = 2  # steps that the ranks are allowed beyond what has come: they go on while the command shows a token
# Seconds: of ranks for saying what is wrong, or ending by themselves; of the launcher for noticing a rank's end.
_FAREWELL = 0.5
_NOTICE = 5.0
_LOADING = 1800.0  # of a rank that converts or packs a large model, and says nothing meanwhile


class RankError(AnyAccelError):
    """What went wrong on a rank; the ranks are of no use then.

    Args:
        exit_code: of the command.
    """

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start(options: ModelOptions, screen: Watcher, *, lasting: bool = True) -> RanksBackend:
    """Start `options.tp` ranks and load the model on them.

    Args:
        lasting: Ctrl-C ends an answer only, once the ranks are at the same token.

    Raises:
        UsageError: there are not so many CPUs.
        AnyAccelError: the model cannot be read, or a rank failed.
    """
    from anyaccel import launch
    from anyaccel.topology import read_machine

    machine = read_machine()
    if options.tp > len(machine.allowed_cpus):
        raise UsageError(
            f"--tp {options.tp}: this process may use {len(machine.allowed_cpus)} CPUs only, and each rank needs one; "
            f"--tp {len(machine.allowed_cpus)} is the most here"
        )
    wanted = launch.LaunchOptions(
        script="anyaccel",
        module=True,
        num_accelerators=options.tp,
        # Two hardware threads of one core cannot be two ranks' own cores; they share it unbound.
        bind_cores=options.tp <= len(machine.cores()),
        local_rank_argument=False,
    )
    plan = launch.make_plan(wanted, machine)
    backend = RanksBackend(RankProcesses(plan), lasting)
    try:
        backend.load(options, f"topology: {machine.summary()}\n{plan.render()}", screen)
    except BaseException:
        backend.close()
        raise
    return backend


class RanksBackend:
    """A model on ranks; see `Backend`."""

    first = True

    def __init__(self, processes: RankProcesses, lasting: bool) -> None:
        self._lasting = lasting
        self._closed = False
        self._processes = processes
        self._channels = processes.channels
        self._patience = env.ANYACCEL_COMM_TIMEOUT.get()
        self._held = 0
        self._interrupted = False
        self._handlers: dict[int, Any] = {}
        if callable(signal.getsignal(signal.SIGINT)):
            self._handle(signal.SIGINT, self._on_interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handle(number, self._on_end)

    # --- signals

    def _handle(self, number: int, handler: Callable[[int, Any], object]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self._held:
            self._interrupted = True
        else:
            self._handlers[signal.SIGINT](number, frame)  # it raises KeyboardInterrupt, now or soon

    @staticmethod
    def _on_end(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Ctrl-C waits: what all ranks must be told goes to all of them."""
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
        """Around a wait for the user, which the end of a rank interrupts.

        Raises:
            RankError: the ranks have ended.
        """

        def look(_number: int, _frame: Any) -> None:
            if self._processes.code() is not None:
                raise self._lost()

        before = signal.signal(signal.SIGCHLD, look)
        try:
            if self._processes.code() is not None:
                raise self._lost()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)

    # --- talking to the ranks

    def _send(self, kind: str, **message: Any) -> None:
        try:
            for channel in self._channels:
                channel.send(kind=kind, **message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None

    def _next(self, patience: float | None = None) -> tuple[int, dict[str, Any]]:
        """A message of any rank, and its rank.

        Raises:
            RankError: a rank failed or died.
            CommTimeoutError: none said anything for so many seconds; None: the ranks have deadlines among themselves.
        """
        while True:
            for rank, channel in enumerate(self._channels):
                message = channel.next()
                if message is not None:
                    if message["kind"] == "error":
                        self._fail(rank, message)
                    return rank, message
            self._wait(patience)

    def _wait(self, patience: float | None) -> None:
        poller = select.poll()
        for channel in self._channels:
            poller.register(channel.descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(None if patience is None else patience * 1000)}
        if not ready:
            raise CommTimeoutError(f"no rank has said anything for {patience:g} s (ANYACCEL_COMM_TIMEOUT)")
        try:
            with self._whole():
                for channel in self._channels:
                    if channel.descriptor in ready:
                        channel.pump()
        except EOFError:
            # What the others said before may tell why.
            self._fail(-1, {})

    def _lost(self) -> RankError:
        code = self._processes.wait(_NOTICE)  # the launcher says which rank, and how
        how = "" if code is None else f" with code {code}"
        return RankError(f"the ranks have ended{how}; what is said above tells why", code or 1)

    def _fail(self, rank: int, message: dict[str, Any]) -> NoReturn:
        """Raise what went wrong: of all that the ranks say, what is their own, and not that another one is gone."""
        said = {rank: message} if message else {}
        deadline = time.monotonic() + _FAREWELL
        channels = dict(enumerate(self._channels))
        while len(said) < len(self._channels) and time.monotonic() < deadline and channels:
            for other, channel in list(channels.items()):
                try:
                    channel.pump()
                except EOFError:
                    del channels[other]
                while told := channel.next():
                    if told["kind"] == "error":
                        said.setdefault(other, told)
            time.sleep(0.005)
        own = {rank: told for rank, told in said.items() if told["own"] and not told["lost"]}
        if not own and self._processes.wait(_NOTICE) is not None:
            raise self._lost()
        if not said:
            raise RankError("a rank does not answer any more; run the command again")
        chosen = own or said
        first = min(chosen)
        text = chosen[first]["text"]
        everybodys = len(chosen) == len(self._channels) and len({told["text"] for told in chosen.values()}) == 1
        where = "" if everybodys or not chosen[first]["own"] else f"rank {first}: "
        raise RankError(where + text, chosen[first]["exit_code"])

    # --- what a Backend does

    def load(self, options: ModelOptions, summary: str, screen: Watcher) -> None:
        """Have the ranks load, show how far they are, and let them meet.

        Args:
            summary: of machine and plan, for the screen.

        Raises:
            AnyAccelError: one of them cannot, or the model has no tokenizer.
        """
        from anyaccel.inference.checkpoints.model_path import check_model_path
        from anyaccel.inference.text.tokenizer import load_text_tokenizer

        path = Path(options.model)
        check_model_path(path)
        self._send("options", options=asdict(options), summary=summary)
        problem: AnyAccelError | None = None
        try:
            self.tokenizer: Any = load_text_tokenizer(path, screen.line)
        except AnyAccelError as error:
            problem = error  # that of the weights is the more telling one
        said: dict[int, Any] = {}
        ready: dict[int, dict[str, Any]] = {}
        done: dict[int, tuple[int, int]] = {}
        while len(ready) < len(self._channels):
            rank, message = self._next(max(self._patience, _LOADING))
            what = message["kind"]
            if what == "line":
                screen.line(message["text"])
            elif what == "progress":
                before = done.get(rank)
                done[rank] = message["done"], message["total"]
                if len(done) == len(self._channels) and done[rank] != before:
                    screen.progress(*(sum(numbers) for numbers in zip(*done.values(), strict=True)))
            elif what == "say":
                said[rank] = message["value"]
                if len(said) == len(self._channels):
                    everybodys = [said[each] for each in sorted(said)]
                    said.clear()
                    self._send("all", all=everybodys)
            elif what == "ready":
                ready[rank] = message
        if problem is not None:
            raise problem
        first = ready[0]
        self.runtime, self.accelerator = first["runtime"], first["accelerator"]
        self.context, self.vocabulary = first["context"], first["vocabulary"]
        self.ends = sorted({*first["ends"], *self.tokenizer.end_tokens}) if path.is_file() else first["ends"]

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation
    ) -> Generator[int, None, None]:
        """Generate; what the last answer left in the ranks' caches is used again.

        Ctrl-C and closing it end the answer after at most two more steps of the ranks.
        """
        from anyaccel.inference.generate import check_prompt

        check_prompt(ids, max_new_tokens, self.vocabulary, self.context, getattr(self.tokenizer, "where", ""))
        result.prompt_tokens = len(ids)
        limit, under_way = _AHEAD, False
        start = first = time.perf_counter()
        try:
            with self._whole():
                under_way = True
                how = vars(sampling)
                self._send(
                    "generate", ids=ids, max_new_tokens=max_new_tokens, sampling=how, ends=self.ends, limit=limit
                )
            while True:
                message = self._next()[1]
                if message["kind"] == "done":
                    under_way = False
                    return
                now = time.perf_counter()
                if not result.tokens:
                    first = now
                    result.prompt_seconds = now - start
                result.decode_seconds = now - first
                result.tokens.append(message["token"])
                if limit < max_new_tokens:  # with no more to come the ranks end by themselves
                    limit += 1
                    with self._whole():
                        self._send("limit", limit=limit)
                yield result.tokens[-1]
        except (RankError, SystemExit):  # the ranks are gone, or are ended
            under_way = False
            raise
        except KeyboardInterrupt:
            under_way = under_way and self._lasting
            raise
        finally:
            if under_way and not self._closed:
                with self._whole():
                    self._send("stop", limit=limit)
                    while self._next()[1]["kind"] != "stopped":
                        pass  # tokens that nobody sees

    def forget(self) -> None:
        with self._whole():
            self._send("forget")

    def peaks(self) -> list[int]:
        """Peak memory of each rank in bytes."""
        with self._whole():
            self._send("peak")
            peaks = dict(self._next(self._patience) for _ in self._channels)
        return [peaks[rank]["bytes"] for rank in sorted(peaks)]

    def beside(self) -> int:
        return high_water_mark()

    def close(self) -> None:
        """End the ranks and wait until nothing is left of them."""
        self._closed = True
        self._held += 1  # once is enough: the clean-up goes on
        try:
            self._processes.end(_FAREWELL)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
