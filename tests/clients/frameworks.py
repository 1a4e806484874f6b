# SPDX-License-Identifier: Apache-2.0
"""Asks a server with libraries for agents, as their users write it: `python frameworks.py URL NAME`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-agents, against the fake engine: a whole answer, a
stream where a library has them, and a call of a function whose result goes back.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from pydantic import BaseModel

KEY = "sesame"
SAID = "You said: hello"
HELLO = [{"role": "user", "content": "hello"}]


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    CITIES.append(city)
    return "sunny"


CITIES: list[str] = []


class Person(BaseModel):
    """What the server answers to "person"."""

    name: str
    age: int


ANN = Person(name="Ann", age=30)


def litellm(url: str) -> None:
    import litellm as library

    given = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": KEY, "messages": HELLO}
    assert library.completion(**given).choices[0].message.content == SAID
    assert "".join(part.choices[0].delta.content or "" for part in library.completion(**given, stream=True)) == SAID
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    asked = {**given, "messages": [{"role": "user", "content": "weather"}], "tools": tools}
    (call,) = library.completion(**asked).choices[0].message.tool_calls
    assert call.function.name == "weather" and "Paris" in call.function.arguments
    asked = {**given, "messages": [{"role": "user", "content": "person"}], "response_format": Person}
    assert Person.model_validate_json(library.completion(**asked).choices[0].message.content) == ANN
    for provider, base in (("anthropic/fake", url), ("ollama_chat/fake", url)):
        made = library.completion(model=provider, api_base=base, api_key=KEY, messages=HELLO, max_tokens=50)
        assert made.choices[0].message.content == SAID, provider
    made = library.embedding(model="openai/fake", api_base=f"{url}/v1", api_key=KEY, input=["ab"])
    assert made.data[0]["embedding"][3] == 2.0


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("fake", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    assert Agent(model).run_sync("hello").output == SAID

    async def streamed() -> str:
        async with Agent(model).run_stream("hello") as result:
            parts = [part async for part in result.stream_text(delta=True)]
        return "".join(parts)

    assert asyncio.run(streamed()) == SAID
    assert Agent(model, output_type=NativeOutput(Person)).run_sync("person").output == ANN
    assert Agent(model, tools=[weather]).run_sync("weather").output == "You said: weather"
    assert CITIES == ["Paris"]


def openai_agents(url: str) -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def streamed(kind: type) -> str:
        parts = []
        model = kind(model="fake", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
        async for event in Runner.run_streamed(Agent(name="a", model=model), "hello").stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                parts.append(event.data.delta)
        return "".join(parts)

    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        CITIES.clear()
        assert asyncio.run(streamed(kind)) == SAID
        model = kind(model="fake", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
        plain = Agent(name="a", model=model)
        assert Runner.run_sync(plain, "hello").final_output == SAID
        typed = Agent(name="c", model=model, output_type=Person)
        assert Runner.run_sync(typed, "person").final_output == ANN
        agent = Agent(name="b", model=model, tools=[function_tool(weather)])
        assert Runner.run_sync(agent, "weather").final_output == "You said: weather", kind
        assert CITIES == ["Paris"]


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    more = {"is_chat_model": True, "is_function_calling_model": True}
    client = OpenAILike(model="fake", api_base=f"{url}/v1", api_key=KEY, **more)
    messages = [ChatMessage(role="user", content="hello")]
    assert client.chat(messages).message.content == SAID
    assert "".join(part.delta or "" for part in client.stream_chat(messages)) == SAID
    tools = [FunctionTool.from_defaults(weather).metadata.to_openai_tool()]
    asked = client.chat([ChatMessage(role="user", content="weather")], tools=tools)
    (call,) = client.get_tool_calls_from_response(asked)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Paris"})


def llm(url: str) -> None:
    """Simon Willison's `llm`, with its model file for other servers of OpenAI's API."""
    import llm as library

    folder = Path(os.environ["LLM_USER_PATH"])
    folder.mkdir(exist_ok=True)
    entry = (
        f"- model_id: ours\n  model_name: fake\n  api_base: {url}/v1\n  api_key_name: ours\n  supports_tools: true\n"
        "  supports_schema: true\n"
    )
    (folder / "extra-openai-models.yaml").write_text(entry)
    model = library.get_model("ours")
    model.key = KEY
    assert model.prompt("hello", stream=False).text() == SAID
    assert "".join(model.prompt("hello", stream=True)) == SAID
    made = model.prompt("person", schema=Person.model_json_schema(), stream=False).text()
    assert Person.model_validate_json(made) == ANN
    assert model.chain("weather", tools=[weather], stream=False).text().endswith("You said: weather")
    assert CITIES == ["Paris"]


def smolagents(url: str) -> None:
    from smolagents import OpenAIModel, tool

    model = OpenAIModel(model_id="fake", api_base=f"{url}/v1", api_key=KEY)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert model.generate(messages).content == SAID
    assert "".join(part.content or "" for part in model.generate_stream(messages)) == SAID

    @tool
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name.
        """
        return city

    messages[0]["content"][0]["text"] = "weather"
    (call,) = model.generate(messages, tools_to_call_from=[weather]).tool_calls
    assert call.function.name == "weather" and "Paris" in str(call.function.arguments)


def inspect_ai(url: str) -> None:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
    from inspect_ai.tool import ToolInfo, ToolParams
    from inspect_ai.util import json_schema

    async def asked() -> None:
        model = get_model(
            "openai-api/ours/fake", base_url=f"{url}/v1", api_key=KEY, config=GenerateConfig(max_retries=0)
        )
        assert (await model.generate("hello")).completion == SAID
        parameters = ToolParams(properties={"city": {"type": "string"}}, required=["city"])
        tool = ToolInfo(name="weather", description="The weather in a city", parameters=parameters)
        made = await model.generate([ChatMessageUser(content="weather")], tools=[tool])
        (call,) = made.choices[0].message.tool_calls or []
        assert (call.function, call.arguments) == ("weather", {"city": "Paris"})
        schema = ResponseSchema(name="person", json_schema=json_schema(Person))
        made = await model.generate("person", config=GenerateConfig(response_schema=schema))
        assert Person.model_validate_json(made.completion) == ANN

    asyncio.run(asked())


ALL = {
    litellm: "answer stream tools structure embeddings",
    pydantic_ai: "answer stream tools structure",
    openai_agents: "answer stream tools structure",
    llama_index: "answer stream tools",
    llm: "answer stream tools structure",
    smolagents: "answer stream tools",
    inspect_ai: "answer tools structure",
}

if __name__ == "__main__":
    for library, done in ALL.items():
        if library.__name__ == sys.argv[2]:
            library(sys.argv[1])
            print("did:", done)
