# SPDX-License-Identifier: Apache-2.0
"""What the server says of itself: its models, its health, its metrics and its version."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from anyaccel._version import __version__
from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.sending import json_answer
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.metrics import MEDIA_TYPE


def endpoints(frontend: Frontend) -> list[Endpoint]:
    """The endpoints of the server's own state."""

    def describe_model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": frontend.created,
            "owned_by": "anyaccel",
            "root": frontend.root or name,
            "max_model_len": frontend.engine.facts.context or None,
            "default_sampling_params": asdict(frontend.defaults),
        }

    def anthropic_model(name: str) -> dict[str, Any]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(frontend.created))
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    def anthropic_models() -> dict[str, Any]:
        listed = [anthropic_model(name) for name in frontend.names]
        return {"data": listed, "has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}

    async def models(request: Request) -> Response:
        if "anthropic-version" in request.headers:  # the same address as OpenAI's
            return json_answer(anthropic_models())
        return json_answer({"object": "list", "data": [describe_model(name) for name in frontend.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        frontend.check_model(name)
        if "anthropic-version" in request.headers:
            return json_answer(anthropic_model(name))
        return json_answer(describe_model(name))

    async def health(request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        if frontend.engine.ready():
            return json_answer({"status": "ready"})
        raise ApiError(503, "the engine is not ready", None, "not_ready", "server_error", retry_after_s=2)

    async def metrics(request: Request) -> Response:
        text = frontend.metrics.text(frontend.model, frontend.engine.stats())
        return Response(text, media_type=MEDIA_TYPE)

    async def version(request: Request) -> Response:
        return json_answer({"version": __version__})

    return [
        Endpoint("/v1/models", "The models that are served", models),
        Endpoint("/v1/models/{model:path}", "One model", model),
        Endpoint("/health", "Whether the server is alive", health, public=True),
        Endpoint("/ready", "Whether a request would be computed now", ready, public=True),
        Endpoint("/metrics", "Metrics for Prometheus", metrics, public=True, media_type="text/plain"),
        Endpoint("/version", "The server's version", version, public=True),
    ]
