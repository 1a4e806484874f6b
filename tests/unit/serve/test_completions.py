# SPDX-License-Identifier: Apache-2.0
"""Plain completions: prompts of text and tokens, alone and several, echo as lm-evaluation-harness reads it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_fakes import END, Answer, ByteTokenizer, FakeEngine, post

PATH = "/v1/completions"


def complete(engine: FakeEngine, **value: Any) -> Answer:
    return post(engine, PATH, value)


def test_a_text_goes_on() -> None:
    engine = FakeEngine(" a time")
    result = complete(engine, prompt="Once upon").json
    (choice,) = result["choices"]
    assert choice == {"index": 0, "text": " a time", "logprobs": None, "finish_reason": "stop"}
    assert bytes(engine.requests[0].prompt) == b"Once upon" and engine.requests[0].max_tokens == 16
    assert complete(engine, prompt="Once upon", max_tokens=2).json["choices"][0]["finish_reason"] == "length"


def test_minus_one_token_is_what_the_context_leaves_and_an_empty_stop_is_none() -> None:
    engine = FakeEngine("abc")
    assert complete(engine, prompt=["a", "abcd"], max_tokens=-1, stop="").json["choices"][0]["text"] == "abc"
    assert [request.max_tokens for request in engine.requests] == [2044, 2044]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -1, "stop": ["", "c"]}
    result = post(engine, "/v1/chat/completions", chat).json
    assert result["choices"][0]["message"]["content"] == "ab"
    assert post(engine, "/v1/responses", {"input": "Hi", "max_output_tokens": -1}).status == 200
    assert all(each.max_tokens == 2048 - len(each.prompt) for each in engine.requests[2:])


@pytest.mark.parametrize("prompts", [["a", "bb"], [[97], [98, 98]]])
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_n_answers_each_in_their_order(prompts: list[Any], stream: bool) -> None:
    engine = FakeEngine(lambda request: f"{len(request.prompt)}/{request.sampling.seed}")
    answer = complete(
        engine, prompt=prompts, n=2, seed=0, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    wanted = ["1/0", "1/1", "2/2", "2/3"]
    if stream:
        texts = [""] * 4
        for event in answer.events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == wanted
        assert answer.events[-1]["usage"]["completion_tokens"] == 16
    else:
        assert [choice["text"] for choice in answer.json["choices"]] == wanted
        assert answer.json["usage"]["prompt_tokens"] == 3


def test_echo_tells_what_lm_evaluation_harness_reads() -> None:
    """Its loglikelihood: token_logprobs[context:-1] of prompt + 1 token, and whether each is the best of its tops."""
    engine = FakeEngine("!")
    context, rest = [97, 98], [99, 100, 101]
    result = complete(
        engine, prompt=[context + rest, context], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    ).json
    lists = result["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "c", "d", "e", "!"]
    assert lists["token_logprobs"] == [None, *[-0.5] * 5]
    assert lists["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert lists["top_logprobs"][0] is None and lists["top_logprobs"][2] == {"c": -0.5}
    assert result["choices"][0]["text"] == "abcde!"
    scored = lists["token_logprobs"][len(context) : -1]
    assert sum(scored) == -1.5 and len(scored) == len(rest)
    assert engine.requests[0].prompt_logprobs == 1
    # The token that ends an answer has its place in the lists: the client cuts the last one off.
    result = complete(FakeEngine(""), prompt="ab", max_tokens=1, logprobs=0, echo=True).json
    assert len(result["choices"][0]["logprobs"]["tokens"]) == 3 and result["choices"][0]["text"] == "ab"


def test_echo_without_an_answer_only_reads_the_prompt() -> None:
    engine = FakeEngine("never seen")
    result = complete(engine, prompt="abc", max_tokens=0, logprobs=0, echo=True).json
    assert result["choices"][0]["text"] == "abc" and result["usage"]["completion_tokens"] == 0
    assert result["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert complete(engine, prompt="a" * 2048, max_tokens=0, echo=True).status == 200  # all that fits
    answer = complete(engine, prompt="abc", max_tokens=0)
    assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")


def test_tokens_of_one_text_keep_the_likelier_log_probability() -> None:
    engine = FakeEngine(lambda request: [0xE4, 256])
    result = complete(engine, prompt="x", logprobs=3).json["choices"][0]["logprobs"]
    assert result["top_logprobs"][0] == {"\ufffd": -0.5}  # three parts of characters


def test_offsets_without_echo_count_the_prompt() -> None:
    result = complete(FakeEngine("de"), prompt="abc", logprobs=0).json["choices"][0]["logprobs"]
    assert result["text_offset"][:2] == [3, 4]


class Filler(ByteTokenizer):
    """Has tokens for infill, which are bytes here."""

    marks: dict[str, int] = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}  # noqa: RUF012

    def token_of(self, text: str) -> int | None:
        return self.marks.get(text)


def test_a_text_between_two_others() -> None:
    engine = FakeEngine("return")
    value = {"prompt": "def f():", "suffix": " 1", "max_tokens": 50}
    result = post(engine, "/v1/completions", value, tokenizer=Filler()).json
    assert bytes(engine.requests[0].prompt) == b"\x01def f():\x02 1\x03"
    assert engine.requests[0].ends == {END, 1, 2, 3, 4} and result["choices"][0]["text"] == "return"
    result = post(engine, "/api/generate", {"model": "fake", **value, "stream": False}, tokenizer=Filler()).json
    assert engine.requests[1].prompt == engine.requests[0].prompt and result["response"] == "return"
    assert engine.requests[1].ends == engine.requests[0].ends
    for more, param in (({"prompt": [1, 2]}, "prompt"), ({"echo": True}, "echo")):
        answer = post(engine, "/v1/completions", {**value, **more}, tokenizer=Filler())
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_what_comes_last_is_first_in_codestrals_prompt() -> None:
    class Codestral(Filler):
        marks: dict[str, int] = {"[SUFFIX]": 1, "[PREFIX]": 2}  # noqa: RUF012

    engine = FakeEngine("x")
    post(engine, "/v1/completions", {"prompt": "a", "suffix": "b"}, tokenizer=Codestral())
    assert bytes(engine.requests[0].prompt) == b"\x01b\x02a"
