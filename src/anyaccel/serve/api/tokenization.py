# SPDX-License-Identifier: Apache-2.0
"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import json_answer, read
from anyaccel.serve.protocol.common import Messages, Shape, TemplateFields, Text, TokenId, Tools
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.conversation import describe_tools, prompt_ending, render

_MANY = 2_000  # tokens, whose decoding would keep the event loop waiting


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Shape):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(max_length=1 << 21)]
    model: str | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest, models.limits)
        frontend = await models.serving(request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "either prompt or messages is required, and not both")
        text = body.prompt or ""
        if body.messages is not None:
            tools = describe_tools(body.tools)
            text = render(frontend, body.messages, tools, body.chat_template_kwargs, prompt_ending(body))
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        tokens = await frontend.tokenizer.encode(text, special)
        answer: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": frontend.engine.facts.context,
        }
        if body.return_token_strs:
            answer["token_strs"] = [frontend.tokenizer.token_text(token)[0] for token in tokens]
        return json_answer(answer)

    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest, models.limits)
        frontend = await models.serving(request, body.model)
        tokens = frontend.check_tokens(body.tokens, "tokens")
        decode = frontend.tokenizer.decode_with_special
        return json_answer(
            {"prompt": decode(tokens) if len(tokens) < _MANY else await asyncio.to_thread(decode, tokens)}
        )

    async def tokenizer_info(request: Request) -> Response:
        frontend = await models.serving(request, request.query_params.get("model"))
        return json_answer(frontend.tokenizer.info())

    return [
        Endpoint("/tokenize", "Tokens of a text or a conversation", tokenize, TokenizeRequest),
        Endpoint("/detokenize", "The text of tokens", detokenize, DetokenizeRequest),
        Endpoint("/tokenizer_info", "Special tokens and the chat template", tokenizer_info),
    ]
