# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept for a while, so that a request can go on with one; in memory, and within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import ChatMessage


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as its API has it, and the conversation up to it."""

    response: dict[str, Any]
    messages: Sequence[ChatMessage]
    size: int


class AnswerStore:
    """Keeps the answers that were used last.

    Args:
        most_bytes: the most bytes of all of them, as JSON.
    """

    def __init__(self, most_bytes: int = limits.MOST_STORED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._answers: OrderedDict[tuple[str, str], StoredAnswer] = OrderedDict()

    def put(self, owner: str, identity: str, answer: StoredAnswer) -> None:
        """Keep an answer for the client that has asked for it; others are dropped to make room."""
        self.remove(owner, identity)
        if answer.size > self._most_bytes:
            return
        self._answers[owner, identity] = answer
        self._bytes += answer.size
        while self._bytes > self._most_bytes:
            _, dropped = self._answers.popitem(last=False)
            self._bytes -= dropped.size

    def get(self, owner: str, identity: str) -> StoredAnswer | None:
        """The answer of this id, if it is still kept for this client."""
        found = self._answers.get((owner, identity))
        if found is not None:
            self._answers.move_to_end((owner, identity))
        return found

    def remove(self, owner: str, identity: str) -> bool:
        """Forget an answer; whether there was one."""
        found = self._answers.pop((owner, identity), None)
        self._bytes -= 0 if found is None else found.size
        return found is not None
