# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json, with neither torch nor transformers.

A GGUF file has the vocabulary, the kinds of its tokens, merges or scores, and the name of what cuts the text
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Two kinds of tokenizer are made from that:

- `gpt2`: merges of bytes; `gguf_splits` says what the names of the cuts stand for.
- `llama`: SentencePiece's merges of characters, where what is no token falls to bytes. The file has scores, and of all
  pairs the one is merged first whose token has the highest; so the pairs in the order of scores are the merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufFile, StringArray
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_splits import SPLITS, Step
from anyaccel.validation import Fields, short_repr

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # tokenizer.ggml.token_type
# The name of a special token in tokenizer_config.json -> in GGUF (whose spelling one of them is), and its default id
# in SentencePiece's models.
_SPECIAL = {
    "bos_token": ("bos", 1),
    "eos_token": ("eos", 2),
    "unk_token": ("unknown", 0),
    "sep_token": ("seperator", None),
    "pad_token": ("padding", None),
    "cls_token": ("cls", None),
    "mask_token": ("mask", None),
}
_NO_TOKEN = (1 << 32) - 1
_SPACE = "▁"
_LONGEST_TOKEN = 1 << 13  # characters: the longest of real ones are runs of some hundred spaces


class _Vocabulary(Fields):
    """What the metadata say of the tokens."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self._metadata = file.path, file.metadata
        super().__init__(file.metadata, f"{file.path}: tokenizer.ggml.")
        if not self.has("tokens"):
            raise ModelError(f"{self.path}: its metadata lack tokenizer.ggml.tokens, so that it has no tokenizer")
        self.kind = self.text("model")
        self.tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(self._texts(file, "tokens"))]
        if max(map(len, self.tokens)) > _LONGEST_TOKEN:
            raise ModelError(f"{self.path}: damaged: a token of {max(map(len, self.tokens))} characters")
        for name in ("token_type", "scores"):
            if self.has(name) and len(self.items(name)) < len(self.tokens):
                raise ModelError(f"{self.path}: damaged: tokenizer.ggml.{name} is not one number for each token")
        self.types = self.get_ints("token_type", 0, _BYTE) if self.has("token_type") else []
        self.scores = self.numbers("scores") if self.has("scores") else []
        self.merges = self._texts(file, "merges") if self.has("merges") else []
        self.ids = {text: number for number, text in enumerate(self.tokens)}
        default = self.kind == "llama"
        self.special = {
            name: self.tokens[number]
            for name, (key, usual) in _SPECIAL.items()
            if (number := self._id(key, usual if default else None)) is not None
        }

    def _value(self, name: str) -> Any:
        return super()._value(f"tokenizer.ggml.{name}")

    def _texts(self, file: GgufFile, name: str) -> list[str]:
        array = self.required(name)
        if not isinstance(array, StringArray) or not array.count:
            raise ModelError(f"{self.where}{name}={short_repr(array)} is not a list of texts")
        return file.strings(array)

    def is_called(self, name: str) -> bool:
        """True for models of this name, which the file may be said to be in two places."""
        places = (self._metadata.get(f"general.{key}") for key in ("architecture", "name"))
        return any(name in str(place).lower().replace("-", "") for place in places)

    def _id(self, key: str, usual: int | None) -> int | None:
        name = f"{key}_token_id"
        # Some files give a number that no token has where there is no such token.
        given = self.get_int(name, -1, -1, _NO_TOKEN)
        # The end token is checked where it is used; a wrong begin token would be put before every prompt.
        if key == "bos" and len(self.tokens) <= given < _NO_TOKEN:
            raise ModelError(f"{self.where}{name}={given} is outside the vocabulary of {len(self.tokens)} tokens")
        return next((each for each in (given, usual) if each is not None and 0 <= each < len(self.tokens)), None)

    def type_of(self, number: int) -> int:
        return self.types[number] if self.types else _NORMAL

    def added(self) -> list[Step]:
        """The tokens that are found in a text before it is cut."""
        named = {text for name, text in self.special.items() if name in ("bos_token", "eos_token", "unk_token")}
        # Phi-3's own tokens take the white space after them; no GGUF file says so.
        strips = self.kind == "llama" and self.is_called("phi3")
        found = []
        for number, text in enumerate(self.tokens):
            kind = self.type_of(number)
            special = kind == _CONTROL or text == self.special.get("unk_token") or (not self.types and text in named)
            if self.ids[text] != number or not (special or kind == _USER_DEFINED):
                continue
            found.append(
                {
                    "id": number,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
                    "normalized": False,
                    "special": special,
                }
            )
        return found


def write_tokenizer(source: Path, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of the GGUF file `source`.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or has no tokenizer.
        Unsupported: a kind of tokenizer, or a name of cuts, that is not known here.
    """
    file = GgufFile(source)
    try:
        vocabulary = _Vocabulary(file)
    finally:
        file.file.close()
    if vocabulary.kind == "gpt2":
        parts, bos = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        parts, bos = _sentence_piece(vocabulary)
    else:
        raise Unsupported(f"reader for GGUF tokenizers of kind {short_repr(vocabulary.kind)} ({source})")
    adds = {"bos": vocabulary.get_bool("add_bos_token", bos), "eos": vocabulary.get_bool("add_eos_token", False)}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _around(vocabulary, adds),
        "decoder": parts["decoder"],
        "model": {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        | parts["model"]
        | {"vocab": vocabulary.ids, "merges": parts["merges"]},
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"add_{name}_token": value for name, value in adds.items()},
        **vocabulary.special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
    given = Fields(file.metadata, f"{source}: ")
    if template := given.text("tokenizer.chat_template", ""):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if template := given.text("tokenizer.chat_template.tool_use", ""):
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(template, encoding="utf-8")


def _around(vocabulary: _Vocabulary, adds: dict[str, bool]) -> Step | None:
    """Puts the tokens for begin and end around a text."""
    wanted = {name: vocabulary.special.get(f"{name}_token") if add else None for name, add in adds.items()}
    if not any(wanted.values()):
        return None

    def of(sequence: str, kind: int) -> list[Step]:
        parts: list[Step] = [{"Sequence": {"id": sequence, "type_id": kind}}]
        if wanted["bos"] is not None:
            parts.insert(0, {"SpecialToken": {"id": wanted["bos"], "type_id": kind}})
        if wanted["eos"] is not None:
            parts.append({"SpecialToken": {"id": wanted["eos"], "type_id": kind}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": of("A", 0),
        "pair": of("A", 0) + of("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in wanted.values() if text
        },
    }


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    name = vocabulary.text("pre", "")
    splits = SPLITS.get(name)
    if splits is None:
        raise Unsupported(f"rules for cutting a text that GGUF calls {short_repr(name)} ({vocabulary.path})")
    if not vocabulary.merges:
        raise ModelError(f"{vocabulary.path}: its metadata lack tokenizer.ggml.merges, which its tokenizer needs")
    plain: Step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if splits.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splits.steps)},
        "decoder": plain,
        "model": {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": splits.ignore_merges},
        "merges": list(_stored_merges(vocabulary)),
    }, splits.bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    if not vocabulary.merges and not any(vocabulary.scores):
        raise Unsupported(f"merges for a tokenizer that has no scores ({vocabulary.path})")
    prefix = vocabulary.get_bool("add_space_prefix", True)
    spaces: Step = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoder: list[Step] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before: list[Step] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {
            "unk_token": vocabulary.special.get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": _BYTE in vocabulary.types,
            "ignore_merges": False,
        },
        "merges": list(_stored_merges(vocabulary) if vocabulary.merges else _scored_merges(vocabulary)),
    }, True


def _stored_merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The merges of the file; those of or to what is no token would never be made, and `tokenizers` refuses them."""
    ids = vocabulary.ids
    for merge in vocabulary.merges:
        first, _, second = merge.partition(" ")
        if first in ids and second in ids and first + second in ids:
            yield first, second


def _scored_merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The pairs that make a token, the highest score first."""
    tokens, ids, scores = vocabulary.tokens, vocabulary.ids, vocabulary.scores
    whole = {number for number in ids.values() if vocabulary.type_of(number) in (_NORMAL, _USER_DEFINED)}

    def pairs(text: str) -> Iterator[tuple[str, str]]:
        for end in range(len(text) - 1, 0, -1):
            first, second = ids.get(text[:end]), ids.get(text[end:])
            if first in whole and second in whole:
                yield tokens[first], tokens[second]

    for _, group in groupby(sorted(whole, key=scores.__getitem__, reverse=True), key=scores.__getitem__):
        numbers = list(group)
        found = [pair for number in numbers for pair in pairs(tokens[number])]
        if len(numbers) > 1:  # SentencePiece would take the leftmost; longer ones first comes closest
            found.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        yield from found
