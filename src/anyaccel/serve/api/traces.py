# SPDX-License-Identifier: Apache-2.0
"""A span of OpenTelemetry for each request, with its attributes for generative models: `--otlp-endpoint`.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ has their meanings. Prompts and answers are never among them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from anyaccel.errors import MissingPackageError
from anyaccel.extras import pip_line

logger = logging.getLogger("anyaccel.serve")

_PACKAGE = "opentelemetry-sdk"
_CLOSING = 2.0
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
# Fields of requests -> attributes. Ollama's are in `options`.
_FIELDS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
}


class Traces:
    """Sends spans to a collector, in a thread of OpenTelemetry's.

    Its own variables count: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and others.

    Args:
        endpoint: the collector's address for OTLP over HTTP, with or without /v1/traces.

    Raises:
        MissingPackageError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingPackageError(
                f"--otlp-endpoint needs OpenTelemetry ({error}): {pip_line(_PACKAGE)}", "opentelemetry"
            ) from None
        address = endpoint.rstrip("/")
        if not address.endswith("/v1/traces"):
            address += "/v1/traces"
        resource = Resource.create()
        if resource.attributes.get("service.name", "").startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "anyaccel"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address)))
        self._tracer = self._provider.get_tracer("anyaccel.serve", version("anyaccel"))
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Scope, path: str, status: int, seconds: float) -> None:
        """Record a request that has ended; a `traceparent` that came with it makes the span part of that trace."""
        end = time.time_ns()
        attributes = attributes_of(scope, path, status)
        operation, model = attributes.get("gen_ai.operation.name"), attributes.get("gen_ai.request.model")
        span = self._tracer.start_span(
            f"{operation} {model}" if operation and model else f"{scope['method']} {path}",
            context=self._propagator.extract(dict(Headers(scope=scope))),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if "error.type" in attributes and status >= 500:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what has not been sent, as far as the collector takes it within `_CLOSING` seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="anyaccel-traces", daemon=True)
        closing.start()
        closing.join(_CLOSING)
        if closing.is_alive():
            logger.warning("the collector of --otlp-endpoint takes no spans: the last ones are lost")


def attributes_of(scope: Scope, path: str, status: int) -> dict[str, Any]:
    """The attributes of a request's span."""
    server = scope.get("server") or ("", None)
    client = scope.get("client") or ("", 0)
    made: dict[str, Any] = {
        "http.request.method": scope["method"],
        "http.route": path,
        "url.path": scope["path"],
        "http.response.status_code": status or 499,
        "client.address": client[0],
        "server.address": server[0],
        "server.port": server[1],
        "anyaccel.request.id": scope["anyaccel.id"],
    }
    if status >= 400 or not status:
        made["error.type"] = str(status or 499)
    if path in _OPERATIONS:
        made |= {"gen_ai.provider.name": "anyaccel", "gen_ai.operation.name": _OPERATIONS[path]}
    if (model := scope.get("anyaccel.model")) is not None:
        made["gen_ai.response.model"] = model
    if (body := scope.get("anyaccel.body")) is not None:
        made["gen_ai.request.model"] = getattr(body, "model", None) or model
        given = getattr(body, "options", None)
        for source in (body, given):
            made |= {name: value for field, name in _FIELDS.items() if _is_plain(value := _field(source, field))}
        if stops := list(getattr(body, "stop_strings", ())):
            made["gen_ai.request.stop_sequences"] = stops
    if (usage := scope.get("anyaccel.usage")) is not None:
        made |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
        if finish := usage.finish_reasons:
            made["gen_ai.response.finish_reasons"] = finish
        if usage.first_at is not None:
            made["gen_ai.response.time_to_first_chunk"] = usage.first_at - scope["anyaccel.start"]
    return {name: value for name, value in made.items() if value is not None}


def _field(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)
