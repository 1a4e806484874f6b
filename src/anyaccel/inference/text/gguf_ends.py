# SPDX-License-Identifier: Apache-2.0
"""Which tokens end an answer of a GGUF file's model: those that the file names, and those known by their text.

Files name one or two, and models write others as well: of a turn, of a call, of a text. llama.cpp goes by the same ones
(`special_eog_ids` in https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

from __future__ import annotations

from anyaccel.inference.checkpoints.gguf_file import GgufFile, StringArray
from anyaccel.validation import Fields

_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NO_TOKEN = (1 << 32) - 1  # written for none, as is -1

# Nobody writes these but a model that ends.
_MARKS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<|endoftext|>", "<|end_of_text|>", "<|tool_response>", "<turn|>", "<end_of_turn>", "<end_of_utterance>",
        "<｜end▁of▁sentence｜>", "_<EOT>", "<|fim_pad|>", "<|repo_name|>", "<|fim_repo|>", "<|file_sep|>",
    )
)  # fmt: skip
# These may be a text's (</s> is HTML): they end an answer where the file says that they are control tokens.
_CONTROL_MARKS = frozenset(("</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]"))
_TYPES, _CONTROL = "tokenizer.ggml.token_type", 3
# With these, <|end|> only ends a part of an answer.
_PARTS = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|calls|>", "<|flush|>")))


def gguf_ends(file: GgufFile) -> list[int]:
    """The tokens that end an answer.

    Raises:
        ModelError: a value in the file is none of its kind.
    """
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _NAMED]
    values = Fields(file.metadata, f"{file.path}: ")
    found = {values.get_int(key, None, -1, _NO_TOKEN) for key in keys if values.has(key)} - {-1, _NO_TOKEN}
    array = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(array, StringArray):
        return sorted(found)
    types = values.get_ints(_TYPES) if values.has(_TYPES) else []
    places = {
        text: number
        for number, text in enumerate(file.strings(array))
        if text in _MARKS or (text in _CONTROL_MARKS and number < len(types) and types[number] == _CONTROL)
    }
    if "<|end|>" in places and any(places.keys() >= parts for parts in _PARTS):
        found.discard(places.pop("<|end|>"))
    return sorted(found | set(places.values()))
