# SPDX-License-Identifier: Apache-2.0
"""Asks a server with Ollama's own client, as its users write it, and as Open WebUI does: `python ollama_client.py URL`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-clients, against the fake engine.
"""

from __future__ import annotations

import json
import sys

import ollama

HELLO = [{"role": "user", "content": "hello"}]


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: where.
    """
    return f"rain in {city}"


def chats(client: ollama.Client) -> None:
    made = client.chat("fake", HELLO, options={"temperature": 0, "num_ctx": 2048}, keep_alive="5m")
    assert made.message.content == "You said: hello" and made.done_reason == "stop" and made.eval_count > 5
    parts = [*client.chat("fake:latest", HELLO, stream=True)]
    assert "".join(part.message.content for part in parts) == "You said: hello" and parts[-1].done
    called = client.chat("fake", [{"role": "user", "content": "weather"}], tools=[weather])
    (call,) = called.message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("weather", {"city": "Paris"})
    more = [*HELLO, called.message, {"role": "tool", "tool_name": "weather", "content": weather("Paris")}]
    assert client.chat("fake", more, tools=[weather]).done
    assert client.chat("fake", HELLO, format="json", think=False).done
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    made = client.chat("fake", [{"role": "user", "content": "person"}], format=schema)
    assert json.loads(made.message.content) == {"name": "Ann", "age": 30}


def texts(client: ollama.Client) -> None:
    assert client.generate("fake", "hello", system="Be kind.").response == "You said: hello"
    assert "".join(part.response for part in client.generate("fake", "hello", stream=True)) == "You said: hello"
    assert client.generate("fake", "").done_reason == "load"


def embeddings(client: ollama.Client) -> None:
    assert [vector[3] for vector in client.embed("fake", ["ab", "abc"]).embeddings] == [2.0, 3.0]
    assert client.embeddings("fake", "abcd").embedding[3] == 4.0


def models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["fake"]
    assert "tools" in client.show("fake").capabilities
    assert all(model.context_length >= 2048 for model in client.ps().models)


def errors(client: ollama.Client) -> None:
    for stream in (False, True):
        try:
            for _ in client.chat("llama3", HELLO, stream=stream):
                pass
        except ollama.ResponseError as error:
            assert error.status_code == 404 and "no model 'llama3'" in error.error
        else:
            raise AssertionError("it was taken")


def main() -> None:
    """All of it."""
    client = ollama.Client(sys.argv[1], headers={"Authorization": "Bearer sesame"})
    for part in (chats, texts, embeddings, models, errors):
        part(client)
    print("did: answer stream tools structure embeddings")


if __name__ == "__main__":
    main()
