# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve` under clients that come, go and break off, and ranks that are killed: `make soak-serve`.

Requests are of all APIs: OpenAI's, Anthropic's and Ollama's. Greedy answers are first computed alone; each complete one
under load has to be the same. In the first fifth a rank is killed, and another one later (with --tp 2 or more);
requests may fail only from then on until the server is ready again. At the end the server must have no more
descriptors, threads and memory than after the first fifth: what starts ranks again has once more of them than what
has started the first ones, as it comes from a server that serves already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_WORDS = [
    *("memory", "core", "cache", "node", "thread", "rank", "model", "token", "layer"),
    *("weight", "kernel", "page", "socket", "host", "signal", "queue", "batch"),
]
_MOST_MB = 24.0  # that a process may have more at the end: heaps are never quite the same
_MOST_THREADS = 6  # of asyncio's pool, which come when they are wanted first
_SCHEMA = {"type": "object", "properties": {"word": {"enum": _WORDS}}, "required": ["word"]}


class Wrong(Exception):
    """The server has done what it must not."""


@dataclass
class Reply:
    """What came back; `whole`: the server has ended it, not we."""

    status: int
    body: bytes
    whole: bool = True

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]


@dataclass
class Soak:
    """A server and what is known of it."""

    port: int
    pid: int
    order: random.Random
    references: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failing: list[tuple[float, float]] = field(default_factory=list)  # when requests may fail
    sent: int = 0  # requests of clients

    model: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def times(self) -> dict[str, float]:
        """Seconds of the clients' requests: the median, and that of the slowest hundredth."""
        ordered = sorted(self.seconds)
        return {name: round(ordered[int(part * (len(ordered) - 1))], 2) for name, part in (("p50", 0.5), ("p99", 0.99))}

    async def send(
        self, method: str, path: str, body: bytes = b"", most: int = -1, part: int = -1, pause: float = 0.0
    ) -> Reply:
        """One request in HTTP/1.0, whose end is that of the connection.

        Args:
            most: bytes of the reply after which we break off; negative: never.
            part: bytes of the request that are sent before we break off.
            pause: seconds between two reads, which then take little each.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            whole = head.encode() + body
            writer.write(whole if part < 0 else whole[:part])
            await writer.drain()
            if part >= 0:
                return Reply(0, b"", False)
            got = b""
            while most < 0 or len(got) < most:
                async with asyncio.timeout(300):
                    more = await reader.read(2048 if pause else 1 << 16)
                    await asyncio.sleep(pause)
                if not more:
                    break
                got += more
            else:
                return Reply(0, got, False)
            found, _, rest = got.partition(b"\r\n\r\n")
            status = re.match(rb"HTTP/1\.[01] (\d+)", found)
            if status is None:
                raise ConnectionError("no answer")
            chunked = b"transfer-encoding: chunked" in found.lower()  # which uvicorn sends by HTTP/1.0 too
            return Reply(int(status[1]), unchunked(rest) if chunked else rest)
        finally:
            if part >= 0 or most >= 0:
                writer.transport.abort()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def post(self, path: str, value: object, **more: Any) -> Reply:
        return await self.send("POST", path, json.dumps(value).encode(), **more)

    # --- what clients do

    def prompt(self) -> str:
        count = self.order.randrange(1, 60)
        return " ".join(self.order.choice(_WORDS) for _ in range(count))

    async def greedy(self) -> None:
        """A greedy answer, as one piece or as a stream, is that which was computed alone."""
        value, expected = self.order.choice(self.references)
        stream = self.order.random() < 0.6
        reply = await self.post("/v1/completions", {**value, "stream": stream})
        text = text_of(reply, stream)
        if text != expected:
            raise Wrong(f"the answer to {value} is {text!r}, and was {expected!r} alone")

    async def sampled(self) -> None:
        value = {"prompt": self.prompt(), "max_tokens": 20, "n": 3, "temperature": 1.2, "top_p": 0.9, "logprobs": 2}
        reply = await self.post(
            "/v1/completions", {**value, "echo": self.order.random() < 0.3, "presence_penalty": 0.5}
        )
        if len(checked(reply)["choices"]) != 3:
            raise Wrong("not three answers")

    async def formatted(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "word", "schema": _SCHEMA}}
        value = {"messages": [{"role": "user", "content": self.prompt()}], "response_format": form, "max_tokens": 60}
        (choice,) = checked(await self.post("/v1/chat/completions", value))["choices"]
        if choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["word"] not in _WORDS:
            raise Wrong(f"not by its schema: {choice}")

    async def embedded(self) -> None:
        reply = await self.post("/v1/embeddings", {"input": [self.prompt(), self.prompt()]})
        if len(checked(reply)["data"]) != 2:
            raise Wrong("not two embeddings")

    async def conversed(self) -> None:
        """A conversation by each API, whole or as a stream, says the same: greedy, and without a limit on the words."""
        messages = [{"role": "user", "content": self.prompt()}]
        stream, count = self.order.random() < 0.5, self.order.randrange(2, 24)
        asked: list[tuple[str, dict[str, Any], Callable[[Reply], str]]] = [
            ("/v1/chat/completions", {"max_tokens": count, "temperature": 0}, chat_text),
            ("/v1/messages", {"max_tokens": count, "temperature": 0, "model": self.model}, anthropic_text),
            ("/api/chat", {"options": {"num_predict": count, "temperature": 0}, "model": self.model}, ollama_text),
            ("/v1/responses", {"max_output_tokens": count, "temperature": 0, "store": False}, responses_text),
        ]
        path, fields, read = self.order.choice(asked)
        fields |= {"input" if path == "/v1/responses" else "messages": messages, "stream": stream}
        reply = await self.post(path, fields)
        text = read(reply)  # an answer of Ollama's begins with a stream of lines, and of others with events
        path, fields, read = self.order.choice(asked)
        fields |= {"input" if path == "/v1/responses" else "messages": messages, "stream": not stream}
        again = read(await self.post(path, fields))
        self.sent += 1
        if text != again:
            raise Wrong(f"{path} says {again!r} where another API says {text!r}")

    async def called(self) -> None:
        """A call that is required fits the function's schema."""
        function = {"name": "choose", "parameters": _SCHEMA}
        value = {
            "messages": [{"role": "user", "content": self.prompt()}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 80,
        }
        (choice,) = checked(await self.post("/v1/chat/completions", value))["choices"]
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            if json.loads(call["function"]["arguments"])["word"] not in _WORDS:
                raise Wrong(f"not by its schema: {choice}")

    async def slow(self) -> None:
        """A client that takes its answer in small pieces, with pauses, gets all of it."""
        value = {"prompt": self.prompt(), "max_tokens": 40, "ignore_eos": True, "stream": True, "n": 4}
        reply = await self.post("/v1/completions", value, pause=0.05)
        text_of(reply, True)

    async def broken_off(self) -> None:
        value = {"prompt": self.prompt(), "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
        await self.post("/v1/completions", value, most=self.order.randrange(1, 6000))

    async def half_sent(self) -> None:
        await self.post("/v1/completions", {"prompt": self.prompt()}, part=self.order.randrange(1, 120))

    async def late(self) -> None:
        value = {"prompt": self.prompt(), "max_tokens": 300, "ignore_eos": True, "timeout_s": 0.05}
        reply = await self.post("/v1/completions", value)
        if reply.status not in (200, 503, 504):
            raise Wrong(f"late: {reply.status} {reply.body[:200]!r}")

    async def malformed(self) -> None:
        """Nothing that is wrong is taken, and nothing makes the server fail."""
        good = json.dumps({"prompt": "a b c", "max_tokens": 4}).encode()
        place = self.order.randrange(len(good))
        bodies: list[bytes] = [
            bytes(self.order.randrange(256) for _ in range(self.order.randrange(200))),
            good[:place],
            b"[" * 100_000,
            json.dumps({"prompt": {"a": [None]}}).encode(),
            json.dumps({"prompt": "a", "max_tokens": -5}).encode(),
            json.dumps({"prompt": [[1, 2], ["a"]]}).encode(),
            json.dumps({"prompt": [1 << 60]}).encode(),
            json.dumps({"prompt": "a", "guided_regex": "(" * 50}).encode(),
            json.dumps({"prompt": "a", "logit_bias": {"x": 1}}).encode(),
            json.dumps({"prompt": "a", "temperature": "hot"}).encode(),
            json.dumps({"prompt": "\ud800", "max_tokens": 3, "n": 10**9}).encode(),
        ]
        reply = await self.send("POST", "/v1/completions", self.order.choice(bodies))
        if not 400 <= reply.status < 500 and reply.status != 503:
            raise Wrong(f"malformed: {reply.status} {reply.body[:200]!r}")

    async def asked(self) -> None:
        path = self.order.choice(["/metrics", "/v1/models", "/health", "/openapi.json", "/nothing"])
        reply = await self.send("GET", path)
        if reply.status != (404 if path == "/nothing" else 200):
            raise Wrong(f"{path}: {reply.status}")

    # --- clients

    async def client(self, until: float, count: int) -> None:
        """One action after the other, until it is so late and so many requests have been sent."""
        actions: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            *((12, self.greedy), (2, self.sampled), (2, self.formatted), (1, self.embedded), (5, self.broken_off)),
            *((2, self.half_sent), (2, self.late), (3, self.malformed), (1, self.asked)),
            *((12, self.conversed), (2, self.called), (1, self.slow)),
        ]
        weights = [weight for weight, _ in actions]
        while time.monotonic() < until or self.sent < count:
            (action,) = self.order.choices([each for _, each in actions], weights)
            began = time.monotonic()
            try:
                await action()
            except (Wrong, OSError, asyncio.IncompleteReadError, TimeoutError, KeyError, ValueError) as error:
                now = time.monotonic()
                if not any(began <= end and now >= start for start, end in self.failing):
                    raise Wrong(f"{action.__name__}: {type(error).__name__}: {error}") from error
                self.counts["failed while a rank was away"] += 1
            self.counts[action.__name__] += 1
            self.sent += 1
            self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(self.order.random() * 0.1)

    async def named(self) -> str:
        """The name of the model."""
        return str(json.loads((await self.send("GET", "/v1/models")).body)["data"][0]["id"])

    async def load(self, clients: int, seconds: float, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self.client(time.monotonic() + seconds, count))

    async def quiet(self) -> None:
        """Wait until nothing is computed any more."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            told = (await self.send("GET", "/metrics")).body.decode()
            open_ones = re.findall(r"^anyaccel_num_requests_(?:running|waiting)\{.*\} (\d+)$", told, re.MULTILINE)
            if open_ones == ["0", "0"]:
                return
            await asyncio.sleep(0.1)
        raise Wrong("requests that nobody waits for are still open after two minutes")

    async def kill_one(self) -> None:
        """A rank dies, and the server is ready again some time after."""
        ranks = ranks_below(self.pid)
        self.failing.append((time.monotonic(), float("inf")))
        os.kill(self.order.choice(ranks), signal.SIGKILL)
        await asyncio.sleep(1)
        deadline = time.monotonic() + 120
        while (await self.send("GET", "/ready")).status != 200:
            if time.monotonic() > deadline:
                raise Wrong("the server is not ready two minutes after a rank was killed")
            await asyncio.sleep(0.1)
        self.failing[-1] = (self.failing[-1][0], time.monotonic())
        print(f"a rank was killed; ready again after {self.failing[-1][1] - self.failing[-1][0]:.1f} s", flush=True)


def unchunked(body: bytes) -> bytes:
    """A body that came in chunks, as far as it came."""
    made = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16) if size else 0
        made, body = made + body[:count], body[count + 2 :]
    return made


def flat(error: BaseException) -> list[BaseException]:
    """The errors of groups within groups."""
    return (
        [each for inner in error.exceptions for each in flat(inner)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


def checked(reply: Reply) -> Any:
    if reply.status != 200:
        raise Wrong(f"{reply.status} {reply.body[:300]!r}")
    return json.loads(reply.body)


def text_of(reply: Reply, stream: bool) -> str:
    """The whole answer."""
    if not stream:
        return str(checked(reply)["choices"][0]["text"])
    events = reply.events
    if reply.status != 200 or any("error" in event for event in events) or b"[DONE]" not in reply.body:
        raise Wrong(f"{reply.status} {reply.body[-300:]!r}")
    return "".join(choice["text"] for event in events for choice in event["choices"])


def streamed(reply: Reply) -> bool:
    """Whether an answer is a stream; it must be a whole one."""
    if reply.status != 200:
        raise Wrong(f"{reply.status} {reply.body[:300]!r}")
    return not reply.body.lstrip().startswith(b"{") or reply.body.count(b"\n{") > 0


def chat_text(reply: Reply) -> str:
    if not streamed(reply):
        return str(json.loads(reply.body)["choices"][0]["message"]["content"])
    if b"[DONE]" not in reply.body:
        raise Wrong(f"not a whole stream: {reply.body[-300:]!r}")
    return "".join(choice["delta"].get("content") or "" for event in reply.events for choice in event["choices"])


def anthropic_text(reply: Reply) -> str:
    if not streamed(reply):
        return "".join(block["text"] for block in json.loads(reply.body)["content"])
    if reply.events[-1]["type"] != "message_stop":
        raise Wrong(f"not a whole stream: {reply.body[-300:]!r}")
    return "".join(event["delta"].get("text", "") for event in reply.events if event["type"] == "content_block_delta")


def ollama_text(reply: Reply) -> str:
    streamed(reply)
    lines = [json.loads(line) for line in reply.body.split(b"\n") if line.strip()]
    if not lines[-1]["done"]:
        raise Wrong(f"not a whole answer: {reply.body[-300:]!r}")
    return "".join(line["message"]["content"] for line in lines)


def responses_text(reply: Reply) -> str:
    whole = reply.events[-1]["response"] if streamed(reply) else json.loads(reply.body)
    if whole["status"] not in ("completed", "incomplete"):
        raise Wrong(f"{whole['status']}: {whole}")
    return "".join(part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"])


def ranks_below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs, that are ranks."""
    return [each for each in family(pid) if b"anyaccel.serve.engine.rank" in Path(f"/proc/{each}/cmdline").read_bytes()]


def family(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += family(int(child))
    return found


def size(pid: int) -> dict[str, float]:
    """Of the server with all below it."""
    made: Counter[str] = Counter()
    for each in family(pid):
        status = Path(f"/proc/{each}/status").read_text()
        made["MB"] += int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
        made["threads"] += int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
        made["descriptors"] += len(list(Path(f"/proc/{each}/fd").iterdir()))
        made["processes"] += 1
    return {name: round(value, 1) for name, value in made.items()}


async def soak(run: Soak, options: argparse.Namespace) -> None:
    """All of it.

    Raises:
        Wrong: see there.
    """
    system = " ".join(run.order.choice(_WORDS) for _ in range(250))
    for number in range(12):
        prompt = (f"{system} " if number % 2 else "") + run.prompt()
        value = {"prompt": prompt, "max_tokens": run.order.randrange(4, 60), "temperature": 0, "ignore_eos": True}
        run.references.append((value, text_of(await run.post("/v1/completions", value), False)))

    async def loaded(part: float, count: int) -> None:
        """With a rank killed on the way."""
        half = run.sent + (count - run.sent) / 2
        async with asyncio.TaskGroup() as group:
            group.create_task(run.load(options.clients, options.seconds * part, count))
            await asyncio.sleep(options.seconds * part / 2)
            while run.sent < half:
                await asyncio.sleep(0.1)
            if options.tp > 1:
                await run.kill_one()
        await run.quiet()

    await loaded(1 / 5, options.requests // 5)
    before = size(run.pid)
    print(f"after {run.sent} requests: {before}", flush=True)
    await loaded(4 / 5, options.requests)
    after = size(run.pid)
    print(f"after {run.sent} requests: {after}; seconds of a request: {run.times}", flush=True)
    for value, expected in run.references:
        if text_of(await run.post("/v1/completions", value), False) != expected:
            raise Wrong(f"the answer to {value} is another one at the end")
    grown = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    grown_mb = grown.pop("MB", 0.0)
    if grown.get("threads", 0) <= _MOST_THREADS:
        grown.pop("threads", None)
    if grown or grown_mb > _MOST_MB * after["processes"]:
        raise Wrong(f"the server has grown: {grown} and {grown_mb:.1f} MB")
    if not run.counts["greedy"]:
        raise Wrong("no answer was complete")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="the least (default: 600)")
    parser.add_argument("--requests", type=int, default=0, help="the fewest (default: 0)")
    parser.add_argument("--tiny", action="store_true", help="a model of random weights with 0.3 M parameters")
    parser.add_argument("--tp", type=int, default=2, help="ranks; with 1 none is killed (default: 2)")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    # Room for all that run, and not for all that is kept of those that have ended.
    words = [sys.executable, "-m", "anyaccel", "serve", "--port", "0", "--log-level", "error", "--tp", str(options.tp)]
    words += ["--cache-bytes", str((12 if options.tiny else 96) << 20)]
    words += ["--model", options.model] if options.model else []
    with ExitStack() as held:
        if options.tiny:
            words += ["--model", str(tiny_model(Path(held.enter_context(TemporaryDirectory()))))]
        return soaked(words, options, seed)


def tiny_model(folder: Path) -> Path:
    """A model with the demo's tokenizer, whose requests take so little that all is about the server."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from anyaccel.inference.checkpoints.model_path import default_model_file

    file = default_model_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    return folder / "tiny"


def soaked(words: list[str], options: argparse.Namespace, seed: int) -> int:
    """Start the server and do all of it; returns the exit code."""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = None
            for line in server.stderr:
                print(line, end="", flush=True)
                if (said := re.match(r"serving: http://127\.0\.0\.1:(\d+)", line)) is not None:
                    port = int(said[1])
                if line.startswith("try: "):
                    break
            if port is None:
                return 1
            run = Soak(port, server.pid, random.Random(seed))
            run.model = asyncio.run(run.named())
            failures: list[BaseException] = []
            try:
                asyncio.run(soak(run, options))
            except* Wrong as wrong:
                failures += flat(wrong)
            print(dict(run.counts), flush=True)
            if failures:
                print("\n".join(f"FAILED: {each}" for each in failures), flush=True)
                return 1
            below = family(server.pid)
            server.send_signal(signal.SIGTERM)
            _, rest = server.communicate(timeout=120)
            print(rest, end="", flush=True)
            left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
            if server.returncode or left:
                print(f"FAILED: exit code {server.returncode}, processes left: {left}", flush=True)
                return 1
        finally:
            if server.poll() is None:
                server.kill()
    print("no wrong answer, and nothing has grown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
