# SPDX-License-Identifier: Apache-2.0
"""Texts, and pairs of texts, to the tokens that an encoder reads. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.validation import Fields, read_json

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # transformers 5: without types unless the file says so
_NO_LIMIT = 1 << 31  # transformers writes a number far above it where a tokenizer has no limit of its own

Tokens = tuple[list[list[int]], list[list[int]]]  # of texts, and of which text of a pair each token is


class EncoderTokenizer:
    """A folder's tokenizer, which cuts what is longer than the model takes.

    Args:
        folder: with a tokenizer.json, or another file of which transformers makes one of the library tokenizers.
        longest: the most tokens that the model takes; 0: no limit of its own.

    Attributes:
        longest: the most tokens of a text, or of a pair together; 0: no limit.
        marks_texts: transformers' tokenizer of the folder tells models which text of a pair a token is of.

    Raises:
        ModelError: the folder has no tokenizer.json, or a damaged file.
    """

    def __init__(self, folder: Path, longest: int = 0) -> None:
        given = load_text_tokenizer(folder)
        if given.library is None:
            raise ModelError(f"{folder}: there is no tokenizer.json, which an encoder's texts need")
        self._given = given
        sentence = _fields(folder / "sentence_bert_config.json")
        own = _fields(folder / "tokenizer_config.json")
        most = int(own.number("model_max_length", float(_NO_LIMIT)))
        limits = [longest, sentence.get_int("max_seq_length", 0), most]
        names = own.items("model_input_names")
        generic = own.text("tokenizer_class", "") in _GENERIC
        self.marks_texts = "token_type_ids" in names if names else not generic
        self.longest = min((each for each in limits if 0 < each < _NO_LIMIT), default=0)
        self._lower = sentence.get_bool("do_lower_case")
        self._tokenizer = given.library
        self._tokenizer.no_padding()
        if self.longest:
            self._tokenizer.enable_truncation(self.longest)
        else:
            self._tokenizer.no_truncation()

    def texts(self, texts: Sequence[str]) -> Tokens:
        """The tokens of each text.

        Raises:
            UsageError: a text has bytes that are not UTF-8.
        """
        return self._encode([self._checked(text) for text in texts])

    def pairs(self, query: str, texts: Sequence[str]) -> Tokens:
        """The tokens of a query together with each text; what is too long loses the end of the longer one."""
        first = self._checked(query)
        return self._encode([(first, self._checked(text)) for text in texts])

    def _checked(self, text: str) -> str:
        self._given.check(text)
        return text.lower() if self._lower else text

    def _encode(self, inputs: Sequence[Any]) -> Tokens:
        found = self._tokenizer.encode_batch(list(inputs))
        return [each.ids for each in found], [each.type_ids for each in found]


def _fields(file: Path) -> Fields:
    return Fields(read_json(file) if file.is_file() else {}, f"{file}: ")
