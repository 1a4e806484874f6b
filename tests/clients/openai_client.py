# SPDX-License-Identifier: Apache-2.0
"""Asks a server with OpenAI's own client, as its users write it: `python openai_client.py URL`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-clients, against the fake engine.
"""

from __future__ import annotations

import sys

import openai
import pydantic


def chats(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in made.choices] == ["You said: hello"] * 2
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.choices[0].logprobs.content[0].top_logprobs[1].logprob == -1.5
    with client.chat.completions.stream(model="fake", messages=messages) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "You said: hello" and final.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens == len("You said: hello") + 1


def tools(client: openai.OpenAI) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    given = {"model": "fake", "messages": [{"role": "user", "content": "weather"}]}
    given["tools"] = [{"type": "function", "function": function}]
    (choice,) = client.chat.completions.create(**given).choices
    assert (
        choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    )
    with client.chat.completions.stream(**given) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


class Person(pydantic.BaseModel):
    name: str
    age: int


def structure(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "person"}]
    made = client.chat.completions.parse(model="fake", messages=messages, response_format=Person)
    assert made.choices[0].message.parsed == Person(name="Ann", age=30)
    made = client.responses.parse(model="fake", input="person", text_format=Person)
    assert made.output_parsed == Person(name="Ann", age=30)


def completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in made.choices] == ["aYou", "bYou"]
    assert made.choices[0].logprobs.token_logprobs[0] is None
    parts = list(client.completions.create(model="fake", prompt="a", max_tokens=3, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "You"


def responses(client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="hello", instructions="Be kind.")
    assert made.output_text == "You said: hello" and made.status == "completed"
    with client.responses.stream(model="fake", input="hello") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "You said: hello"


def embeddings(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="fake", input=["ab", "abc"])  # asks for base64
    assert made.data[1].embedding == [0.5, -0.5, 0.5, 3.0]
    assert [model.id for model in client.models.list()] == ["fake"]


def errors(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        client.chat.completions.create(model="gpt-4", messages=messages)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    try:
        client.chat.completions.create(model="fake", messages=messages, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("it was taken")
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key"
    else:
        raise AssertionError("it was taken")


def chain(url: str) -> None:
    """LangChain's: messages, streams, tools and structured answers."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(base_url=url, api_key="sesame", model="fake")
    assert model.invoke("hello").content == "You said: hello"
    assert "".join(chunk.content for chunk in model.stream("hello")) == "You said: hello"
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    (call,) = model.bind_tools([weather]).invoke("weather").tool_calls
    assert call["name"] == "weather" and call["args"] == {"city": "Paris"}
    assert model.with_structured_output(Person).invoke("person") == Person(name="Ann", age=30)
    embeddings = OpenAIEmbeddings(base_url=url, api_key="sesame", model="fake", check_embedding_ctx_length=False)
    assert embeddings.embed_query("abc")[3] == 3.0


def main() -> None:
    """All of it."""
    url = f"{sys.argv[1]}/v1"
    client = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0)
    for part in () if sys.argv[2:] else (chats, tools, structure, completions, responses, embeddings, errors):
        part(client)
    if sys.argv[2:] == ["langchain"]:
        chain(url)
    print("did: answer stream tools structure embeddings")


if __name__ == "__main__":
    main()
