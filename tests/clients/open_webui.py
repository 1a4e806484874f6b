# SPDX-License-Identifier: Apache-2.0
"""Asks a server as Open WebUI's backend does, by both of its kinds of connections: `python open_webui.py URL`.

Run by tools/serve_clients.py; needs nothing but Python. The package itself has some gigabytes.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

HEADERS = {
    "Authorization": "Bearer sesame",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "ann",
    "X-OpenWebUI-User-Id": "1",
}
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def asked(path: str, body: dict[str, Any] | None = None) -> bytes:
    """What comes back."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, data, HEADERS), timeout=60) as answer:
        got: bytes = answer.read()
        return got


def ollama() -> None:
    """A connection to Ollama: its version and models, then conversations as streams of lines."""
    assert json.loads(asked("/api/version"))["version"]
    (model,) = json.loads(asked("/api/tags"))["models"]
    assert json.loads(asked("/api/ps"))["models"][0]["model"] == model["model"]
    options = {"num_ctx": 2048, "temperature": 0.8}
    body = {"model": model["model"], "messages": HELLO, "options": options, "stream": True}
    parts = [json.loads(line) for line in asked("/api/chat", body).splitlines()]
    assert "".join(part["message"]["content"] for part in parts) == "You said: hello" and parts[-1]["done"]
    # A title of the conversation, which it asks for beside the answer.
    title = {**body, "stream": False, "format": {"type": "object", "properties": {"title": {"type": "string"}}}}
    assert json.loads(asked("/api/chat", title))["done"]
    assert json.loads(asked("/api/embed", {"model": model["model"], "input": ["ab"]}))["embeddings"][0][3] == 2.0


def openai() -> None:
    """A connection to OpenAI's API, for which it reads events."""
    (model,) = json.loads(asked("/v1/models"))["data"]
    body = {"model": model["id"], "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    lines = asked("/v1/chat/completions", body).decode().splitlines()
    data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == "You said: hello" and chunks[-1]["usage"]["completion_tokens"] == len(text) + 1
    called = {"model": model["id"], "messages": [{"role": "user", "content": "weather"}], "tools": [WEATHER]}
    (choice,) = json.loads(asked("/v1/chat/completions", called))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


if __name__ == "__main__":
    ollama()
    openai()
    print("did: answer stream tools embeddings")
