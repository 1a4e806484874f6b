# SPDX-License-Identifier: Apache-2.0
"""Asks a server for pydantic's objects as instructor's users do: `python instructor_client.py URL`.

Run by tests/e2e/test_serve_clients.py with the Python of .venv-clients, against a small model. The modes that hold the
answer to the schema have to give an object; what the others give (JSON, MD_JSON, PARALLEL_TOOLS) is up to the model.
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=130)
    colours: set[Colour] = set()
    nick: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Owned(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def main() -> None:
    """All of it."""
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    (model,) = [each.id for each in client.models.list()]
    for name in MODES:
        asking = instructor.from_openai(client, mode=instructor.Mode[name])
        for wanted in (Person, Owned):
            made = asking.chat.completions.create(
                model=model,
                response_model=wanted,
                messages=[{"role": "user", "content": "Ann is 30 years old and has a dog that can sit."}],
                temperature=0,
                max_tokens=300,
                max_retries=0,
            )
            assert isinstance(made, wanted), (name, made)
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    said = [{"role": "user", "content": "A cat has nine lives."}]
    parts = list(
        asking.chat.completions.create_partial(
            model=model, response_model=Cat, messages=said, temperature=0, max_tokens=300, max_retries=0
        )
    )
    assert len(parts) > 1 and parts[-1].kind == "cat" and parts[-1].lives is not None, parts
    print("did: answer stream tools structure")


if __name__ == "__main__":
    main()
