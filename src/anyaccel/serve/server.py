# SPDX-License-Identifier: Apache-2.0
"""The process that serves: sockets, TLS, logs, signals; uvicorn is what speaks HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anyaccel.errors import UsageError
from anyaccel.serve.contract import Engine
from anyaccel.serve.front import Front
from anyaccel.serve.http import application
from anyaccel.serve.limits import Limits

LEVELS = ("debug", "info", "warning", "error", "critical")
_CONNECTIONS = 1000  # at once; more get 503. A process may have 1,024 descriptors unless it is told otherwise.
_AFTER_DRAIN = 5.0  # seconds for the last words of answers that draining has ended

logger = logging.getLogger("anyaccel.serve")


@dataclass(frozen=True)
class Settings:
    """How to serve; see `anyaccel serve --help`."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    page: bool = True
    drain_seconds: float = 30.0
    log_level: str = "info"
    json_logs: bool = False


def check(settings: Settings) -> None:
    """What is wrong with settings, before a model is loaded.

    Raises:
        UsageError: something is.
    """
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise UsageError("--ssl-keyfile and --ssl-certfile: both are needed, or none")
    for name, file in (("--ssl-keyfile", settings.ssl_keyfile), ("--ssl-certfile", settings.ssl_certfile)):
        if file is not None and not Path(file).is_file():
            raise UsageError(f"{name} {file}: no such file")
    if settings.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"--ssl-certfile {settings.ssl_certfile}: not a certificate with this key ({error})"
            ) from None
    if settings.root_path and (not settings.root_path.startswith("/") or settings.root_path.endswith("/")):
        raise UsageError(f"--root-path {settings.root_path}: must begin with / and not end with it")


def bind(host: str, port: int) -> socket.socket:
    """Take the address, before the model is loaded: that it is in use is said at once. Nobody is let in yet.

    Raises:
        UsageError: it cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}; choose another --port") from None
    return taken


def is_reachable(host: str) -> bool:
    """Whether others than this machine can come to an address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def address(settings: Settings, port: int) -> str:
    """Where a user of this machine finds the server."""
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


def curl(settings: Settings, port: int, chats: bool) -> str:
    """A line that asks the server something, to be copied."""
    words = ["curl", f"{address(settings, port)}/v1/{'chat/' if chats else ''}completions"]
    if settings.ssl_certfile:
        words += ["--cacert", settings.ssl_certfile]
    words += ["-H", "Content-Type: application/json"]
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        if chats
        else {"prompt": "The sky is blue, as"}
    )
    line = shlex.join([*words, "-d", json.dumps({**asked, "max_tokens": 64})])
    # The shell puts the key in, so that it is in no history.
    return f'{line} -H "Authorization: Bearer $ANYACCEL_API_KEY"' if settings.keys else line


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


@contextlib.contextmanager
def logs(settings: Settings) -> Iterator[None]:
    """Write what uvicorn and we have to say to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.json_logs else logging.Formatter("%(levelname)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("uvicorn", "anyaccel.serve")]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in loggers]
    for each in loggers:
        each.setLevel(settings.log_level.upper())
        each.handlers[:] = [handler]
        each.propagate = False
    # What uvicorn says of its start we say ourselves.
    own = logging.getLogger("uvicorn.error")
    own_level = own.level
    own.setLevel(max(logging.WARNING, logging.getLevelName(settings.log_level.upper())))
    try:
        yield
    finally:
        own.setLevel(own_level)
        for each, level, propagate, handlers in before:
            each.setLevel(level)
            each.propagate = propagate
            each.handlers[:] = handlers


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 with bounds of the head of a request, where uvicorn itself takes all, and waits for ever."""

    class Bounded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None  # while a head is waited for
        _head = 0

        def _wait(self) -> None:
            self._has_come()
            self._head = 0
            self._timer = self.loop.call_later(limits.header_seconds, self._give_up)

        def _has_come(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._head += len(data)
            if self._timer is not None and self._head > limits.head:
                self._give_up()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["anyaccel.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            self._wait()

        def on_headers_complete(self) -> None:
            self._has_come()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_come()
            super().connection_lost(exc)

    return Bounded


class _Server(uvicorn.Server):
    """uvicorn's server without its handlers of signals, which would end this process by them once more at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(front: Front, settings: Settings, taken: socket.socket, announce: Callable[[], object]) -> None:
    app = application(front, keys=settings.keys, origins=settings.origins, page=settings.page)
    config = uvicorn.Config(
        app,
        http=_protocol(front.limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=settings.log_level in ("debug", "info"),
        server_header=False,
        root_path=settings.root_path,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=int(front.limits.idle_seconds),
        timeout_graceful_shutdown=int(settings.drain_seconds + _AFTER_DRAIN),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
            return
        server.should_exit = True
        announced.cancel()
        logger.info("stopping: open requests have %g s to end; a second signal ends them now", settings.drain_seconds)
        draining.append(loop.create_task(front.engine.drain(settings.drain_seconds)))

    async def say() -> None:
        while not server.started:
            await asyncio.sleep(0.005)
        announce()

    announced = loop.create_task(say())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve(sockets=[taken])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        announced.cancel()
        if server.force_exit:
            for task in draining:
                task.cancel()
        await asyncio.gather(announced, *draining, return_exceptions=True)


async def _until_the_end(
    engine: Engine, front: Front, settings: Settings, taken: socket.socket, announce: Callable[[], object]
) -> None:
    try:
        await _serve(front, settings, taken, announce)
    finally:
        await engine.close()


def run(engine: Engine, front: Front, settings: Settings, taken: socket.socket, announce: Callable[[], object]) -> None:
    """Serve until SIGTERM or Ctrl-C, and close the engine.

    Args:
        announce: called once the server answers.
    """
    with logs(settings), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_the_end(engine, front, settings, taken, announce))


def warnings_of(settings: Settings) -> Sequence[str]:
    """What a user should know of how the server is open."""
    if not is_reachable(settings.host) or settings.keys:
        return []
    where = settings.host or "0.0.0.0"
    return [
        f"warning: {where} can be reached from other machines, and no key is needed to use the model; "
        "set ANYACCEL_API_KEY, or leave out --host"
    ]
