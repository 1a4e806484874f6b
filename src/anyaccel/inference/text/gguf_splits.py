# SPDX-License-Identifier: Apache-2.0
"""How the byte-level tokenizers of GGUF files cut a text: what each name in `tokenizer.ggml.pre` stands for.

GGUF has only the name. The names are those of llama.cpp's convert_hf_to_gguf_update.py. What stands here is what the
tokenizer.json of the model has that a name was made for, as far as it is known. The rarer names follow llama.cpp's own
expressions, which differ from those where its engine lacks something, and which do not normalise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Step = dict[str, Any]


@dataclass(frozen=True)
class Splits:
    """One way to cut a text.

    Attributes:
        steps: pre-tokenizers, as tokenizer.json has them; the pieces are bytes after them.
        nfc: the text is brought into Unicode's composed form first.
        ignore_merges: a piece that is a token is one, whatever the merges would make of it.
        bos: a text begins with the token for that, if the file does not say.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


def _split(expression: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _digits(individual: bool) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def _byte_level(cuts: bool) -> Step:
    """Bytes as characters, after GPT-2's own cuts or without any."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cuts}


def _at(*steps: str | Step) -> Splits:
    """Cuts by regular expressions and other steps, then bytes."""
    return Splits((*(_split(each) if isinstance(each, str) else each for each in steps), _byte_level(False)))


def _characters(ranges: str) -> str:
    """Inside of a character class: hexadecimal ranges of code points, which no editor can mix up."""
    return "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in ranges.split())


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
# A word may go from upper to lower case, and not back.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED, _CAPITALS = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_TEKKEN = rf"{_CASED}|{_CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED}{_SUFFIX}?|{_CAPITALS}{_SUFFIX}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_MINICPM5 = rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"
_BLOOM = rf" ?[^(\s|.,!?{_characters('2026 3002 ff0c 3001 964 6d4 60c')})]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN_AND_KANA = f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+"
_ASIAN = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_DEEPSEEK_SIGNS = rf"\s?[{_characters('21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}]+"
# Letters of scripts with two cases.
_DEEPSEEK_LETTERS = _characters(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)

_gpt2 = Splits((_byte_level(True),))
_digit_by_digit = Splits((_digits(True), _byte_level(True)))
_qwen2 = _at(_QWEN2)
_llama3 = _at(_LLAMA3)

_KINDS: tuple[tuple[str, Splits], ...] = (
    ("gpt-2 phi-2 exaone4 gigachat jais mellum a.x-4.0 trillion granite-docling", _gpt2),
    ("mpt olmo", replace(_gpt2, nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _digit_by_digit),
    ("command-r", replace(_digit_by_digit, nfc=True)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        replace(_llama3, ignore_merges=True, bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", _llama3),
    ("glm4", replace(_llama3, ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen megrez stablelm2", replace(_qwen2, nfc=True)),
    ("kormo hunyuan solar-open grok-2", _qwen2),
    ("qwen35", replace(_at(_QWEN35), nfc=True)),
    ("tekken", replace(_at(_TEKKEN), ignore_merges=True, bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", _at(_GPT4O)),
    ("deepseek-llm", _at(r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+$", _ASIAN, _digits(True))),
    ("deepseek-coder", _at(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _digits(True))),
    ("deepseek-v3 hunyuan-dense joyai-llm", _at(r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_V3)),
    ("bloom poro-chat gpt3-finnish", _at(_BLOOM)),
    ("viking", _at(_BLOOM, _digits(True))),
    (
        "falcon",
        Splits(
            (
                {"type": "Punctuation", "behavior": "Contiguous"},
                _byte_level(True),
                _digits(False),
                _split("[0-9][0-9][0-9]"),
            )
        ),
    ),
    ("bailingmoe bailingmoe2 llada-moe", _at(_BAILING)),
    ("seed-coder", _at(_SEED)),
    ("minicpm5", replace(_at(r"\p{N}{1,3}", _MINICPM5), ignore_merges=True)),
)

SPLITS: dict[str, Splits] = {name: splits for names, splits in _KINDS for name in names.split()}
