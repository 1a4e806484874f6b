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
from anyaccel.errors import AnyAccelError, PeerLostError, UsageError
from anyaccel.inference.native.loading_watch import STARTING
from anyaccel.inference.ranks.options import ModelOptions
from anyaccel.inference.ranks.wire import Channel
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
            patience = env.ANYACCEL_COMM_TIMEOUT.get()
            # The command sends the first message after it has started all ranks, for which it has deadlines.
            told = channel.receive(2 * max(patience, STARTING))
            beats = _native.Heartbeat(channel.descriptor, min(_BEAT_SECONDS, patience / 4))
            try:
                model = _open(channel, rank, ModelOptions(**told["options"]), told["summary"], lacking)
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
    from anyaccel.inference.native.joining import OtherRankError

    channel.send(
        kind="error",
        text=" ".join(str(error).split()) or type(error).__name__,
        exit_code=error.exit_code if isinstance(error, AnyAccelError) else 1,
        own=not isinstance(error, OtherRankError),
        lost=isinstance(error, PeerLostError),
    )


class _Screen:
    """A Watcher that sends everything to the command, which shows it."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._told = 0.0

    def line(self, text: str) -> None:
        if self._rank == 0:
            self._channel.send(kind="line", text=text)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told > _PROGRESS_SECONDS:
            self._told = now
            self._channel.send(kind="progress", done=done, total=total)


def _open(
    channel: Channel,
    rank: int,
    options: ModelOptions,
    summary: str,
    lacking: Callable[[str], AnyAccelError] | None,
) -> Model:
    """Load this rank's part of the model, and connect it to the other ranks."""
    from anyaccel.inference.ranks.loading import (
        describe_accelerator,
        executor_of,
        host_accelerator,
        instead,
        no_drafts,
        open_engine,
    )
    from anyaccel.topology import read_machine

    screen = _Screen(channel, rank)
    host = host_accelerator(read_machine())
    screen.line(f"accelerator: {host[1] if host else describe_accelerator()}")
    screen.line(summary)
    executor = executor_of(options, host is not None)
    if options.pp > 1 and executor != "native":
        raise UsageError(f"--pp {options.pp}: only the native runtime has it, which runs on the CPU")
    if options.draft and executor == "device":
        raise no_drafts(options, "runs on the CPU")
    if executor:
        from anyaccel.inference.spec.mapping import Unsupported

        try:
            if executor == "device":
                return _open_device(rank, options, screen)
            return _open_native(channel, rank, options, host[0] if host else "", screen)
        except Unsupported as lack:  # raised on every rank, so all of them go on with the engine
            if lacking is not None:
                raise lacking(lack.feature) from None
            if options.pp > 1:
                raise UsageError(
                    f"--pp {options.pp}: only the native runtime has it, which has no {lack.feature}"
                ) from None
            if options.draft:
                raise no_drafts(options, f"has no {lack.feature}") from None
            screen.line(instead(options, executor, lack.feature))
    return open_engine(options, Path(options.model), screen)


def _open_native(
    channel: Channel, rank: int, options: ModelOptions, accelerator: str, screen: _Screen
) -> NativeBackend:
    from anyaccel.inference.native.draft import attach, lacks_draft, say_if_useless
    from anyaccel.inference.native.joining import together
    from anyaccel.inference.ranks.backends import NativeBackend
    from anyaccel.inference.ranks.loading import describe_weights, draft_options, loader
    from anyaccel.inference.spec.mapping import Unsupported
    from anyaccel.inference.text.tokenizer import end_tokens
    from anyaccel.launch.cluster.machines import host_identity

    def exchange(value: Any) -> list[Any]:
        channel.send(kind="say", value=value)
        # Without a deadline, as the slowest rank may load for long, and the command notices one that ends.
        everybodys: list[Any] = channel.receive()["all"]
        return everybodys

    def load_together(model: ModelOptions) -> Any:
        load = loader(model, screen.progress, rank, on_host=hosts.count(hosts[rank]))
        if options.ranks == 1:
            return load()
        return together(exchange, load, anonymous=True, hosts=hosts, source=Path(model.model))

    # Anonymous memory is shared through /proc, which needs a common pid namespace: one launcher starts all ranks of a
    # host.
    hosts = exchange(host_identity() + os.readlink("/proc/self/ns/pid")) if options.ranks > 1 else [""]  # noqa: PTH115
    native = load_together(options)
    describe_weights(native, screen)
    if options.draft:
        try:
            draft = load_together(draft_options(options))
        except Unsupported as lack:
            raise lacks_draft(options.draft, lack.feature) from None
        attach(native, draft)
        say_if_useless(native, Path(options.draft).name, screen.line)
    ends = end_tokens(native.generation_config, native.config, Path(options.model), note=rank == 0)
    return NativeBackend(native, None, ends, accelerator, options.dtype)


def _open_device(rank: int, options: ModelOptions, screen: _Screen) -> NativeBackend:
    from anyaccel.inference.hf.group import hosts_of, together, tp_group
    from anyaccel.inference.ranks.backends import NativeBackend
    from anyaccel.inference.ranks.loading import accelerator_name, describe_weights, device_loader
    from anyaccel.inference.text.tokenizer import end_tokens

    path = Path(options.model)
    group, place = tp_group(options.tp, options.asked)
    hosts = hosts_of(group)
    on_host = hosts.count(hosts[place]) if hosts else 1

    def load(told: Callable[[int, int], object] | None) -> Any:
        return device_loader(options, told or screen.progress, place, None, group, on_host)()

    native = together(group, load, hosts, path, progress=screen.progress)
    describe_weights(native, screen)
    ends = end_tokens(native.generation_config, native.config, path, note=rank == 0)
    return NativeBackend(native, None, ends, accelerator_name(), options.dtype, "device")


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
        elif what == "forget":
            backend.forget()
        elif what == "peak":
            channel.send(kind="peak", bytes=backend.peak())
        elif what == "stop" and rank == 0:  # the answer has ended before; a late "limit" is ignored too
            channel.send(kind="stopped")


def _answer(channel: Channel, rank: int, backend: Model, message: dict[str, Any]) -> None:
    from anyaccel.inference.generate import Generation, Sampling

    backend.ends = message["ends"]
    limit, wanted = message["limit"], message["max_new_tokens"]
    stopped, count = False, 0
    result = Generation()
    tokens = backend.tokens(message["ids"], wanted, Sampling(**message["sampling"]), result)
    while True:
        while limit <= count < wanted and not stopped:
            told = channel.receive()
            limit, stopped = max(limit, told["limit"]), told["kind"] == "stop"
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
