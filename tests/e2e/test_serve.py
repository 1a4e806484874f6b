# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve` with the demo's model: what it prints, and that its answers are those of `anyaccel generate`."""

from __future__ import annotations

import concurrent.futures
import json
import math
import shlex
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.inference.checkpoints.identity import size_of
from serve_command import Serving

QUESTION = "Why is the sky blue?"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Serving]:
    serving = Serving("--model", str(smollm2), "--threads", "1", "--max-batch", "8")
    yield serving
    rest = serving.end()
    assert (serving.process.returncode, rest) == (0, "")


def chat(server: Serving, **more: Any) -> Any:
    value = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12, **more}
    return server.post("/v1/chat/completions", value)


def test_it_says_what_it_runs_on_and_answers(server: Serving) -> None:
    said = "\n".join(server.said)
    assert "topology: " in said and "plan: " in said
    (choice,) = chat(server, max_tokens=4)["choices"]
    assert choice["message"]["content"] and choice["finish_reason"] == "length"
    assert json.loads(server.get("/ready")) == {"status": "ready"}
    assert "<title>anyaccel</title>" in server.get("/")


@pytest.mark.slow
def test_its_line_to_try_works(server: Serving) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed: apt-get install curl")
    line = server.said[-1].removeprefix("try: ")
    done = subprocess.run([*shlex.split(line), "-s"], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_answers_are_those_of_generate_alone_and_in_company(server: Serving, smollm2: Path) -> None:
    command = ["generate", QUESTION, "--model", str(smollm2), "--threads", "1", "--max-new-tokens", "12", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "anyaccel", *command], capture_output=True, text=True, timeout=120, check=True
    )
    wanted = done.stdout.removesuffix("\n")
    assert chat(server)["choices"][0]["message"]["content"] == wanted
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(chat, server, temperature=1, seed=seed, max_tokens=20) for seed in range(4)]
        same = [pool.submit(chat, server) for _ in range(4)]
        assert [each.result()["choices"][0]["message"]["content"] for each in same] == [wanted] * 4
        assert len({each.result()["choices"][0]["message"]["content"] for each in others}) > 1


@pytest.mark.slow
def test_log_probabilities_of_an_answer_are_those_of_its_echo(server: Serving) -> None:
    prompt = server.post("/tokenize", {"prompt": "The capital of France is"})["tokens"]
    value = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 1}
    answer = server.post("/v1/completions", value)["choices"][0]["logprobs"]
    chats = chat(server, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in chats)
    tokens = server.post("/tokenize", {"prompt": "".join(answer["tokens"])})["tokens"]
    value = {"prompt": [*prompt, *tokens], "max_tokens": 1, "logprobs": 1, "echo": True}
    echo = server.post("/v1/completions", value)["choices"][0]["logprobs"]
    known = echo["token_logprobs"][len(prompt) : -1]
    assert len(known) == len(tokens) == len(answer["token_logprobs"])
    assert known == pytest.approx(answer["token_logprobs"], abs=0.05)  # bf16, and other kernels
    assert echo["token_logprobs"][0] is None and all(each <= 0 for each in echo["token_logprobs"][1:])


@pytest.mark.slow
def test_an_answer_keeps_to_a_schema_and_a_function_to_its_parameters(server: Serving) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "why": {"type": "string", "maxLength": 20}},
        "required": ["colour", "why"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = json.loads(chat(server, response_format=form, max_tokens=80)["choices"][0]["message"]["content"])
    assert reply["colour"] in ("red", "blue") and set(reply) == {"colour", "why"}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = chat(server, max_tokens=120, **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint" and "colour" in json.loads(call["function"]["arguments"])


@pytest.mark.slow
def test_tools_can_be_called_beside_a_format(server: Serving) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    schema = {"type": "object", "properties": {"weather": {"type": "string", "maxLength": 30}}, "required": ["weather"]}
    form = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin"}}\n</tool_call>'
    wish = {"role": "user", "content": f"Repeat exactly this text and nothing else:\n{call}"}
    messages = [wish, {"role": "assistant", "content": call}, wish]
    (choice,) = chat(server, messages=messages, tools=[tool], response_format=form, max_tokens=60)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Berlin"}'}
    messages = [{"role": "user", "content": "How is the weather in Berlin? Say JSON."}]
    (choice,) = chat(server, messages=messages, tools=[tool], response_format=form, max_tokens=80)["choices"]
    reply = choice["message"]["tool_calls"] if choice["finish_reason"] == "tool_calls" else choice["message"]["content"]
    assert isinstance(reply, list) or set(json.loads(reply)) == {"weather"}


@pytest.mark.slow
def test_schemas_without_an_end_are_closed(server: Serving) -> None:
    schema = {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "type": "object"}
    schema["required"] = ["name", "age"]  # type: ignore[assignment]
    form = {"type": "json_schema", "json_schema": {"name": "P", "schema": schema}}
    tool = {"type": "function", "function": {"name": "P", "parameters": schema}}
    for text in ("Ann is 30 years old.", "Bob turned 41 today.", "My name is Eve and I am 25."):
        messages = [{"role": "user", "content": text}]
        (choice,) = chat(server, messages=messages, response_format=form, max_tokens=100)["choices"]
        assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
        (choice,) = chat(server, messages=messages, tools=[tool], tool_choice="required", max_tokens=100)["choices"]
        (made,) = choice["message"]["tool_calls"]
        assert set(json.loads(made["function"]["arguments"])) == {"name", "age"}


@pytest.mark.slow
def test_embeddings_have_length_one_and_metrics_count(server: Serving) -> None:
    texts = ["a cat sleeps", "a kitten naps", "the stock market fell"]
    found = [each["embedding"] for each in server.post("/v1/embeddings", {"input": texts})["data"]]
    assert all(math.isclose(math.fsum(x * x for x in each), 1, abs_tol=1e-3) for each in found)
    cat, kitten, market = found
    near, far = (math.fsum(a * b for a, b in zip(cat, other, strict=True)) for other in (kitten, market))
    assert near > far
    chat(server)
    lines = server.get("/metrics").splitlines()
    values = {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert values["anyaccel_generation_tokens_total"] > 0 and values["anyaccel_prefix_cache_queries_total"] > 0


@pytest.mark.slow
def test_what_cannot_be_is_refused(server: Serving) -> None:
    for value, param in (
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"guided_regex": "("}, None),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(server, **value)
        with refused.value as answer:
            assert answer.code == 400
            reply = json.loads(answer.read())["error"]
        assert param is None or reply["param"] == param


@pytest.mark.slow
def test_models_of_a_folder_take_turns_in_the_memory_of_one(smollm2: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(smollm2)
    cache = 64 << 20
    memory = size_of(smollm2) + cache
    several = ["--models-dir", str(tmp_path), "--memory", str(memory), "--cache-bytes", str(cache)]
    server = Serving(*several, "--threads", "1", "--alias", "gpt-4o=one", str(tmp_path / "one"))
    assert any("model: two, about" in line for line in server.said)
    answers = [chat(server, model=name)["choices"][0]["message"] for name in ("one", "two", "gpt-4o", "two")]
    assert answers == [answers[0]] * 4 and answers[0]["content"]
    listed = {each["id"]: each["status"]["value"] for each in json.loads(server.get("/v1/models"))["data"]}
    assert listed == {"one": "unloaded", "gpt-4o": "unloaded", "two": "loaded"}
    server.end()
    assert server.process.returncode == 0
