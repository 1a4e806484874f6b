# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank` in the shapes of Jina, Cohere and vLLM, and vLLM's `/v1/score`: how well texts answer a query."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import TokenUsage
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import json_answer, read, unless_gone
from anyaccel.serve.interface import TextEncoder
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Shape
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.frontend import Frontend, new_id

_Text = Annotated[str, Field(min_length=1, max_length=8 << 20)]


class Document(Shape):
    """A text as an object."""

    text: _Text


class RerankRequest(Shape):
    """`POST /v1/rerank`; `top_n` and `return_documents` are Cohere's and Jina's."""

    query: _Text
    documents: Annotated[list[_Text | Document], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    user: str | None = None


class ScoreRequest(Shape):
    """`POST /v1/score`: a text beside each of others, or two lists side by side."""

    text_1: _Text | Annotated[list[_Text], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    text_2: _Text | Annotated[list[_Text], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    model: str | None = None
    user: str | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def rerank(request: Request) -> Response:
        body = await read(request, RerankRequest, models.limits)
        frontend = await models.serving(request, body.model)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        scores, tokens = await unless_gone(request.receive, encoder_of(frontend).score(body.query, texts))
        request.scope["anyaccel.usage"] = TokenUsage([tokens])
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        results = []
        for index in order:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents or (body.return_documents is None and request.url.path.endswith("/v1/rerank")):
                result["document"] = {"text": texts[index]}
            results.append(result)
        return json_answer(
            {
                "id": new_id("rerank-"),
                "model": body.model or frontend.model,
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            }
        )

    async def score(request: Request) -> Response:
        body = await read(request, ScoreRequest, models.limits)
        frontend = await models.serving(request, body.model)
        scores, tokens = await unless_gone(request.receive, _scores(encoder_of(frontend), body))
        request.scope["anyaccel.usage"] = TokenUsage([tokens])
        data = [{"object": "score", "index": index, "score": each} for index, each in enumerate(scores)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_answer(
            {
                "id": new_id("score-"),
                "object": "list",
                "model": body.model or frontend.model,
                "data": data,
                "usage": usage,
            }
        )

    return [
        *(
            Endpoint(path, "Texts in the order in which they answer a query", rerank, RerankRequest)
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        *(Endpoint(path, "Scores of pairs of texts", score, ScoreRequest) for path in ("/v1/score", "/score")),
    ]


def encoder_of(frontend: Frontend) -> TextEncoder:
    """The engine of a model that reads texts.

    Raises:
        ApiError: it is one that generates them.
    """
    engine = frontend.engine
    if not isinstance(engine, TextEncoder):
        raise wrong("model", "this one generates text; serve an encoder or a cross-encoder for that")
    return engine


async def _scores(encoder: TextEncoder, body: ScoreRequest) -> tuple[list[float], int]:
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(firsts) == 1:
        return await encoder.score(firsts[0], seconds)
    if len(firsts) != len(seconds):
        raise wrong("text_2", f"{len(seconds)} texts beside {len(firsts)} of text_1: as many, or one text_1")
    scores: list[float] = []
    tokens = 0
    for first, second in zip(firsts, seconds, strict=True):
        own, count = await encoder.score(first, [second])
        scores += own
        tokens += count
    return scores, tokens
