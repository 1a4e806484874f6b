# SPDX-License-Identifier: Apache-2.0
"""`/metrics` in Prometheus' text format; names after `anyaccel_`, and meanings, are vLLM's.

https://prometheus.io/docs/instrumenting/exposition_formats/ is the format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from anyaccel.serve.interface import Stats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_QUEUED = (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_TOTAL = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = tuple(float(each * 10**power) for power in range(6) for each in (1, 2, 5))


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Histogram:
    """Counts how often a value was at most each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class HttpMetrics:
    """Counts the HTTP responses of the server."""

    def __init__(self) -> None:
        self._answered: Counter[tuple[str, str, int]] = Counter()

    def answered(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response."""
        self._answered[method, path, status] += 1

    def lines(self) -> Iterator[str]:
        """Their family."""
        name = "http_requests_total"
        lines = [
            f'anyaccel_{name}{{method="{_label(method)}",path="{_label(path)}",status="{status}"}} {count}'
            for (method, path, status), count in sorted(self._answered.items())
        ]
        yield from _family(name, "counter", "Requests of HTTP by their status.", lines)


class Metrics:
    """The metrics of a model that the HTTP side counts; the engine counts the others (`Stats`)."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST)
        self.queued = Histogram(_QUEUED)
        self.between_tokens = Histogram(_BETWEEN)
        self._latency = Histogram(_TOTAL)
        self._prompt = Histogram(_TOKENS)
        self._answer = Histogram(_TOKENS)
        self._finished: Counter[str] = Counter()

    def finished(self, reason: str, seconds: float, prompt: int, answer: int) -> None:
        """Count an answer that has ended with "stop", "length", "abort" (the client has gone) or "error"."""
        self._finished[reason] += 1
        if reason in ("stop", "length"):
            self._latency.observe(seconds)
            self._prompt.observe(prompt)
            self._answer.observe(answer)

    @staticmethod
    def text(counted: Sequence[tuple[str, Metrics, Stats]], requests: HttpMetrics) -> str:
        """The text of /metrics, of each model with its name; the lines of a family stand together."""
        families: dict[str, tuple[str, str, list[str]]] = {}
        for model, metrics, stats in counted:
            for name, kind, meaning, lines in metrics._families(f'model_name="{_label(model)}"', stats):
                families.setdefault(name, (kind, meaning, []))[2].extend(lines)
        whole = [line for name, family in families.items() for line in _family(name, *family)]
        return "\n".join([*whole, *requests.lines(), ""])

    def _families(self, labels: str, stats: Stats) -> Iterator[tuple[str, str, str, Iterable[str]]]:
        """Name, kind, meaning and lines of each."""
        used = stats.cache_used / stats.cache_total if stats.cache_total else 0.0
        for name, value, meaning in (
            ("num_requests_running", stats.running, "Requests that run."),
            ("num_requests_waiting", stats.waiting, "Requests that wait."),
            ("kv_cache_usage_perc", used, "Part of the KV cache that running requests hold; 1: all."),
            ("kv_cache_bytes", stats.cache_total, "Size of the KV cache."),
        ):
            yield name, "gauge", meaning, [f"anyaccel_{name}{{{labels}}} {value!r}"]
        for name, count, meaning in (
            ("prefix_cache_queries_total", stats.prefix_queries, "Tokens of prompts."),
            ("prefix_cache_hits_total", stats.prefix_hits, "Tokens of prompts that were in the cache."),
            ("prompt_tokens_total", stats.prompt_tokens, "Tokens of prompts that were computed."),
            ("generation_tokens_total", stats.generation_tokens, "Tokens of answers."),
            ("num_preemptions_total", stats.preemptions, "Requests that were preempted because the cache was full."),
            ("engine_steps_total", stats.steps, "Steps of the decoder."),
            ("spec_decode_num_draft_tokens_total", stats.drafted, "Drafted tokens of answers."),
            ("spec_decode_num_accepted_tokens_total", stats.accepted, "Drafted tokens that were accepted."),
        ):
            yield name, "counter", meaning, [f"anyaccel_{name}{{{labels}}} {count}"]
        for name, histogram, meaning in (
            ("request_queue_time_seconds", self.queued, "From a request to the first step with its tokens."),
            ("time_to_first_token_seconds", self.first_token, "From a request to its first token."),
            ("inter_token_latency_seconds", self.between_tokens, "Between two tokens of an answer."),
            ("e2e_request_latency_seconds", self._latency, "From a request to the end of its answer."),
            ("request_prompt_tokens", self._prompt, "Tokens of a prompt."),
            ("request_generation_tokens", self._answer, "Tokens of an answer."),
        ):
            yield name, "histogram", meaning, histogram.lines(f"anyaccel_{name}", labels)
        name = "request_success_total"
        lines = [
            f'anyaccel_{name}{{{labels},finished_reason="{_label(reason)}"}} {count}'
            for reason, count in sorted(self._finished.items())
        ]
        yield name, "counter", "Answers by how they ended.", lines


def _family(name: str, kind: str, meaning: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"# HELP anyaccel_{name} {meaning}"
    yield f"# TYPE anyaccel_{name} {kind}"
    yield from lines
