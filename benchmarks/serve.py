# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve` beside llama-server and vLLM: all servers are up at once and are asked in turn, round by round.

Load: N clients, each with one request after the other, prompts of 64 to 192 words (--words: of so many each) and
answers of 64 to 192 tokens, greedy, streamed by /v1/completions. Tokens/s are those of all answers together; the time
to the first token and that between two are their median and 99th percentile; x is our tokens/s over theirs. Prefix: a
request with a system prompt of 1,000 words, and the next one with the same; the time to the first token of both. One
client: tokens/s of an answer after its first token, and what `anyaccel generate` tells of the same prompt. Start: from
the start of the process to the first answer.

  python benchmarks/serve.py
  python benchmarks/serve.py --peer llama.cpp=llama-server:smol-bf16.gguf --rounds 2
  python benchmarks/serve.py --peer vllm=VLLM/bin/python:models/SmolLM2-135M-Instruct --clients 1 32 --only load
  python benchmarks/serve.py --words 100 1000 --only load --peer llama.cpp=llama-server:smol-bf16.gguf
  python benchmarks/serve.py --model model.gguf --dtype int4 --peer llama.cpp=llama-server:model.gguf --json
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import emit_json, machine, median, note, table

_WORDS = (
    *("memory", "core", "cache", "node", "thread", "rank", "model", "token", "layer"),
    *("weight", "kernel", "page", "socket", "host", "signal", "queue", "batch"),
)
_PARTS = ("load", "prefix", "one", "start")
_QUESTION = "Write a long story about a memory node and the cores around it."
_READY_S = 300.0
_ANSWER_S = 1800.0


@dataclass
class Contender:
    """A server that can be started.

    Attributes:
        words: its command; PORT is where it listens.
        more: of its environment.
    """

    name: str
    words: list[str]
    more: dict[str, str] = field(default_factory=dict)


def ours(model: str, dtype: str, threads: int, runtime: str) -> Contender:
    words = [sys.executable, "-m", "anyaccel", "serve", "--model", model, "--dtype", dtype, "--runtime", runtime]
    words += ["--threads", str(threads), "--port", "PORT", "--log-level", "warning", "-q"]
    return Contender("anyaccel", words)


def peer(text: str, threads: int, most: int, words_each: int) -> Contender:
    """`NAME=PROGRAM:MODEL`, for `most` requests at once with prompts of `words_each`."""
    name, _, rest = text.partition("=")
    program, _, model = rest.partition(":")
    program, model = (str(Path(each).expanduser()) for each in (program, model))
    if name == "llama.cpp":
        words = [
            program,
            "-m",
            model,
            "--port",
            "PORT",
            "-t",
            str(threads),
            "-np",
            str(most),
            "-c",
            str(most * (max(2 * words_each, 256) + 256) + 2048),
        ]
        return Contender(name, [*words, "--kv-unified", "--log-disable"])
    if name in ("vllm", "vllm-transformers"):
        words = [program, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "PORT"]
        words += ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", str(most)]
        words += ["--model-impl", "transformers"] if name == "vllm-transformers" else []
        return Contender(name, words, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    raise SystemExit(
        f"--peer {text}: llama.cpp=PROGRAM:MODEL.gguf, vllm=PYTHON:FOLDER or vllm-transformers=PYTHON:FOLDER"
    )


class Server:
    """A server that runs."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.name = contender.name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        words = [str(self.port) if word == "PORT" else word for word in contender.words]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | contender.more
        self._log = log
        self.began = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                words, stdout=out, stderr=out, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )
        self.model = ""

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    pass
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5) as answer:
                    self.model = json.loads(answer.read())["data"][0]["id"]
                return
            time.sleep(0.005)
        raise RuntimeError(f"{self.name} does not answer:\n{self._log.read_text()[-2000:]}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has started itself
        self._process.wait()


@contextlib.contextmanager
def running(contenders: Sequence[Contender], folder: Path) -> Iterator[list[Server]]:
    """All of them, loaded; those that do not start are named and left out."""
    servers: list[Server] = []
    try:
        for contender in contenders:
            server = Server(contender, folder / f"{contender.name}.log")
            try:
                server.wait()
            except RuntimeError as why:
                server.end()
                note(f"left out: {why}")
                continue
            servers.append(server)
        yield servers
    finally:
        for server in servers:
            server.end()


@dataclass
class Answer:
    """When its parts came; seconds after the request."""

    times: list[float]
    text: str

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class _Receiver(asyncio.Protocol):
    """Keeps what comes, and when; it is read when all is there.

    Whoever measures shares the machine with the server: what is done at each token must be as little as can be.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _lines(parts: Sequence[bytes], times: Sequence[float]) -> Iterator[tuple[float, bytes]]:
    """The lines of a body, and when each of them was complete; the body is chunked or ends with the connection."""
    whole = b"".join(parts)
    ends = list(itertools.accumulate(map(len, parts)))
    head, mark, _ = whole.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode(errors="replace")
    at = len(head) + len(mark)
    if " 200" not in status:
        raise RuntimeError(f"{status or 'no answer'}: {whole[at : at + 500].decode(errors='replace')}")
    spans = [(at, len(whole))]
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        spans = []
        while True:
            end = whole.index(b"\r\n", at)
            size = int(whole[at:end].split(b";")[0], 16)
            if size == 0:
                break
            spans.append((end + 2, end + 2 + size))
            at = end + 2 + size + 2
    rest = b""
    for begin, end in spans:
        *lines, rest = (rest + whole[begin:end]).split(b"\n")
        when = times[min(bisect.bisect_left(ends, end), len(times) - 1)]
        for line in lines:
            yield when, line


async def ask(server: Server, path: str, value: dict[str, Any]) -> Answer:
    """One streamed request."""
    body = json.dumps({"model": server.model, "temperature": 0, "stream": True, **value}).encode()
    start = time.perf_counter()
    transport, receiver = await asyncio.get_running_loop().create_connection(_Receiver, "127.0.0.1", server.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.wait_for(receiver.ended, _ANSWER_S)
    finally:
        transport.close()
    found = Answer([], "")
    try:
        for when, line in _lines(receiver.parts, receiver.times):
            if not line.startswith(b"data: {"):
                continue
            said = json.loads(line[6:])
            if "error" in said:
                raise RuntimeError(str(said["error"]))
            for choice in said.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content")
                if text:
                    found.times.append(when - start)
                    found.text += text
    except ValueError as error:
        raise RuntimeError(f"the answer broke off or is no stream of events ({error})") from None
    return found


def _words(order: random.Random, count: int) -> str:
    return " ".join(order.choice(_WORDS) for _ in range(count))


def load(server: Server, clients: int, requests: int, seed: int, words: int = 0) -> dict[str, Any]:
    """Figures of one run."""
    order = random.Random(f"{seed} {words}")
    todo = [(_words(order, words or order.randint(64, 192)), order.randint(64, 192)) for _ in range(requests)]
    tokens, failed = 0, 0
    answers: list[Answer] = []

    async def client() -> None:
        nonlocal tokens, failed
        while todo:
            prompt, count = todo.pop()
            try:
                value = {"prompt": prompt, "max_tokens": count, "ignore_eos": True}
                answers.append(await ask(server, "/v1/completions", value))
                tokens += count
            except (OSError, RuntimeError, TimeoutError) as error:
                failed += 1
                note(f"{server.name}: {error}")

    async def main() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - start

    seconds = asyncio.run(main())
    return {
        "tokens_per_s": tokens / seconds,
        "first_ms": [1e3 * each.times[0] for each in answers if each.times],
        "between_ms": [1e3 * gap for each in answers for gap in each.gaps],
        "failed": failed,
    }


def prefix(server: Server, seed: int) -> dict[str, float]:
    """Seconds to the first token with a system prompt that is new, and with the same one again."""
    order = random.Random(f"prefix {seed}")
    system = _words(order, 1000)
    times = []
    for question in ("What is a page?", "What is a core?"):
        value = {"prompt": f"{system}. {question} It is", "max_tokens": 8, "ignore_eos": True}
        found = asyncio.run(ask(server, "/v1/completions", value))
        times.append(found.times[0])
    return {"new_s": times[0], "again_s": times[1]}


def one(server: Server) -> tuple[float, str]:
    """Tokens/s of a lone client after the first token."""
    messages = [{"role": "user", "content": _QUESTION}]
    found = asyncio.run(ask(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 128}))
    return (len(found.times) - 1) / (found.times[-1] - found.times[0]), found.text


def generate(model: str, dtype: str, threads: int) -> tuple[float, str]:
    """What the command tells of the same."""
    words = [
        sys.executable,
        "-m",
        "anyaccel",
        "generate",
        _QUESTION,
        "--model",
        model,
        "--dtype",
        dtype,
        "--json",
        "-q",
    ]
    done = subprocess.run(
        [*words, "--threads", str(threads), "--max-new-tokens", "128"], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    return told["generated_tokens_per_second"], told["text"]


def start(contender: Contender, folder: Path) -> float:
    """Seconds from the start of the process to its first answer."""
    server = Server(contender, folder / f"{contender.name}.start.log")
    try:
        server.wait()
        asyncio.run(ask(server, "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1}))
        return time.perf_counter() - server.began
    finally:
        server.end()


def _p(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return (statistics.median(values), sorted(values)[int(0.99 * (len(values) - 1))]) if values else (0.0, 0.0)


def measure(options: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Any]:
    """All figures."""
    found: dict[str, Any] = {"load": {}, "prefix": {}, "one": {}, "start": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(contenders, folder) as servers:
            for server in servers:  # what is done at the first request only
                load(server, 2, 2, -1)
            for turn in range(options.rounds):
                for words, clients in itertools.product(options.words, options.clients):
                    point = f"{clients} clients" + (f", prompts of {words}" if words else "")
                    for server in servers if "load" in options.only else ():
                        figures = load(server, clients, max(3, round(options.requests * clients)), turn, words)
                        note(f"round {turn + 1}: {point}, {server.name}: {figures['tokens_per_s']:.1f} tokens/s")
                        found["load"].setdefault(point, {}).setdefault(server.name, []).append(figures)
                for server in servers if "prefix" in options.only else ():
                    found["prefix"].setdefault(server.name, []).append(prefix(server, turn))
                if "one" in options.only and servers and servers[0].name == "anyaccel":
                    for _ in range(3):
                        (rate, text), (base, same) = (
                            one(servers[0]),
                            generate(options.model, options.dtype, options.threads),
                        )
                        found["one"].setdefault("serve", []).append(rate)
                        found["one"].setdefault("generate", []).append(base)
                        found["one"]["same"] = text.strip() == same.strip()
        for _ in range(options.rounds if "start" in options.only else 0):
            for contender in contenders:
                try:
                    found["start"].setdefault(contender.name, []).append(start(contender, folder))
                except RuntimeError as why:
                    note(f"left out: {why}")
    return found


def show(found: dict[str, Any]) -> None:
    """Tables."""
    for point, by_name in found["load"].items():
        rows, base = [], None
        for name, runs in by_name.items():
            rate = median([run["tokens_per_s"] for run in runs])
            base = rate if name == "anyaccel" else base
            first, between = (_p([value for run in runs for value in run[key]]) for key in ("first_ms", "between_ms"))
            ratio = f"{base / rate:.2f}x" if base and rate and name != "anyaccel" else ""
            cells = [f"{value:.0f}" for value in first] + [f"{value:.1f}" for value in between]
            rows.append([name, f"{rate:.1f}", ratio, *cells, str(sum(run["failed"] for run in runs))])
        head = ["tokens/s", "x", "first ms p50", "p99", "between ms p50", "p99", "failed"]
        print(f"\n{table([point, *head], rows)}")
    rows = []
    for name, times in found["prefix"].items():
        new, again = (median([each[key] for each in times]) for key in ("new_s", "again_s"))
        rows.append([name, f"{new:.3f}", f"{again:.3f}", f"{new / again:.1f}x"])
    if rows:
        print(f"\n{table(['system prompt of 1,000 words', 'new s', 'again s', 'shorter'], rows)}")
    if "serve" in found["one"]:
        serve, alone = median(found["one"]["serve"]), median(found["one"]["generate"])
        same = "the same text" if found["one"]["same"] else "ANOTHER TEXT"
        print(f"\none client: {serve:.1f} tokens/s; anyaccel generate: {alone:.1f}; {serve / alone:.1%}, {same}")
    if found["start"]:
        rows = [[name, f"{median(times):.2f}", f"{min(times):.2f}"] for name, times in found["start"].items()]
        print(f"\n{table(['start to first answer', 's', 'best'], rows)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hugging Face folder or .gguf file; default: SmolLM2-135M-Instruct")
    add("--dtype", default="bf16")
    add("--runtime", default="auto", help="of ours, as for `anyaccel serve` (default: auto)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--peer", action="append", default=[], metavar="NAME=PROGRAM:MODEL", help="llama.cpp=..., vllm=...")
    add("--clients", type=int, nargs="+", default=[1, 8, 32])
    add("--words", type=int, nargs="+", default=[0], help="of prompts (default: 64 to 192)")
    add("--requests", type=float, default=2.0, help="of a client, at least 3 together (default: 2)")
    add("--rounds", type=int, default=1)
    add("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    add("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    from anyaccel.inference.checkpoints.model_path import default_model_file

    options.model = str(options.model or default_model_file())
    contenders = [ours(options.model, options.dtype, options.threads, options.runtime)]
    contenders += [peer(text, options.threads, max(options.clients), max(options.words)) for text in options.peer]
    found = measure(options, contenders)
    if options.json:
        emit_json({"machine": machine(), "model": options.model, "dtype": options.dtype, "results": found})
        return 0
    print(
        f"{Path(options.model).name}, {options.dtype}, {options.threads} threads, {options.rounds} rounds\n{machine()}"
    )
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
