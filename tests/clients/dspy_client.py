# SPDX-License-Identifier: Apache-2.0
"""Asks a server with DSPy as its users do: `python dspy_client.py URL`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-agents, against a small model: DSPy asks for fields of
its own signatures, which a grammar holds (its JSONAdapter), and reads them back.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request

import dspy


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Served(dspy.LM):
    """DSPy knows by a model's name what its server can do, and takes nothing for granted of others."""

    supports_response_schema = True
    supports_function_calling = True
    supported_params = frozenset(("temperature", "max_tokens", "response_format", "tools", "tool_choice", "stream"))


class Call(dspy.Signature):
    """Call the tool that answers the question."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def main() -> None:
    """All of it."""
    (name,) = [each["id"] for each in json.load(urllib.request.urlopen(f"{sys.argv[1]}/v1/models"))["data"]]
    model = Served(f"openai/{name}", api_base=f"{sys.argv[1]}/v1", api_key="none", cache=False, max_tokens=200)
    assert model("Say hello.")[0]
    dspy.configure(lm=model, adapter=dspy.JSONAdapter())
    person = dspy.Predict("text -> name: str, age: int")(text="Ann is 30 years old.")
    assert isinstance(person.name, str) and isinstance(person.age, int)

    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    streamed = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])

    async def parts() -> tuple[str, str]:
        told, said = [], ""
        async for part in streamed(question="Why is the sky blue?"):
            if isinstance(part, dspy.Prediction):
                said = part.answer
            elif isinstance(part, dspy.streaming.StreamResponse):
                told.append(part.chunk)
        assert len(told) > 1
        return "".join(told), said

    told, said = asyncio.run(parts())
    assert json.loads(told) == said, (told, said)  # DSPy gives a field as it comes, in JSON

    native = dspy.JSONAdapter(use_native_function_calling=True)
    with dspy.context(lm=model.copy(tool_choice="required"), adapter=native):
        made = dspy.Predict(Call)(question="What is the weather in Paris?", tools=[dspy.Tool(weather)])
    (call,) = made.calls.tool_calls
    assert call.name == "weather" and isinstance(call.args["city"], str), made
    print("did: answer stream tools structure")


if __name__ == "__main__":
    main()
