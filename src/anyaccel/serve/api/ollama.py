# SPDX-License-Identifier: Apache-2.0
"""Ollama's `/api`: conversations, texts and embeddings, as lines of JSON; and what its clients ask about the model."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import TokenUsage, generation_endpoint
from anyaccel.serve.api.models import Models, ServedModel
from anyaccel.serve.api.sending import Dialect, json_answer, read, to_json, unless_gone
from anyaccel.serve.interface import Grammar
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import (
    CalledFunction,
    ChatMessage,
    GenerationFields,
    SamplingFields,
    Shape,
    StopText,
    Text,
    ToolCall,
    Tools,
)
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.answers import MessageDelta, generate_messages
from anyaccel.serve.requests.conversation import Prompt, Thinking, build_prompt
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.infill import infill_prompt
from anyaccel.serve.requests.structured import schema_grammar

VERSION = "0.12.0"  # of Ollama, whose API this is: its clients ask for it, and some want a certain one
_FOREVER = "9999-12-31T23:59:59Z"
_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ns|us|µs|ms|s|m|h|)")
_DURATION = re.compile(rf"[-+]?(?:{_PART.pattern})+")


def error_body(error: ApiError) -> dict[str, str]:
    """An error in Ollama's shape."""
    return {"error": error.message}


def line(value: Any) -> bytes:
    """One line of a stream."""
    return to_json(value) + b"\n"


# White space before the next line keeps a connection alive; clients would read an empty line as JSON.
_DIALECT = Dialect(error_body, line, "application/x-ndjson", b" ", root="/api/")


class Options(Shape):
    """Sampling, by Ollama's names; options about the machine are passed over."""

    num_predict: Annotated[int, Field(ge=-2, lt=1 << 31)] | None = None  # -1, -2: as many as the context leaves
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MOST_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None


class Generating(GenerationFields):
    """What `/api/chat` and `/api/generate` share."""

    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None

    @property
    def keep_s(self) -> float | None:
        return _keep_seconds(self.keep_alive)

    def sampling(self) -> SamplingFields:
        """The options by the names of the other APIs."""
        options = self.options or Options()
        return SamplingFields(
            model=self.model,
            stream=self.stream,
            timeout_s=self.timeout_s,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
        )


def _keep_seconds(given: str | float | None) -> float | None:
    """Seconds of `keep_alive`, which is a number of them, or a duration as Go writes it; negative: for ever.

    Raises:
        ApiError: it is neither.
    """
    if given is None or given == "":
        return None
    seconds = given if isinstance(given, int | float) else None
    if isinstance(given, str) and _DURATION.fullmatch(given):
        sign = -1 if given.startswith("-") else 1
        parts = _PART.findall(given)
        seconds = sign * sum(float(value) * _UNITS[unit] for value, unit in parts)
    if seconds is None or seconds != seconds:
        raise wrong("keep_alive", f"{str(given)[:40]!r} is neither a number of seconds nor a duration such as 5m")
    return float("inf") if seconds < 0 else float(seconds)


class OllamaFunction(Shape):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Shape):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Shape):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(Generating):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=limits.MOST_MESSAGES)] | None = None
    tools: Tools | None = None


class OllamaGenerate(Generating):
    """`POST /api/generate`."""

    prompt: Text = ""
    suffix: Text | None = None
    system: Text | None = None
    template: Text | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None


class OllamaEmbed(Shape):
    """`POST /api/embed`."""

    model: str
    input: Text | Annotated[list[Text], Field(max_length=limits.MOST_INPUTS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(Shape):
    """`POST /api/embeddings`, the older one."""

    model: str
    prompt: Text
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaShow(Shape):
    """`POST /api/show`."""

    model: str | None = None
    name: str | None = None  # its older name


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def embed(request: Request) -> Response:
        body = await read(request, OllamaEmbed, models.limits)
        frontend = await models.serving(request, body.model, _keep_seconds(body.keep_alive))
        texts = [body.input] if isinstance(body.input, str) else body.input
        start = time.perf_counter_ns()
        vectors, count = await _embed(frontend, request, texts, body.truncate is not False, body.dimensions)
        spent = time.perf_counter_ns() - start
        head = {"model": body.model, "embeddings": vectors}
        return json_answer({**head, "total_duration": spent, "load_duration": 0, "prompt_eval_count": count})

    async def embeddings(request: Request) -> Response:
        body = await read(request, OllamaEmbeddings, models.limits)
        frontend = await models.serving(request, body.model, _keep_seconds(body.keep_alive))
        (vector,), _ = await _embed(frontend, request, [body.prompt], True)
        return json_answer({"embedding": vector})

    async def tags(request: Request) -> Response:
        return json_answer({"models": [_entry(model, name) for model in models.listed() for name in model.names]})

    async def running(request: Request) -> Response:
        return json_answer({"models": [_running(model, name) for model in models.loaded() for name in model.names]})

    async def show(request: Request) -> Response:
        body = await read(request, OllamaShow, models.limits)
        name = body.model or body.name
        if not name:
            raise wrong("model", "is required")
        model = models.named(name)
        return json_answer(_describe(model, await models.serving(request, name)))

    async def version(request: Request) -> Response:
        return json_answer({"version": VERSION})

    def get(path: str, summary: str, handler: Any) -> Endpoint:
        return Endpoint(path, summary, handler, dialect=_DIALECT)

    def post(path: str, summary: str, handler: Any, shape: type[Shape]) -> Endpoint:
        return Endpoint(path, summary, handler, shape, dialect=_DIALECT)

    chat_summary, text_summary = "A conversation's next message, as Ollama's API has it", "The answer to one text"
    return [
        generation_endpoint(models, "/api/chat", chat_summary, OllamaChat, prepare_chat, _DIALECT),
        generation_endpoint(models, "/api/generate", text_summary, OllamaGenerate, prepare_text, _DIALECT),
        post("/api/embed", "Vectors of texts", embed, OllamaEmbed),
        post("/api/embeddings", "The vector of a text", embeddings, OllamaEmbeddings),
        post("/api/show", "What is known of a model", show, OllamaShow),
        get("/api/tags", "The models that are served", tags),
        get("/api/ps", "The models in memory", running),
        get("/api/version", "The version of Ollama whose API this is", version),
    ]


# The model ------------------------------------------------------------------------------------------------


def _details(model: ServedModel) -> dict[str, Any]:
    kind = "gguf" if model.root.endswith(".gguf") else "safetensors"
    return {
        "parent_model": "",
        "format": kind,
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "" if model.frontend is None else model.frontend.engine.facts.dtype,
    }


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created, UTC).isoformat()
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    about = {"modified_at": created, "size": model.size, "digest": digest, "details": _details(model)}
    return {"name": name, "model": name, **about}


def _running(model: ServedModel, name: str) -> dict[str, Any]:
    """The entry of a model in memory."""
    context = 0 if model.frontend is None else model.frontend.engine.facts.context
    left = model.seconds_left()
    expires = _FOREVER if left is None else (datetime.now(UTC) + timedelta(seconds=left)).isoformat()
    entry = {**_entry(model, name), "size": model.memory}
    return {**entry, "expires_at": expires, "size_vram": 0, "context_length": context}


def _describe(model: ServedModel, frontend: Frontend) -> dict[str, Any]:
    facts = frontend.engine.facts
    capabilities = ["completion", "embedding"]
    capabilities += ["tools"] if frontend.tokenizer.has_chat_template else []
    capabilities += ["insert"] if frontend.infill is not None else []
    capabilities += ["thinking"] if frontend.reasoning is not None else []
    return {
        "modelfile": "",
        "parameters": "",
        "template": frontend.tokenizer.template,
        "details": _details(model),
        "model_info": {
            "general.architecture": "anyaccel",
            "general.basename": frontend.root,
            "anyaccel.context_length": facts.context,
            "anyaccel.embedding_length": facts.hidden,
        },
        "capabilities": capabilities,
        "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }


async def _embed(
    frontend: Frontend, request: Request, texts: Sequence[str], is_cut: bool, dimensions: int | None = None
) -> tuple[list[list[float]], int]:
    """The vectors of texts, and the number of their tokens.

    Raises:
        ApiError: a text is empty, or too long and not to be cut.
    """
    prompts = []
    most = frontend.engine.facts.context or 1 << 31
    for text in texts:
        tokens = await frontend.tokenizer.encode(text)
        if not tokens or (len(tokens) > most and not is_cut):
            raise wrong("input", f"a text has {len(tokens)} tokens; 1 to {most} are possible")
        prompts.append(tokens[:most])
    count = sum(map(len, prompts))
    request.scope["anyaccel.usage"] = TokenUsage([len(prompt) for prompt in prompts])  # for the log
    if not prompts:
        return [], 0
    work = frontend.embed(prompts, request.scope["anyaccel.key"], dimensions=dimensions)
    return await unless_gone(request.receive, work), count


# Requests -------------------------------------------------------------------------------------------------


async def prepare_chat(frontend: Frontend, request: OllamaChat, key: str) -> OllamaGeneration:
    """Check a conversation, and make its prompt; without a message, there is nothing to answer.

    Raises:
        ApiError: it cannot be answered.
    """
    if not request.messages:
        return OllamaGeneration(frontend, request, None, 0, key, is_chat=True)
    messages = [*_messages(request)]
    prompt = await build_prompt(
        frontend,
        messages,
        request.tools,
        None,
        None,
        _grammar(request),
        _thinking(request),
        None,
        "continue" if messages[-1].role == "assistant" and not messages[-1].tool_calls else "answer",
    )
    return OllamaGeneration(frontend, request, prompt, _room(frontend, request, prompt, "messages"), key, is_chat=True)


async def prepare_text(frontend: Frontend, request: OllamaGenerate, key: str) -> OllamaGeneration:
    """Check a request about one text, and make its prompt.

    Raises:
        ApiError: it cannot be answered.
    """
    if request.context:
        raise wrong("context", "is not supported: send the conversation to /api/chat")
    if request.template:
        raise wrong("template", "is not supported: the model's own is taken, or none with raw")
    _refuse_images(request.images, "images")
    if not request.prompt and not request.suffix:
        return OllamaGeneration(frontend, request, None, 0, key, is_chat=False)
    if request.suffix:
        tokens, ends = await infill_prompt(frontend.tokenizer, frontend.infill, request.prompt, request.suffix)
        prompt = Prompt(tokens, None, grammar=_grammar(request), continues=True, ends=ends)
    elif request.raw:
        tokens = await frontend.tokenizer.encode(request.prompt)
        prompt = Prompt(tokens, None, grammar=_grammar(request), continues=True)
    else:
        messages = [ChatMessage(role="system", content=request.system)] if request.system else []
        messages.append(ChatMessage(role="user", content=request.prompt))
        prompt = await build_prompt(frontend, messages, grammar=_grammar(request), thinking=_thinking(request))
    return OllamaGeneration(frontend, request, prompt, _room(frontend, request, prompt, "prompt"), key, is_chat=False)


def _room(frontend: Frontend, request: Generating, prompt: Prompt, param: str) -> int:
    """The most tokens of the answer: as many as are wanted, but no more than the context leaves."""
    wanted = request.options.num_predict if request.options else None
    if not frontend.engine.facts.context:
        return frontend.answer_room(prompt.tokens, wanted, "options.num_predict", param)
    room = frontend.answer_room(prompt.tokens, None, "options.num_predict", param)
    return room if wanted is None or wanted <= 0 else min(wanted, room)


def _grammar(request: Generating) -> Grammar | None:
    if isinstance(request.format, dict):
        return schema_grammar(request.format, "format")
    return Grammar("json_object", param="format") if request.format else None


def _thinking(request: Generating) -> Thinking:
    think = request.think
    return Thinking(think if isinstance(think, str) else {True: "medium", False: "none", None: None}[think])


def _refuse_images(images: Sequence[Any] | None, where: str) -> None:
    if images:
        raise wrong(where, "are not supported: the model reads text")


def _messages(request: OllamaChat) -> Iterator[ChatMessage]:
    for place, message in enumerate(request.messages or ()):
        _refuse_images(message.images, f"messages[{place}].images")
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=CalledFunction(
                    name=call.function.name, arguments=json.dumps(call.function.arguments or {}, ensure_ascii=False)
                ),
            )
            for call in message.tool_calls or ()
        ]
        yield ChatMessage(
            role=message.role,
            content=message.content if message.content or not calls else None,
            tool_calls=calls or None,
            name=message.tool_name,
            tool_call_id=message.tool_call_id,
            reasoning_content=message.thinking,
        )


# Answers --------------------------------------------------------------------------------------------------


@dataclass
class OllamaGeneration:
    """Answers one request that has been checked; see `PreparedRequest`. Its lines also build the response.

    Attributes:
        prompt: None: nothing is to be answered; clients load a model so.
    """

    frontend: Frontend
    request: OllamaChat | OllamaGenerate
    prompt: Prompt | None
    max_tokens: int
    key: str
    is_chat: bool

    def __post_init__(self) -> None:
        self.usage = TokenUsage([len(self.prompt.tokens) if self.prompt else 0])
        self._begun = time.perf_counter_ns()
        self._first = 0  # when the first token came

    def _line(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
        head = {"model": self.request.model or self.frontend.model, "created_at": datetime.now(UTC).isoformat()}
        parts: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self.is_chat:
            return {**head, "response": text, **parts, "done": False, **more}
        parts |= {"tool_calls": [*calls]} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **parts}, "done": False, **more}

    def _last(self, reason: str) -> dict[str, Any]:
        """What only the last line has."""
        if self.prompt is None:
            return {"done": True, "done_reason": reason}
        now = time.perf_counter_ns()
        first = self._first or now
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": first - self._begun,
            "eval_count": self.usage.completion_tokens,
            "eval_duration": now - first,
        }

    @staticmethod
    def _call(part: dict[str, Any]) -> dict[str, Any]:
        function = part["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = {}
        made = {"index": part["index"], "name": function["name"], "arguments": arguments}
        return {"id": part["id"], "function": made}

    async def _lines(self) -> AsyncGenerator[dict[str, Any], None]:
        if self.prompt is None:
            yield self._line("", **self._last("unload" if self.request.keep_s == 0 else "load"))
            return
        sampling = self.request.sampling()
        reason = "stop"
        deltas = generate_messages(self.frontend, sampling, self.prompt, self.max_tokens, key=self.key)
        async with aclosing(deltas):
            async for delta in deltas:
                self._first = self._first or time.perf_counter_ns()
                self.usage.add_message(delta)
                if delta.content or delta.reasoning or delta.calls:
                    yield self._delta_line(delta)
                if delta.finish is not None:
                    reason = "length" if delta.finish == "length" else "stop"
        yield self._line("", **self._last(reason))

    def _delta_line(self, delta: MessageDelta) -> dict[str, Any]:
        return self._line(delta.content, delta.reasoning, [self._call(part) for part in delta.calls])

    async def response(self) -> dict[str, Any]:
        text = thinking = ""
        calls: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        async with aclosing(self._lines()) as lines:
            async for last in lines:
                message = last["message"] if self.is_chat else last
                text += message["content" if self.is_chat else "response"]
                thinking += message.get("thinking", "")
                calls += message.get("tool_calls", ())
        whole = self._line(text, thinking, calls)
        return {**last, **whole, "done": True}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._lines()) as lines:
            async for each in lines:
                yield line(each)
