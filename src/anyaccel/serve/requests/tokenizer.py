# SPDX-License-Identifier: Apache-2.0
"""The model's tokenizer in a server: long texts are encoded outside the event loop, which must not wait."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.serve.protocol.errors import ApiError, wrong

_LONGEST_BREAKER, _MOST_BREAKER_TOKENS = 40, 20  # characters, and tokens behind the first one, as in llama.cpp
_SHORT = 4_096  # characters; encoding them takes less than a millisecond, about what a thread would cost
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Variables that a request may not set in a template: ours, and the arguments of transformers' apply_chat_template.
_RESERVED = frozenset(
    (
        "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    )
)  # fmt: skip


class ServerTokenizer:
    """Text to tokens and back.

    Args:
        tokenizer: of `anyaccel.inference.text.tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode
        self.has_chat_template: bool = tokenizer.has_chat_template
        self.template: str = tokenizer.template()
        self.tool_template: str = tokenizer.template(tools=True)

    def info(self) -> dict[str, Any]:
        """The special tokens and the chat template, for a client that tokenizes itself."""
        special: Mapping[str, str] = getattr(self._tokenizer, "special", {})
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {**{name: special.get(name) for name in names}, "chat_template": self.template or None}

    def decode_with_special(self, tokens: list[int]) -> str:
        """The text of tokens, special ones too."""
        text: str = self._tokenizer.decode(tokens, True)
        return text

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text.

        Raises:
            UsageError: the text is not valid Unicode.
        """
        if len(text) <= _SHORT:
            ids: list[int] = self._tokenizer.encode(text, special)
            return ids
        # The tokenizer releases the GIL.
        return await asyncio.to_thread(self._tokenizer.encode, text, special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as the model reads it, by its own template; `encode` it without `special`.

        Raises:
            ApiError: there is no template, or it does not take the conversation.
        """
        if not self.has_chat_template:
            raise ApiError(
                400,
                "messages: this model has no chat template; use /v1/completions, or for an encoder /v1/embeddings",
                "messages",
            )
        if reserved := sorted(_RESERVED & (more or {}).keys()):
            raise wrong("chat_template_kwargs", f"{', '.join(reserved)} cannot be set by a request")
        try:
            text: str = self._tokenizer.render(messages, tools, more, not add_generation_prompt)
        except ModelError as error:
            problem = str(error).partition(": ")[2] or str(error)  # without the file's name, which clients must not see
            raise ApiError(400, f"messages: {problem}", "messages") from None
        return text

    @functools.lru_cache(maxsize=256)  # noqa: B019  there is one of these a server, and a format has few marks
    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary has for exactly this mark, such as <tool_call>, if it has one."""
        found: int | None = self._tokenizer.token_of(text)
        return found

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def is_special(self, mark: str) -> bool:
        """Whether a mark is a token that decoding normally leaves out."""
        token = self.token_id(mark.strip())
        return token is not None and not self.decode([token]).strip()

    @functools.lru_cache(maxsize=1)  # noqa: B019  there is one of these a server
    def _texts(self, count: int) -> list[tuple[int, str]]:
        """Each token with its text, special ones too."""
        known = (token for token in range(count) if self._tokenizer.piece(token) is not None)
        return [(token, self.decode_with_special([token])) for token in known]

    @functools.lru_cache(maxsize=16)  # noqa: B019  there is one of these a server
    def breakers(self, texts: tuple[str, ...], count: int) -> list[list[int]]:
        """The tokens with which these texts may appear, as llama.cpp's DRY finds them.

        A token that has the text in it is one alone; one that ends with a part of the text is followed by the rest.

        Args:
            count: of tokens of the vocabulary.
        """
        found: dict[tuple[int, ...], None] = {}
        for text in (each[:_LONGEST_BREAKER] for each in texts):
            rests: dict[int, tuple[int, ...]] = {}
            for token, own in self._texts(count):
                if text in own:
                    found[token,] = None
                    continue
                for length in range(1, min(len(own), len(text) - 1) + 1):
                    if own.endswith(text[:length]):
                        if length not in rests:
                            rests[length] = tuple(self._tokenizer.encode(text[length:], False)[:_MOST_BREAKER_TOKENS])
                        found[token, *rests[length]] = None
        return [list(each) for each in found]

    @functools.lru_cache(maxsize=65_536)  # noqa: B019  there is one of these a server
    def token_text(self, token: int) -> tuple[str, tuple[int, ...]]:
        """The text of one token, and its bytes."""
        piece = self._tokenizer.piece(token)
        text = self.decode_with_special([token])
        if piece is None:
            return text, tuple(text.encode())
        if found := _BYTE.fullmatch(piece):
            return text, (int(found[1], 16),)
        if "▁" in piece:  # SentencePiece's space, which decoding drops at the beginning of a text
            text = piece.replace("▁", " ")
        elif "\ufffd" in text:  # a part of a character
            values = [_byte_of_character().get(character) for character in piece]
            if None not in values:
                return text, tuple(value for value in values if value is not None)
        return text, tuple(text.encode())


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte of each character in a byte-level vocabulary.

    GPT-2 writes printable bytes as in Latin-1, and the others, in their order, as the characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
