# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template without torch and transformers, where there is a tokenizer.json."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.extras import pip_line
from anyaccel.inference.text.chat_template import ChatTemplate, Message
from anyaccel.validation import Fields, check_integer, check_mapping, error_text, read_json, read_text

logger = logging.getLogger(__name__)

# Files of the kinds of tokenizer without a tokenizer.json.
_VOCABULARY = re.compile(r"vocab|merges|spiece|\.model$|\.tiktoken$|^tekken\.json$|\.py$")

_DEFAULT, _TOOL_USE = "default", "tool_use"  # transformers' names of templates

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _check_text(text: str) -> None:
    """Refuse the surrogates that stand for bytes that are not UTF-8 in arguments and standard input."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the unpaired surrogate U+{code:04X}"
        raise UsageError(f"the text is not valid UTF-8: {what} after {text[: error.start][-20:]!r}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no such file."""
    return read_json(file) if file.exists() else {}


def _text_of(values: Fields, name: str) -> str | None:
    """The text of a special token, which may be stored with its properties; None without one."""
    if values.is_mapping(name):
        values, name = values.mapping(name), "content"
    return values.text(name) if values.has(name) else None


def _is_librarys(error: BaseException) -> bool:
    """Whether the library tokenizers raised it: it raises bare Exceptions, and a panic in Rust is not even one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class TextTokenizer:
    """Text to tokens and back, as the model was trained.

    Args:
        made_from: the file that the folder was made from, for messages.

    Raises:
        ModelError: the folder has no tokenizer, or a damaged one.
    """

    def __init__(self, folder: Path, made_from: Path | None = None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise AnyAccelError(f"generating text needs more packages: {pip_line('tokenizers')} ({error})") from None
        file = folder / "tokenizer.json"
        self.where = str(made_from or file)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except BaseException as error:
            if not _is_librarys(error):
                raise
            raise ModelError(f"{file}: no tokenizer that can be read ({error_text(error)})") from error
        # What embedding models were trained with; transformers does neither unless it is asked to.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        place = folder / "tokenizer_config.json"
        given = _read_json(place)
        config = Fields(given, f"{place}: ")
        place = folder / "special_tokens_map.json"
        older = Fields(_read_json(place), f"{place}: ")
        special = {name: _text_of(config if name in given else older, name) for name in _SPECIAL}
        self.special = {name: text for name, text in special.items() if text is not None}
        self._sources, place = _template_sources(folder, config)
        self._template_where = str(made_from or place)
        self._templates: dict[str, ChatTemplate] = {}

    @property
    def has_chat_template(self) -> bool:
        return _DEFAULT in self._sources

    @property
    def end_tokens(self) -> list[int]:
        """The tokenizer's own end of a text."""
        token = self._tokenizer.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None
        return [] if token is None else [token]

    @property
    def library(self) -> Any:
        """The tokenizer of the library tokenizers, for callers that cut texts or make pairs of them."""
        return self._tokenizer

    def check(self, text: str) -> None:
        """Raise UsageError for a text with bytes that are not UTF-8."""
        _check_text(text)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text, with those that the model expects around it unless it says them itself (`special` False).

        The post-processor in tokenizer.json alone says which these are, as in transformers since 5: `add_bos_token` and
        `add_eos_token` of tokenizer_config.json are for folders without a tokenizer.json.

        Raises:
            UsageError: the text has bytes that are not UTF-8.
        """
        _check_text(text)
        return self._ids(text, special)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation up to where the model's answer begins.

        Raises:
            ModelError: the model has no chat template, or its template refuses the conversation.
            UsageError: a message has bytes that are not UTF-8.
        """
        for message in messages:
            _check_text(message["content"])
        return self._ids(self.render(messages), special=False)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        continue_answer: bool = False,
    ) -> str:
        """A conversation as text; see `ChatTemplate.render`. `encode` it without `special`.

        Raises:
            ModelError: the model has no chat template, or its template refuses the conversation.
        """
        name = _template_name(self._sources, tools is not None)
        if name not in self._sources:
            raise ModelError("the model has no chat template")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name], self.special, self._template_where)
        return self._templates[name].render(messages, continue_answer, tools, more)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except BaseException as error:
            if not _is_librarys(error):
                raise
            raise ModelError(f"the model's tokenizer does not take this text ({error_text(error)})") from error
        return ids

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """The text of tokens, without special ones unless they are asked for."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        return text

    def token_of(self, text: str) -> int | None:
        """The token that the vocabulary has for exactly this text, if it has one."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def piece(self, token: int) -> str | None:
        """A token as the vocabulary writes it; None where it has none of this number."""
        text: str | None = self._tokenizer.id_to_token(token)
        return text

    def template(self, tools: bool = False) -> str:
        """The source of the chat template for conversations with or without tools, "" without one."""
        return self._sources.get(_template_name(self._sources, tools), "")

    def set_template(self, file: Path) -> None:
        """Take the chat template of a file instead of the model's own.

        Raises:
            ModelError: it cannot be read.
        """
        self._sources, self._template_where = {_DEFAULT: read_text(file)}, str(file)
        self._templates = {_DEFAULT: ChatTemplate(self._sources[_DEFAULT], self.special, str(file))}


def _template_name(sources: Mapping[str, str], tools: bool) -> str:
    """Which template transformers takes where a model has several."""
    return _TOOL_USE if tools and _TOOL_USE in sources else _DEFAULT


def _template_sources(folder: Path, config: Fields) -> tuple[dict[str, str], Path]:
    """The chat templates by their names, and the file that they are in; files of their own come first."""
    file = folder / "chat_template.jinja"
    found = {_DEFAULT: read_text(file)} if file.is_file() else {}
    found |= {each.stem: read_text(each) for each in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if found:
        return found, file
    file = folder / "tokenizer_config.json"
    if not config.has("chat_template"):
        file = folder / "chat_template.json"
        config = Fields(_read_json(file), f"{file}: ")
    if config.is_list("chat_template"):  # several templates, each with a name
        where = f"{config.where}chat_template: "
        several = [Fields(check_mapping(each, where[:-2]), where) for each in config.items("chat_template")]
        return {each.text("name"): each.text("template") for each in several}, file
    source = config.text("chat_template", "")
    return {_DEFAULT: source} if source else {}, file


class TransformersTokenizer:
    """The same on transformers' tokenizer, for the models without a tokenizer.json."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special: dict[str, str] = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}

    @property
    def library(self) -> Any:
        """The tokenizer of the library tokenizers in it; None where it is written in Python."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def check(self, text: str) -> None:
        """Raise UsageError for a text with bytes that are not UTF-8."""
        _check_text(text)

    def _sources(self) -> dict[str, str]:
        found = self._tokenizer.chat_template or {}
        return dict(found) if isinstance(found, Mapping) else {_DEFAULT: str(found)}

    @property
    def has_chat_template(self) -> bool:
        return _DEFAULT in self._sources()

    @property
    def end_tokens(self) -> list[int]:
        token = self._tokenizer.eos_token_id
        return [] if token is None else [int(token)]

    def encode(self, text: str, special: bool = True) -> list[int]:
        _check_text(text)
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def chat(self, messages: Sequence[Message]) -> list[int]:
        for message in messages:
            _check_text(message["content"])
        return self.encode(self.render(messages), special=False)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        continue_answer: bool = False,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=not continue_answer,
                tokenize=False,
                **(more or {}),
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ModelError(
                f"the model's chat template does not take this conversation: {error_text(error)}"
            ) from error
        return text

    def decode(self, tokens: list[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special)
        return text

    def token_of(self, text: str) -> int | None:
        token: int | None = self._tokenizer.get_vocab().get(text)
        return token

    def piece(self, token: int) -> str | None:
        text: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return text

    def template(self, tools: bool = False) -> str:
        return self._sources().get(_template_name(self._sources(), tools), "")

    def set_template(self, file: Path) -> None:
        source = read_text(file)
        ChatTemplate(source, self.special, str(file))  # refuses what is no template
        self._tokenizer.chat_template = source


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ModelError: it has none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its files can be wrong in any way
        pieces = [each.name for each in folder.glob("*.model")]
        if pieces and not _has_protobuf():  # transformers names the package of another format
            raise ModelError(
                f"{folder / pieces[0]}: a SentencePiece tokenizer without a tokenizer.json, which transformers reads "
                "with the package protobuf: pip install protobuf"
            ) from error
        raise ModelError(f"{folder}: no tokenizer that transformers can read ({error_text(error)})") from error


def _has_protobuf() -> bool:
    return find_spec("google") is not None and find_spec("google.protobuf") is not None


def load_text_tokenizer(
    path: Path, announce: Callable[[str], object] | None = None
) -> TextTokenizer | TransformersTokenizer:
    """The tokenizer of a model folder or a GGUF file, whose tokenizer is converted once.

    Args:
        announce: called with one line before a conversion that takes a while.

    Raises:
        ModelError: there is none that can be read.
    """
    if not path.is_file():
        return _of_folder(path)
    from anyaccel.inference.text.gguf_conversion import convert_tokenizer, converted_tokenizer

    try:
        return _of_folder(converted_tokenizer(path, announce), path)
    except OSError as error:
        logger.warning("the converted tokenizer of %s is not kept (%s)", path.name, error)
    with tempfile.TemporaryDirectory(prefix="anyaccel-") as folder:
        convert_tokenizer(path, Path(folder), announce)
        return _of_folder(Path(folder), path)


def _of_folder(folder: Path, made_from: Path | None = None) -> TextTokenizer | TransformersTokenizer:
    if (folder / "tokenizer.json").is_file():
        return TextTokenizer(folder, made_from)
    # transformers would look for a file of each kind that it knows, for seconds, and say all of them.
    if not any(_VOCABULARY.search(file.name) for file in folder.iterdir()):
        raise ModelError(
            f"{folder / 'tokenizer.json'}: missing, and the folder has no other tokenizer; "
            "copy the files of the one that the model was made with"
        )
    return TransformersTokenizer(load_tokenizer(folder))


def tokenizer_json(tokenizer: TextTokenizer | TransformersTokenizer) -> str:
    """What a tokenizer.json of it would hold.

    Raises:
        ModelError: it is not one of the library tokenizers.
    """
    inner = tokenizer._tokenizer
    inner = getattr(inner, "backend_tokenizer", inner)
    if not hasattr(inner, "to_str"):
        raise ModelError("the model's tokenizer is not one of the library tokenizers: it cannot be written as JSON")
    text: str = inner.to_str()
    return text


def end_tokens(
    generation_config: dict[str, Any], config: dict[str, Any], path: Path | None = None, note: bool = True
) -> list[int]:
    """Tokens that end a text: of generation_config.json, else of the model's configuration.

    Args:
        path: of the model, for messages.
        note: say which of them the vocabulary has not, as they never come.
    """
    places = {"generation_config": generation_config, "config": config}
    for name, given in places.items():
        where = f"{name}: " if path is None else f"{path}: " if path.is_file() else f"{path / name}.json: "
        values = Fields(given, where)
        if values.is_list("eos_token_id"):
            found = [check_integer(each, f"{values.where}eos_token_id", -1) for each in values.items("eos_token_id")]
        elif values.has("eos_token_id"):
            found = [values.get_int("eos_token_id", minimum=-1)]
        else:
            continue
        ends = [token for token in found if token >= 0]  # some configurations say -1 for no token
        own = Fields(config, "config: ")
        rows = (own if own.has("vocab_size") else own.mapping("text_config")).get_int("vocab_size", 0)
        outside = [token for token in ends if token >= rows > 0]
        if outside and note:
            logger.warning(
                "%seos_token_id=%d is outside the vocabulary of %d tokens: no text ends by it", where, outside[0], rows
            )
        return [token for token in ends if token not in outside]
    return []
