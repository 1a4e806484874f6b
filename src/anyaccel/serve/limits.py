# SPDX-License-Identifier: Apache-2.0
"""How much a client may ask for, and how long it may take: every size that a request chooses has a bound here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of one request's fields; the OpenAPI document says them.
MOST_ANSWERS: Final = 64  # prompts times n
MOST_STOPS: Final = 16
MOST_STOP_LENGTH: Final = 1_000  # characters
MOST_LOGPROBS: Final = 20
MOST_BIASES: Final = 1_024
MOST_MESSAGES: Final = 2_048
MOST_TOOLS: Final = 128
MOST_CHOICES: Final = 512  # of guided_choice
MOST_INPUTS: Final = 512  # texts to embed in one request
MOST_REGEX: Final = 4_096  # characters
MOST_GRAMMAR: Final = 32_768
MOST_SCHEMA: Final = 65_536  # characters of the schema as JSON
MOST_DEPTH: Final = 48  # of a JSON schema, and of a template's own variables
MOST_VALUES: Final = 16_384  # of a template's own variables, as JSON


@dataclass(frozen=True)
class Limits:
    """Of a connection; seconds and bytes.

    Attributes:
        head, body: of a request.
        header_seconds, body_seconds: a client has to send the head of a request, and its body.
        send_seconds: a client has to take a piece of the answer.
        alive_seconds: between two signs of life on a stream whose answer does not come yet.
        idle_seconds: a connection without a request is kept.
    """

    head: int = 64 << 10
    body: int = 8 << 20
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    alive_seconds: float = 15.0
    idle_seconds: float = 30.0
