# SPDX-License-Identifier: Apache-2.0
"""Wrong values of a request: a 400 that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from serve_fakes import FakeEngine, post

CLOCK = {"type": "function", "function": {"name": "clock"}}
CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": "x" * 1001}, "stop"),
    ({"guided_choice": ["x"] * 513}, "guided_choice"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_regex": "a" * 5000}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json"),
    ({"guided_json": {"const": "x" * 70_000}}, "guided_json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "clock"}]}, "functions"),
    ({"function_call": {"name": "clock"}}, "function_call"),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "x"}},
            "tools": [CLOCK],
        },
        "tool_choice",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "file:///etc/passwd"}}}]},
        "tools[0].function.parameters",
    ),
]
COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, 300]}, "prompt"),
    ({"prompt": [[1], [300]]}, "prompt[1]"),
    ({"prompt": ["a"] * 40, "n": 2}, "n"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "max_tokens": 2048}, "max_tokens"),
    ({"prompt": "a" * 2048}, "prompt"),
    ({"prompt": ["a", "a" * 2049], "echo": True, "max_tokens": 0}, "prompt[1]"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({}, "prompt"),
]
RESPONSES = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"content": "Hi"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}], "instructions": "x"},
        "input[0].content[0].text",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "http://x"}}}},
        "text.format.schema",
    ),
]
HI = {"messages": [{"role": "user", "content": "Hi"}]}
CASES = [
    *(("/v1/chat/completions", {**HI, **value}, param) for value, param in CHAT),
    *(("/v1/completions", value, param) for value, param in COMPLETIONS),
    *(("/v1/responses", {"input": "Hi", **value}, param) for value, param in RESPONSES),
]


@pytest.mark.parametrize(("path", "value", "param"), CASES)
def test_wrong_values_are_named(path: str, value: dict[str, Any], param: str) -> None:
    answer = post(FakeEngine(), path, value)
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param), answer.body
    assert error["message"].startswith(param)
