# SPDX-License-Identifier: Apache-2.0
"""A real server process around the fake engine: what uvicorn, sockets, TLS and signals do.

Run as a program it serves; its answers are scripted by the last message: see `_answer`. Its first line of output is
its address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def main() -> None:
    """Serve until a signal comes."""
    from anyaccel.serve import listening, server
    from anyaccel.serve.api import connection
    from anyaccel.serve.api.models import Models
    from anyaccel.serve.interface import Chunk, GenerationRequest
    from anyaccel.serve.protocol.limits import HttpLimits
    from anyaccel.serve.requests.frontend import Frontend
    from anyaccel.serve.requests.tokenizer import ServerTokenizer
    from serve_fakes import TEMPLATE, ByteTokenizer, FakeEngine

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds")
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--header-seconds", type=float, default=20.0)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--ssl", nargs=2, default=(None, None))
    parser.add_argument("--root-path", default="")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--connections", type=int)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--otlp-endpoint")
    parser.add_argument("--log-level", default="info", help="a test that does not read the log asks for less of it")
    parser.add_argument("--stuck", action="store_true", help="the engine does not end")
    options = parser.parse_args()
    connection._LINGER_S = 60.0  # a busy machine may take its time for what a client still sends
    if options.stuck:
        server._AFTER_DRAIN = server._CLOSING = 0.1
    if options.connections:
        server.most_connections = lambda: options.connections

    class Slow(FakeEngine):
        """Takes its time for each token; an answer to "wait" comes when it is told to drain, or not at all."""

        def __init__(self) -> None:
            super().__init__(_answer)
            self.facts = replace(self.facts, context=options.context)
            self.draining: asyncio.Event | None = None

        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
            self.draining = self.draining or asyncio.Event()
            said = _asked(request.prompt)
            print("begin", flush=True)
            try:
                async for chunk in super().generate(request):
                    yield chunk
                    await asyncio.sleep(options.pause)
                    if "wait" in said:
                        await self.draining.wait()
                    if "forever" in said:
                        await asyncio.Event().wait()
            finally:
                print("end", flush=True)

        async def drain(self, seconds: float) -> None:
            if self.draining is not None:
                self.draining.set()
            if options.stuck:
                await asyncio.Event().wait()

        async def close(self) -> None:
            if options.stuck:
                await asyncio.Event().wait()
            await super().close()

    settings = listening.ServerSettings(
        port=options.port,
        uds=options.uds,
        keys=tuple(options.key),
        drain_seconds=options.drain_seconds,
        ssl_keyfile=options.ssl[0],
        ssl_certfile=options.ssl[1],
        root_path=options.root_path,
        json_logs=True,
        log_level=options.log_level,
        otlp_endpoint=options.otlp_endpoint,
    )
    listening.check(settings)
    engine = Slow()
    tokenizer = ByteTokenizer(TEMPLATE + "{# <think> #}")
    limits = HttpLimits(header_seconds=options.header_seconds)
    frontend = Frontend(engine, ServerTokenizer(tokenizer), ("fake",), limits=limits)
    with listening.bound_socket(settings) as taken:
        port = 0 if settings.uds else taken.getsockname()[1]
        server.run(Models.of(frontend), settings, taken, lambda: print(listening.address(settings, port), flush=True))
    print("closed" if not engine.live else "left open", flush=True)


def _text(prompt: Sequence[int]) -> str:
    return bytes(token for token in prompt if token < 256).decode()


def _asked(prompt: Sequence[int]) -> str:
    """The last message."""
    return _text(prompt).rpartition("<user>")[2].partition("\n<assistant>")[0]


def _answer(request: object) -> str:
    prompt: tuple[int, ...] = request.prompt  # type: ignore[attr-defined]
    text, asked = _text(prompt), _asked(prompt)
    if asked == "markdown":
        return (_ROOT / "tests" / "data" / "answers" / "markdown.md").read_text()
    if "<tool>" not in text.rpartition("<user>")[2]:  # until its result is there
        if asked == "weather":
            return '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        if "use the shell" in asked:  # Claude Code adds what it can do
            return '<tool_call>{"name": "Bash", "arguments": {"command": "echo hello > said.txt"}}</tool_call>'
    if asked.startswith("person"):  # for clients that ask for an object
        return '{"name": "Ann", "age": 30}'
    return text if asked == "prompt" else f"You said: {asked}"


class Server:
    """A server under test.

    Attributes:
        url: where it is.
        lines: of its output, after its address, as far as they were read.
    """

    def __init__(self, *options: str, **environment: str) -> None:
        variables = {
            **os.environ,
            "PYTHONPATH": str(_ROOT / "tests" / "helpers"),
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
        assert self.process.stdout is not None
        self.url = self.line()
        assert self.url.startswith("http"), self.url + self.end()

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, seconds: float = 60.0) -> str:
        """Wait for its end; what it wrote to standard error."""
        _, said = self.process.communicate(timeout=seconds)
        return said


@contextlib.contextmanager
def serving(*options: str, **environment: str) -> Iterator[Server]:
    """A server that is gone at the end, whatever happens."""
    server = Server(*options, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def wait_closed(server: Server, seconds: float = 60.0) -> None:
    """Wait until the process has ended by itself."""
    deadline = time.monotonic() + seconds
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.process.poll() is not None


if __name__ == "__main__":
    main()
