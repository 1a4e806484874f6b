# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/embeddings`: pooled and normalised hidden states of texts."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import TokenUsage
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import json_answer, read, unless_gone
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Shape, TokenIds
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.frontend import Frontend

_InputText = Annotated[str, Field(min_length=1, max_length=8 << 20)]


Inputs = (
    _InputText
    | TokenIds
    | Annotated[list[_InputText], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MOST_INPUTS)]
)


class EmbeddingRequest(Shape):
    """`POST /v1/embeddings`. `pooling` is ours: the mean of the text's hidden states, or the last one."""

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def embeddings(request: Request) -> Response:
        body = await read(request, EmbeddingRequest, models.limits)
        frontend = await models.serving(request, body.model)
        pooling = frontend.engine.facts.pooling
        if pooling and body.pooling not in (None, pooling):
            raise wrong("pooling", f"this model's embeddings are the {pooling} of hidden states, as its files say")
        prompts = await prompts_of(request, frontend, body.input)
        embed = frontend.embed(prompts, request.scope["anyaccel.key"], body.pooling, body.dimensions)
        vectors = await unless_gone(request.receive, embed)
        encode = base64_of if body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ]
        head = {"object": "list", "model": body.model or frontend.model}
        return json_answer({**head, "data": data, "usage": usage_of(prompts)})

    return [Endpoint("/v1/embeddings", "Vectors of texts", embeddings, EmbeddingRequest)]


async def prompts_of(request: Request, frontend: Frontend, given: Inputs) -> list[list[int]]:
    """The tokens of each input.

    Raises:
        ApiError: an input does not fit.
    """
    facts = frontend.engine.facts
    single = isinstance(given, str) or isinstance(given[0], int)
    inputs: Sequence[Any] = [given] if single else given
    prompts = []
    for place, each in enumerate(inputs):
        param = "input" if len(inputs) == 1 else f"input[{place}]"
        tokens = await frontend.tokenizer.encode(each) if isinstance(each, str) else frontend.check_tokens(each, param)
        if not tokens or (facts.context and len(tokens) > facts.context):
            code = "context_length_exceeded" if tokens else None
            raise wrong(param, f"{len(tokens)} tokens; 1 to {facts.context or 1 << 31} are possible", code)
        prompts.append(tokens)
    request.scope["anyaccel.usage"] = TokenUsage([len(prompt) for prompt in prompts])  # for the log
    return prompts


def usage_of(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """The tokens that were read."""
    count = sum(map(len, prompts))
    return {"prompt_tokens": count, "total_tokens": count}


def base64_of(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
