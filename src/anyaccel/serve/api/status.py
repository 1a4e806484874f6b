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
from anyaccel.serve.api.models import Models, ServedModel
from anyaccel.serve.api.sending import json_answer
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.metrics import MEDIA_TYPE


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of the server's own state."""

    def describe_model(model: ServedModel, name: str) -> dict[str, Any]:
        frontend = model.frontend
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "anyaccel",
            "root": model.root or name,
            "parent": model.parent or None,
            "max_model_len": None if frontend is None else frontend.engine.facts.context or None,
            "default_sampling_params": None if frontend is None else asdict(frontend.defaults),
            "status": {"value": model.status},  # as llama.cpp's server has it
        }

    def anthropic_model(model: ServedModel, name: str) -> dict[str, Any]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    async def list_models(request: Request) -> Response:
        named = [(model, name) for model in models.listed() for name in model.names]
        if "anthropic-version" not in request.headers:
            return json_answer({"object": "list", "data": [describe_model(*each) for each in named]})
        listed = [anthropic_model(*each) for each in named]  # the same address as OpenAI's
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        return json_answer({"data": listed, "has_more": False, "first_id": None, "last_id": None, **ends})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        describe = anthropic_model if "anthropic-version" in request.headers else describe_model
        return json_answer(describe(models.named(name), name))

    async def health(request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        if models.ready():
            return json_answer({"status": "ready"})
        raise ApiError(503, "the engine is not ready", None, "not_ready", "server_error", retry_after_s=2)

    async def metrics(request: Request) -> Response:
        return Response(models.metrics(), media_type=MEDIA_TYPE)

    async def version(request: Request) -> Response:
        return json_answer({"version": __version__})

    return [
        Endpoint("/v1/models", "The models that are served", list_models),
        Endpoint("/v1/models/{model:path}", "One model", one_model),
        Endpoint("/health", "Whether the server is alive", health, public=True),
        Endpoint("/ready", "Whether a request would be computed now", ready, public=True),
        Endpoint("/metrics", "Metrics for Prometheus", metrics, public=True, media_type="text/plain"),
        Endpoint("/version", "The server's version", version, public=True),
    ]
