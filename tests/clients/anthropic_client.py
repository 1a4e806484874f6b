# SPDX-License-Identifier: Apache-2.0
"""Asks a server with Anthropic's own client, as its users write it: `python anthropic_client.py URL`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-clients, against the fake engine.
"""

from __future__ import annotations

import sys

import anthropic

GIVEN = {"model": "fake", "max_tokens": 100}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def messages(client: anthropic.Anthropic) -> None:
    asked = [{"role": "user", "content": "hello"}]
    made = client.messages.create(**GIVEN, messages=asked, system="Be kind.")
    assert [(block.type, block.text) for block in made.content] == [("text", "You said: hello")]
    assert made.stop_reason == "end_turn" and made.usage.output_tokens == len("You said: hello") + 1
    with client.messages.stream(**GIVEN, messages=asked) as stream:
        assert "".join(stream.text_stream) == "You said: hello"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == made.usage.output_tokens
    stopped = client.messages.create(**GIVEN, messages=asked, stop_sequences=["hel"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "hel")
    assert client.messages.count_tokens(model="fake", messages=asked).input_tokens > 5


def tools(client: anthropic.Anthropic) -> None:
    asked = [{"role": "user", "content": "weather"}]
    made = client.messages.create(**GIVEN, messages=asked, tools=[WEATHER])
    (call,) = made.content
    assert (made.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "weather",
        {"city": "Paris"},
    )
    with client.messages.stream(**GIVEN, messages=asked, tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == {"city": "Paris"} and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    more = [*asked, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**GIVEN, messages=more, tools=[WEATHER]).stop_reason in ("end_turn", "tool_use")


def models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def errors(client: anthropic.Anthropic) -> None:
    asked = [{"role": "user", "content": "hello"}]
    for wrong, kind in (
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**GIVEN, **wrong}, messages=asked)
        except kind as error:
            assert error.body["type"] == "error"
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        client.with_options(api_key="wrong").messages.create(**GIVEN, messages=asked)
    except anthropic.AuthenticationError as error:
        assert "not known" in str(error)
    else:
        raise AssertionError("it was taken")


def main() -> None:
    """All of it."""
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="sesame", max_retries=0)
    for part in (messages, tools, models, errors):
        part(client)
    print("did: answer stream tools")


if __name__ == "__main__":
    main()
