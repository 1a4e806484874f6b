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


class EmbeddingRequest(Shape):
    """`POST /v1/embeddings`. `pooling` is ours: the mean of the text's hidden states, or the last one."""

    input: (
        _InputText
        | TokenIds
        | Annotated[list[_InputText], Field(min_length=1, max_length=limits.MOST_INPUTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    )
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
        prompts = await _prompts(frontend, body)
        request.scope["anyaccel.usage"] = TokenUsage([len(prompt) for prompt in prompts])  # for the log
        embed = frontend.engine.embed(prompts, body.pooling or frontend.pooling, request.scope["anyaccel.key"])
        vectors = await unless_gone(request.receive, embed)
        encode = _base64 if body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_answer({"object": "list", "model": body.model or frontend.model, "data": data, "usage": usage})

    return [Endpoint("/v1/embeddings", "Vectors of texts", embeddings, EmbeddingRequest)]


async def _prompts(frontend: Frontend, body: EmbeddingRequest) -> list[list[int]]:
    """The tokens of each input.

    Raises:
        ApiError: an input does not fit, or the length that is wanted is not the model's.
    """
    facts = frontend.engine.facts
    if facts.pooling and body.pooling not in (None, facts.pooling):
        raise wrong("pooling", f"this model's embeddings are the {facts.pooling} of hidden states, as its files say")
    if body.dimensions not in (None, facts.hidden):
        raise wrong("dimensions", f"this model's embeddings have {facts.hidden} values; they cannot be cut")
    single = isinstance(body.input, str) or isinstance(body.input[0], int)
    inputs: Sequence[Any] = [body.input] if single else body.input
    prompts = []
    for place, each in enumerate(inputs):
        param = "input" if len(inputs) == 1 else f"input[{place}]"
        tokens = await frontend.tokenizer.encode(each) if isinstance(each, str) else frontend.check_tokens(each, param)
        if not tokens or (facts.context and len(tokens) > facts.context):
            code = "context_length_exceeded" if tokens else None
            raise wrong(param, f"{len(tokens)} tokens; 1 to {facts.context or 1 << 31} are possible", code)
        prompts.append(tokens)
    return prompts


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
