# SPDX-License-Identifier: Apache-2.0
"""A rank of `generate --tp` and `chat --tp`, which computes what the command requests.

A model that the native runtime supports needs neither torch nor transformers, nor a tokenizer, as the command handles
text. All ranks get the same messages in the same order, and take no step beyond their limit; rank 0 sends the tokens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel import _native, env
from anyaccel.errors import AnyAccelError, PeerLostError
from anyaccel.inference.native.loading_watch import STARTING
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks.channel import Channel
from anyaccel.terminal import marked

if TYPE_CHECKING:
    from anyaccel.inference.ranks.backends import EngineBackend, NativeBackend

    Model = NativeBackend | EngineBackend

_PROGRESS_SECONDS = 0.05
_BEAT_SECONDS = 1.0  # or a quarter of the deadline, if that is less


def main(
    argv: list[str],
    serve: Callable[[Channel, int, Model], object] | None = None,
    lacking: Callable[[str], AnyAccelError] | None = None,
) -> int:
    """Serve until the command has ended.

    Args:
        argv: the descriptor of this rank's socket, and those of all ranks; empty if it has to call the command.
        serve: serves the command with the model; None: answers `generate` and `chat`, one request at a time.
        lacking: makes the error for a model that the native runtime does not support; None: its own code runs.
    """
    if argv:
        own, *everybodys = (int(text) for text in argv)
        for descriptor in everybodys:
            if descriptor != own:
                os.close(descriptor)
        channel = Channel(own, env.ANYACCEL_COMM_TIMEOUT.get())
    else:
        from anyaccel.inference.ranks.on_hosts import call_command

        try:
            channel = call_command()
        except AnyAccelError as error:
            sys.stderr.write(f"anyaccel: {marked(f'error: {error}', sys.stderr)}\n")
            return error.exit_code
    rank = int(os.environ["RANK"])
    try:
        try:
            timeout = env.ANYACCEL_COMM_TIMEOUT.get()
            # The command sends the first message after it has started all ranks, for which it has deadlines.
            first = channel.receive(2 * max(timeout, STARTING))
            beats = _native.Heartbeat(channel.descriptor, min(_BEAT_SECONDS, timeout / 4))
            try:
                options = ModelOptions(**first["options"])
                model = _open(channel, rank, Path(first["model"]), options, first["summary"], lacking)
            finally:
                beats.stop()  # while a chat waits for its user, nobody reads them
            (serve or _serve)(channel, rank, model)
        except (AnyAccelError, OSError, MemoryError) as error:
            _send_error(channel, error)
            while channel.receive():  # until the command ends all ranks
                pass
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    return 0


def _send_error(channel: Channel, error: Exception) -> None:
    from anyaccel.inference.native.rendezvous import OtherRankError

    channel.send(
        kind="error",
        text=" ".join(str(error).split()) or type(error).__name__,
        exit_code=error.exit_code if isinstance(error, AnyAccelError) else 1,
        own=not isinstance(error, OtherRankError),
        lost=isinstance(error, PeerLostError),
    )


class _Screen:
    """A Reporter that sends everything to the command, which shows it."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._sent = 0.0

    def line(self, text: str) -> None:
        if self._rank == 0:
            self._channel.send(kind="line", text=text)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._sent > _PROGRESS_SECONDS:
            self._sent = now
            self._channel.send(kind="progress", done=done, total=total)


def _open(
    channel: Channel,
    rank: int,
    path: Path,
    options: ModelOptions,
    summary: str,
    lacking: Callable[[str], AnyAccelError] | None,
) -> Model:
    """Load this rank's part of the model, and connect it to the other ranks."""
    from anyaccel.inference.opening import OwnCode, choose_runtime, find_accelerator, open_model
    from anyaccel.inference.ranks.backends import make_backend
    from anyaccel.inference.spec.mapping import Unsupported
    from anyaccel.topology import read_machine

    screen = _Screen(channel, rank)
    accelerator = find_accelerator(read_machine())
    screen.line(f"accelerator: {accelerator.description}")
    screen.line(summary)
    runtime = choose_runtime(options, accelerator.is_cpu)
    place = _place(channel, rank, options) if runtime == "native" else _group_place(options, accelerator.is_cpu)
    try:
        opened = open_model(path, options, place, Callbacks(screen.progress, line=screen.line))
    except Unsupported as lack:
        raise lack if lacking is None else lacking(lack.feature) from None
    if isinstance(opened, OwnCode):
        if lacking is not None:
            raise lacking(opened.feature)
        place = _group_place(options, accelerator.is_cpu)  # the model's own code talks through torch.distributed
    return make_backend(path, opened, options, place, screen, None, accelerator.name)


def _group_place(options: ModelOptions, on_cpu: bool) -> RankPlace:
    from anyaccel.inference.hf.group import group_place

    return group_place(options, on_cpu)


def _place(channel: Channel, rank: int, options: ModelOptions) -> RankPlace:
    """The place of a rank that talks to the others through the command until they have shared memory."""
    from anyaccel.inference.native.rendezvous import connect_ranks
    from anyaccel.launch.cluster.machines import host_identity

    if options.ranks == 1:
        return RankPlace()

    def exchange(value: Any) -> list[Any]:
        channel.send(kind="exchange", value=value)
        # Without a deadline, as the slowest rank may load for long, and the command notices one that ends.
        values: list[Any] = channel.receive()["values"]
        return values

    def connect(
        load: Callable[[Callbacks], NativeModel], callbacks: Callbacks, source: Path | None, wire_dtype: str
    ) -> NativeModel:
        return connect_ranks(
            exchange, lambda: load(callbacks), anonymous=True, hosts=hosts, source=source, wire_dtype=wire_dtype
        )

    # Anonymous memory is shared through /proc, which needs a common pid namespace: one launcher starts all ranks of a
    # host.
    hosts = exchange(host_identity() + os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    return RankPlace(rank, hosts.count(hosts[rank]), connect=connect)


def _serve(channel: Channel, rank: int, backend: Model) -> None:
    channel.send(
        kind="ready",
        runtime=backend.runtime,
        accelerator=backend.accelerator,
        context=backend.context,
        vocabulary=backend.vocabulary,
        ends=backend.ends,
    )
    while True:
        message = channel.receive()
        what = message["kind"]
        if what == "generate":
            _answer(channel, rank, backend, message)
        elif what == "clear_cache":
            backend.clear_cache()
        elif what == "peak":
            channel.send(kind="peak", bytes=backend.peak())
        elif what == "stop" and rank == 0:  # the answer has ended before; a late "limit" is ignored too
            channel.send(kind="stopped")


def _answer(channel: Channel, rank: int, backend: Model, message: dict[str, Any]) -> None:
    from anyaccel.inference.generate import Generation, SamplingOptions

    backend.ends = message["ends"]
    limit, wanted = message["limit"], message["max_new_tokens"]
    stopped, count = False, 0
    result = Generation()
    tokens = backend.tokens(message["ids"], wanted, SamplingOptions(**message["sampling"]), result)
    while True:
        while limit <= count < wanted and not stopped:
            update = channel.receive()
            limit, stopped = max(limit, update["limit"]), update["kind"] == "stop"
        if stopped and count >= limit:
            break
        token = next(tokens, None)
        if token is None:
            break
        count += 1
        if rank == 0:
            channel.send(kind="token", token=token, drafts=[result.drafted, result.accepted])
    tokens.close()
    if rank == 0:
        channel.send(kind="stopped" if stopped else "done")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
