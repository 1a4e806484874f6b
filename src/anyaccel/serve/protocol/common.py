# SPDX-License-Identifier: Apache-2.0
"""OpenAI's shapes at the edge: what requests have in common. pydantic checks them, and the OpenAPI document is of them.

A field that is not here is ignored, as OpenAI does; one that is wrong is an error that names it. Defaults are OpenAI's;
what is vLLM's extension has vLLM's name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anyaccel.serve.protocol import limits

Text = Annotated[str, Field(max_length=8 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MOST_STOP_LENGTH)]
Logprobs = Annotated[int, Field(ge=0, le=limits.MOST_LOGPROBS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Shape(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Shape):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Shape):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: dict[str, Any] | bool | None = Field(None, alias="schema")  # llama.cpp's, beside json_object


Regex = Annotated[str, Field(min_length=1, max_length=limits.MOST_REGEX)]
Lark = Annotated[str, Field(min_length=1, max_length=limits.MOST_GRAMMAR)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=limits.MOST_STOP_LENGTH)]],
    Field(min_length=1, max_length=limits.MOST_CHOICES),
]


class StructuredOutputs(Shape):
    """vLLM's field of this name: one of them."""

    json_value: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Lark | None = None


class GenerationFields(Shape):
    """How an answer is made, in all requests that make one."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MOST_STOPS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Ours: seconds until the answer has to be complete.
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class SamplingFields(GenerationFields):
    """What chat and plain completions add."""

    n: Annotated[int, Field(ge=1, le=limits.MOST_ANSWERS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MOST_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=limits.MOST_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None


# What is answered -----------------------------------------------------------------------------------------


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    reasoning_tokens: int


class PredictionDetails(Shape):
    """Of tokens that were guessed (`--draft`): how many were right; only where some were."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: PredictionDetails | None = None


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """What every failed request gets, whatever failed."""

    error: ErrorBody


class SamplingDefaults(Shape):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    default_sampling_params: SamplingDefaults


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


# Small requests -------------------------------------------------------------------------------------------

_Tokens = Annotated[list[TokenId], Field(min_length=1)]
_NotEmpty = Annotated[str, Field(min_length=1, max_length=8 << 20)]


class EmbeddingRequest(Shape):
    """`POST /v1/embeddings`. `pooling` is ours: the mean of the text's hidden states, or the last one."""

    input: (
        _NotEmpty
        | _Tokens
        | Annotated[list[_NotEmpty], Field(min_length=1, max_length=limits.MOST_INPUTS)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=limits.MOST_INPUTS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class DetokenizeRequest(Shape):
    """`POST /detokenize`, as vLLM has it."""

    tokens: Annotated[list[TokenId], Field(max_length=1 << 21)]
    model: str | None = None


class Detokenized(Shape):
    prompt: str


class Tokenized(Shape):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
