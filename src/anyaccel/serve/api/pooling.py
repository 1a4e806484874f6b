# SPDX-License-Identifier: Apache-2.0
"""vLLM's `/classify` and `/pooling`: classes of texts, and vectors of texts or of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.embeddings import Inputs, base64_of, prompts_of, usage_of
from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.rerank import encoder_of
from anyaccel.serve.api.sending import json_answer, read, unless_gone
from anyaccel.serve.interface import TextEncoder
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Shape
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.frontend import Frontend, new_id


class ClassifyRequest(Shape):
    """`POST /v1/classify`; without `use_activation` the values are logits."""

    input: Inputs
    model: str | None = None
    use_activation: bool | None = None
    user: str | None = None


class PoolingRequest(Shape):
    """`POST /pooling`: the embedding of each token, unless `task` asks for something else."""

    input: Inputs
    model: str | None = None
    task: Literal["embed", "classify", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    use_activation: bool | None = None
    user: str | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def classify(request: Request) -> Response:
        body = await read(request, ClassifyRequest, models.limits)
        frontend = await models.serving(request, body.model)
        prompts = await prompts_of(request, frontend, body.input)
        found = await unless_gone(
            request.receive, encoder_of(frontend).classify(prompts, body.use_activation is not False)
        )
        data = []
        for index, classes in enumerate(found):
            values = list(classes.values())
            label = max(classes, key=classes.__getitem__)
            data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
        return json_answer(_list("classify-", body.model or frontend.model, data, prompts))

    async def pooling(request: Request) -> Response:
        body = await read(request, PoolingRequest, models.limits)
        frontend = await models.serving(request, body.model)
        prompts = await prompts_of(request, frontend, body.input)
        found = await unless_gone(request.receive, _pooled(frontend, body, prompts, request.scope["anyaccel.key"]))
        encode = _base64 if body.encoding_format == "base64" else list
        data = [{"index": index, "object": "pooling", "data": encode(each)} for index, each in enumerate(found)]
        return json_answer(_list("pool-", body.model or frontend.model, data, prompts))

    return [
        *(Endpoint(path, "Classes of texts", classify, ClassifyRequest) for path in ("/v1/classify", "/classify")),
        *(
            Endpoint(path, "What a model makes of texts or of their tokens", pooling, PoolingRequest)
            for path in ("/v1/pooling", "/pooling")
        ),
    ]


def _list(prefix: str, model: str, data: list[dict[str, Any]], prompts: list[list[int]]) -> dict[str, Any]:
    head = {"id": new_id(prefix), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": usage_of(prompts)}


def _base64(vectors: Sequence[Any]) -> str:
    nested = isinstance(vectors[0], list)
    return base64_of([value for vector in vectors for value in vector] if nested else vectors)


async def _pooled(frontend: Frontend, body: PoolingRequest, prompts: list[list[int]], key: str) -> list[Sequence[Any]]:
    """A vector of each prompt, or of each of its tokens."""
    facts = frontend.engine.facts
    task = body.task
    if task is None:
        makes_vectors = bool(facts.pooling)
        task = ("token_embed" if makes_vectors else "classify") if isinstance(frontend.engine, TextEncoder) else "embed"
    if task == "embed":
        return [*await frontend.embed(prompts, key, None, body.dimensions)]
    if task == "classify":
        classes = await encoder_of(frontend).classify(prompts, body.use_activation is not False)
        return [list(each.values()) for each in classes]
    values = facts.hidden * sum(map(len, prompts))
    if values > limits.MOST_STATES:
        raise wrong("input", f"embeddings of its tokens have {values} values; {limits.MOST_STATES} are possible")
    return [*await encoder_of(frontend).embed_each(prompts, body.use_activation is not False)]
