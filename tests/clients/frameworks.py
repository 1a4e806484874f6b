# SPDX-License-Identifier: Apache-2.0
"""Asks a server with libraries for agents, as their users write it: `python frameworks.py URL NAME...`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-agents, against the fake engine: a whole answer, a
stream where a library has them, and a call of a function whose result goes back.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

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
    for provider, base in (("anthropic/fake", url), ("ollama_chat/fake", url)):
        made = library.completion(model=provider, api_base=base, api_key=KEY, messages=HELLO, max_tokens=50)
        assert made.choices[0].message.content == SAID, provider
    made = library.embedding(model="openai/fake", api_base=f"{url}/v1", api_key=KEY, input=["ab"])
    assert made.data[0]["embedding"][3] == 2.0


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("fake", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    assert Agent(model).run_sync("hello").output == SAID

    async def streamed() -> str:
        async with Agent(model).run_stream("hello") as result:
            parts = [part async for part in result.stream_text(delta=True)]
        return "".join(parts)

    assert asyncio.run(streamed()) == SAID
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
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        CITIES.clear()
        model = kind(model="fake", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
        plain = Agent(name="a", model=model)
        assert Runner.run_sync(plain, "hello").final_output == SAID
        agent = Agent(name="b", model=model, tools=[function_tool(weather)])
        assert Runner.run_sync(agent, "weather").final_output == "You said: weather", kind
        assert CITIES == ["Paris"]


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    client = OpenAILike(model="fake", api_base=f"{url}/v1", api_key=KEY, is_chat_model=True)
    messages = [ChatMessage(role="user", content="hello")]
    assert client.chat(messages).message.content == SAID
    assert "".join(part.delta or "" for part in client.stream_chat(messages)) == SAID


def llm(url: str) -> None:
    """Simon Willison's `llm`, with its model file for other servers of OpenAI's API."""
    import llm as library

    folder = Path(os.environ["LLM_USER_PATH"])
    folder.mkdir(exist_ok=True)
    entry = (
        f"- model_id: ours\n  model_name: fake\n  api_base: {url}/v1\n  api_key_name: ours\n  supports_tools: true\n"
    )
    (folder / "extra-openai-models.yaml").write_text(entry)
    model = library.get_model("ours")
    model.key = KEY
    assert model.prompt("hello", stream=False).text() == SAID
    assert "".join(model.prompt("hello", stream=True)) == SAID
    assert model.chain("weather", tools=[weather], stream=False).text().endswith("You said: weather")
    assert CITIES == ["Paris"]


def smolagents(url: str) -> None:
    from smolagents import OpenAIModel

    model = OpenAIModel(model_id="fake", api_base=f"{url}/v1", api_key=KEY)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert model.generate(messages).content == SAID
    assert "".join(part.content or "" for part in model.generate_stream(messages)) == SAID


def dspy(url: str) -> None:
    import dspy as library

    client = library.LM("openai/fake", api_base=f"{url}/v1", api_key=KEY, cache=False)
    assert client("hello") == [SAID]


def inspect_ai(url: str) -> None:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import ToolInfo, ToolParams

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

    asyncio.run(asked())


ALL = {
    each.__name__: each
    for each in (litellm, pydantic_ai, openai_agents, llama_index, llm, smolagents, dspy, inspect_ai)
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        ALL[name](sys.argv[1])
        print(name, "answers")
