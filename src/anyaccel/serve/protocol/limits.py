# SPDX-License-Identifier: Apache-2.0
"""Bounds on every size that a client chooses, and on the time that it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Bounds on the fields of a request; the OpenAPI document states them.
MOST_ANSWERS: Final = 64  # prompts times n
MOST_STOPS: Final = 16
MOST_STOP_LENGTH: Final = 1_000  # characters
MOST_LOGPROBS: Final = 20
MOST_BIASES: Final = 1_024
MOST_MESSAGES: Final = 2_048
MOST_TOOLS: Final = 128
MOST_CHOICES: Final = 512  # of guided_choice
MOST_INPUTS: Final = 2_048  # texts to embed in one request
MOST_STATES: Final = 1 << 23  # values of the embeddings of tokens
MOST_REGEX: Final = 4_096  # characters
MOST_GRAMMAR: Final = 32_768
MOST_SCHEMA: Final = 65_536  # characters of the schema as JSON
MOST_DEPTH: Final = 48  # of a JSON schema, and of a template's own variables
MOST_VALUES: Final = 16_384  # of a template's own variables, as JSON
MOST_UPLOAD: Final = 64 << 20  # bytes of a file
MOST_FILE_BYTES: Final = 1 << 30  # of all files
MOST_BATCHES: Final = 16  # under way at once
MOST_BATCH_LINES: Final = 50_000  # requests of a batch
MOST_STORED_BYTES: Final = 64 << 20  # of the answers that /v1/responses keeps


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on a connection, in bytes and seconds.

    Attributes:
        head, body: the size of a request's head and body.
        header_seconds, body_seconds: the time in which a client has to send them.
        send_seconds: the time in which a client has to receive a part of the response.
        alive_seconds: the time between two keep-alive lines on a stream that has no event to send.
        idle_seconds: the time that a connection without a request is kept open.
    """

    head: int = 64 << 10
    body: int = 8 << 20
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    alive_seconds: float = 15.0
    idle_seconds: float = 30.0
