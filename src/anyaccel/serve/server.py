# SPDX-License-Identifier: Apache-2.0
"""Runs the application on uvicorn: logs, signals and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from anyaccel.serve.api.application import application
from anyaccel.serve.api.connection import bounded
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.traces import Traces
from anyaccel.serve.listening import ServerSettings, before_listening

_CONNECTIONS = 1000  # open at once; more get status 503
_DESCRIPTORS = 4096  # enough for these, for unfinished TLS handshakes, and for everything else
_QUIET = 0.1  # seconds without anything new after a signal, before sockets are closed
_AFTER_DRAIN = 5.0  # seconds for sending the end of the answers that draining has ended
_CLOSING = 10.0  # seconds for closing the engine, which a rank that hangs would keep open for ever

logger = logging.getLogger("anyaccel.serve")


class _JsonFormatter(logging.Formatter):
    """Formats each record as one line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _log_config(settings: ServerSettings) -> dict[str, Any]:
    """Each log, also of other packages, goes to standard error; in the form of `logging.config.dictConfig`."""
    level = logging.getLevelName(settings.log_level.upper())
    formatter = {"()": _JsonFormatter} if settings.json_logs else {"format": "%(levelname)s: %(message)s"}
    logger = {"handlers": ["stderr"], "level": level, "propagate": False}
    # We report the start ourselves, so uvicorn's messages about it are left out.
    own = {"level": max(logging.WARNING, level)}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {"uvicorn": logger, "uvicorn.error": own, "anyaccel.serve": logger},
        "root": {"handlers": ["stderr"], **own},
    }


def most_connections() -> int:
    """The most open connections, which leave a quarter of the file descriptors for files, ranks and handshakes."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if least != resource.RLIM_INFINITY and least < _DESCRIPTORS:
        least = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    return _CONNECTIONS if least == resource.RLIM_INFINITY else min(_CONNECTIONS, least * 3 // 4)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would raise the signal again at the end.

    Args:
        announce: called once the server answers.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._announce()


async def _take_last_requests(state: ServerState) -> None:
    """Read what clients had sent before the signal: the kernel resets connections that are closed with it unread."""
    seen = None
    for _ in range(10):  # clients that go on sending do not keep the server
        if seen == (seen := (len(state.connections), state.total_requests)):
            return
        await asyncio.sleep(_QUIET)
        for _ in range(3):  # the loop may come to its timers, after a pause of this process, before it reads sockets
            await asyncio.sleep(0)


async def _serve(
    models: Models,
    settings: ServerSettings,
    bound: socket.socket,
    announce: Callable[[], object],
    traces: Traces | None,
) -> None:
    app = application(
        models,
        keys=settings.keys,
        origins=settings.origins,
        hosts=settings.hosts,
        page=settings.page,
        traces=traces,
    )
    # Whoever may write to a Unix socket is on this machine, like the proxies that uvicorn trusts by default.
    trusted = "*" if settings.uds and "FORWARDED_ALLOW_IPS" not in os.environ else None
    config = uvicorn.Config(
        app,
        http=bounded(models.limits, most_connections()),
        ws="none",
        lifespan="off",
        log_config=_log_config(settings),
        access_log=False,  # the one of access.py knows how long an answer took
        server_header=False,
        root_path=settings.root_path,
        forwarded_allow_ips=trusted,
        timeout_keep_alive=int(models.limits.idle_seconds),
        timeout_graceful_shutdown=int(settings.drain_seconds + _AFTER_DRAIN),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    server = _Server(config, announce)
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await _take_last_requests(server.server_state)
        server.should_exit = True
        await models.drain(settings.drain_seconds)

    def stop() -> None:
        if draining:
            server.should_exit = server.force_exit = True
            return
        logger.info("stopping: open requests have %g s to end; a second signal ends them now", settings.drain_seconds)
        draining.append(loop.create_task(drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    before_listening(bound)
    try:
        await server.serve(sockets=[bound])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        for task in draining:  # it has had its time
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)


def run(
    models: Models,
    settings: ServerSettings,
    bound: socket.socket,
    announce: Callable[[], object],
) -> None:
    """Serve until SIGTERM or Ctrl-C, and close the engines of the models.

    Args:
        bound: the socket of `listening.bound_socket`.
        announce: called once the server answers.
    """

    async def main() -> None:
        traces = None
        try:
            traces = Traces(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
            await _serve(models, settings, bound, announce, traces)
        finally:
            closing = asyncio.ensure_future(models.close())
            if not (await asyncio.wait((closing,), timeout=_CLOSING))[0]:
                logger.error("the engine does not end; this process does, and takes its ranks with it")
                logging.shutdown()
                os._exit(1)
            await closing
            if traces is not None:
                traces.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
