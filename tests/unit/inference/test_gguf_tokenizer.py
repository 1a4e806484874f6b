# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files: the tokens and the text of the model's own tokenizer, without torch and transformers."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

import anyaccel.inference.text.gguf_conversion as conversion
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufFile
from anyaccel.inference.checkpoints.model_path import default_model_file
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_ends import gguf_ends
from anyaccel.inference.text.gguf_splits import SPLITS
from anyaccel.inference.text.gguf_tokenizer import write_tokenizer
from anyaccel.inference.text.tokenizer import TextTokenizer, load_text_tokenizer

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# What tokenizers disagree about: scripts, marks, digits of all kinds, white space in runs, contractions, code, emoji.
PIECES = (  # noqa: SIM905  a list of these would not be read by anybody
    "the quick Brown FOX don't I'M we'LL they'RE 'tis 12345 007 3.14159 1,000,000 x=1; def foo(bar): return "
    "{'a':[1]} /* */ http://a.b/c?d=e#f $100 50% a_b-c CamelCaseWORD HTTPServer naïve cafe\u0301 Straße ǅungla "
    "Ελληνικά Привет 你好世界 日本語カタカナ 안녕하세요 مرحبا١٢٣ שלום नमस्ते ไทย \u1780\u17b6 ① Ⅻ ½ ² ٣٤ ﬁ Ａｂ１ "
    "🚀🔥 \U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 。！？ … — «» ``` ||| "
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> \x00 \x7f \ufeff \u200b \U0010ffff \ue000"
).split(" ")
SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", " \n ", "\r\n", "\r", " " * 9, "\u00a0", "\u3000", "\u2028", "")
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(SPACES)), max_size=20).map("".join),
)


def varied_texts(count: int) -> list[str]:
    rng = random.Random(0)
    found = ["", *PIECES, *(left + "a" + right for left in SPACES for right in SPACES)]
    while len(found) < count:
        if rng.random() < 0.3:
            block = rng.choice(
                (0x20, 0xA0, 0x370, 0x400, 0x590, 0x900, 0x1E00, 0x2000, 0x2150, 0x3040, 0x4E00, 0x1F300)
            )
            found.append("".join(chr(block + rng.randrange(96)) for _ in range(rng.randint(1, 20))))
        else:
            found.append("".join(rng.choice(PIECES) + rng.choice(SPACES) for _ in range(rng.randint(1, 12))))
    return found


def write_file(
    path: Path, kind: str, tokens: list[str], types: list[int] | None = None, *, name: str = "llama", **more: Any
) -> Path:
    """A GGUF file that has a tokenizer and nothing else; `more` are keys below tokenizer.ggml."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_string("tokenizer.ggml.model", kind)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    if types is not None:
        writer.add_array("tokenizer.ggml.token_type", types)
    for key, value in more.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(file: Path, folder: Path) -> tokenizers.Tokenizer:
    folder.mkdir(exist_ok=True)
    write_tokenizer(file, folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def assert_same(ours: tokenizers.Tokenizer, other: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == other.encode(text, add_special_tokens=False).ids, repr(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip), repr(text)


# A vocabulary of bytes with merges, learned from the texts here, in which other cuts give other tokens: pieces are not
# cut at all while it is learned, so that there are tokens across every kind of border.


@pytest.fixture(scope="module")
def byte_merges() -> tuple[list[str], list[str]]:
    """Tokens and merges."""
    from tokenizers import trainers

    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [text for text in varied_texts(1500) if "<" not in text]
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
        ),
    )
    made = json.loads(learner.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in made["merges"]]
    return sorted(made["vocab"], key=made["vocab"].get), merges


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]


def byte_file(path: Path, byte_merges: tuple[list[str], list[str]], pre: str, **more: Any) -> Path:
    tokens, merges = byte_merges
    types = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED]
    first = len(tokens)
    ids = {"bos_token_id": first + 1, "eos_token_id": first + 2, "padding_token_id": first}
    return write_file(path, "gpt2", tokens + SPECIAL, types, pre=pre, merges=merges, **(ids | more))


def reference(tokens: list[str], merges: list[str], pre: Any, normalizer: Any = None, **more: Any) -> Any:
    """The same put together with the classes of `tokenizers`."""
    made = tokenizers.Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate([*tokens, *SPECIAL])},
            [tuple(merge.split(" ")) for merge in merges],
            **more,
        )
    )
    made.pre_tokenizer, made.normalizer, made.decoder = pre, normalizer, decoders.ByteLevel()
    made.add_special_tokens(SPECIAL[:3])
    made.add_tokens([tokenizers.AddedToken(SPECIAL[3], normalized=False)])
    return made


def digits_and_bytes() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def falcon() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


def of_transformers(module: str, kind: str) -> Callable[[], Any]:
    """The parts of transformers' own class for a family."""

    def parts() -> Any:
        import importlib

        found = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
        return found(vocab={"<unk>": 0, "<|endoftext|>": 1}, merges=[]).backend_tokenizer

    return parts


OWN: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (digits_and_bytes, None, False),
    "starcoder": (digits_and_bytes, None, False),
    "falcon": (falcon, None, False),
}
FAMILIES = {
    "qwen2": ("qwen2", "Qwen2Tokenizer"),
    "qwen35": ("qwen3_5", "Qwen3_5Tokenizer"),
    "command-r": ("cohere", "CohereTokenizer"),
    "olmo": ("gpt_neox", "GPTNeoXTokenizer"),
    "mpt": ("gpt_neox", "GPTNeoXTokenizer"),
}


@pytest.mark.parametrize("pre", [*OWN, *FAMILIES])
def test_tokens_are_those_of_the_family(pre: str, byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    ours = converted(byte_file(tmp_path / "a.gguf", byte_merges, pre), tmp_path / "out")
    if pre in OWN:
        make, normalizer, ignore = OWN[pre]
        other = reference(*byte_merges, make(), normalizer, ignore_merges=ignore)
    else:
        family = of_transformers(*FAMILIES[pre])()
        other = reference(*byte_merges, family.pre_tokenizer, family.normalizer)
    assert_same(ours, other, varied_texts(800))


@pytest.mark.parametrize("pre", ["smollm", "falcon"])
def test_any_text_has_the_tokens_of_the_family(
    pre: str, byte_merges: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    ours = converted(byte_file(tmp_path / "a.gguf", byte_merges, pre), tmp_path / "out")
    other = reference(*byte_merges, OWN[pre][0]())

    @hypothesis.given(text=TEXTS)
    @hypothesis.settings(max_examples=100, database=None)
    def run(text: str) -> None:
        assert_same(ours, other, [text])

    run()


# Where one cut ends and the next begins, in the words of the models' own tokenizer.json.
CUTS = {
    "gpt-2": ("I'm 1234  x", ["I", "'m", "Ġ1234", "Ġ", "Ġx"]),
    "smollm": ("a 12  3", ["a", "Ġ", "1", "2", "ĠĠ", "3"]),
    "llama-bpe": ("I'M 1234567 x\n\n y", ["I", "'M", "Ġ", "123", "456", "7", "Ġx", "ĊĊ", "Ġy"]),
    "qwen2": ("I'M 123.\n  y", ["I", "'M", "Ġ", "1", "2", "3", ".Ċ", "Ġ", "Ġy"]),
    "tekken": ("HTTPServer camelCase 12/\n", ["HTTPServer", "Ġcamel", "Case", "Ġ", "1", "2", "/Ċ"]),
    "gpt-4o": ("HTTPServer's camelCase 1234", ["HTTPServer's", "Ġcamel", "Case", "Ġ", "123", "4"]),
    "deepseek-llm": ("ab 12\n c!", ["ab", "Ġ", "1", "2", "Ċ", "Ġc", "!"]),
    "deepseek-coder": ("ab_c 12", ["ab", "_", "c", "Ġ", "1", "2"]),
    "deepseek-v3": ("ab_c 1234 你a", ["ab", "_c", "Ġ", "123", "4", "Ġ", "ä½ł", "a"]),
    "falcon": ("ab... 12345", ["ab", "...", "Ġ", "123", "45"]),
    "bloom": ("ab, cd 12", ["ab", ",", "Ġcd", "Ġ12"]),
    "viking": ("ab, cd 12", ["ab", ",", "Ġcd", "Ġ", "1", "2"]),
    "bailingmoe": ("it's 12\n\n", ["it", "'s", "Ġ", "1", "2", "ĊĊ"]),
    "seed-coder": ("a !\n b", ["a", "Ġ!", "Ċ", "Ġb"]),
    "minicpm5": ("a 1234", ["a", "Ġ", "123", "4"]),
}


@pytest.mark.parametrize("pre", CUTS)
def test_cuts(pre: str, byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    ours = converted(byte_file(tmp_path / "a.gguf", byte_merges, pre), tmp_path / "out")
    text, pieces = CUTS[pre]
    assert [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_cuts_are_those_that_transformers_has_for_the_same_names() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    texts = varied_texts(400)
    shared = SPLITS.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"} <= shared
    seen = set()
    for name in sorted(shared):
        expression = mapping.GGUF_PRE_TOKENIZER_SPLITS[name]
        mine = SPLITS[name].steps[0]["pattern"]["Regex"]
        if (expression, mine) in seen:
            continue
        seen.add((expression, mine))
        theirs = pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        ours = pre_tokenizers.Split(tokenizers.Regex(mine), "isolated")
        for text in texts:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), (name, text)


@pytest.mark.parametrize("pre", {repr(split): name for name, split in SPLITS.items()}.values())
def test_every_way_to_cut_loses_nothing(pre: str, byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    ours = converted(byte_file(tmp_path / "a.gguf", byte_merges, pre), tmp_path / "out")
    for text in varied_texts(300)[::3]:
        ids = ours.encode(text, add_special_tokens=False).ids
        kept = unicodedata.normalize("NFC", text) if SPLITS[pre].nfc else text
        assert ours.decode(ids, skip_special_tokens=False) == kept


def test_pieces_that_are_tokens_are_left_whole_where_the_family_says_so(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    for pre, wanted in (("llama-bpe", ["abc"]), ("dbrx", ["ab", "c"])):
        file = write_file(tmp_path / "a.gguf", "gpt2", tokens, [NORMAL] * 6, pre=pre, merges=["a b", "b c"])
        assert converted(file, tmp_path / "out").encode("abc", add_special_tokens=False).tokens == wanted


def test_begin_and_end(byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """As the file says; else as the family does."""
    for number, (pre, more, begins, ends) in enumerate(
        [
            ("smollm", {}, False, False),
            ("llama-bpe", {}, True, False),
            ("llama-bpe", {"add_bos_token": False}, False, False),
            ("smollm", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ]
    ):
        file = byte_file(tmp_path / "a.gguf", byte_merges, pre, chat_template="{{ bos_token }}!", **more)
        folder = tmp_path / str(number)
        made = converted(file, folder)
        text = TextTokenizer(folder)
        plain = made.encode("hello", add_special_tokens=False).ids
        bos, eos = (made.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
        wanted = [bos] * begins + plain + [eos] * ends
        assert text.encode("hello") == made.encode("hello").ids == wanted
        assert text.decode(wanted) == "hello"
        assert text.special == {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
        assert text.end_tokens == [eos]
        assert text.chat([]) == [bos, made.token_to_id("!")]


def test_kinds_of_tokens(byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """Control and user-defined tokens are found in a text, unused ones are not; control ones are left out of one."""
    tokens, merges = byte_merges
    file = write_file(
        tmp_path / "a.gguf",
        "gpt2",
        [*tokens, "<|c|>", "<u>", "[PAD1]", "", "  "],
        [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED, UNUSED, UNUSED, USER_DEFINED],
        pre="gpt-2",
        merges=[*merges, "no token"],
    )
    made = converted(file, tmp_path / "out")
    first = len(tokens)
    ids = made.encode("<|c|><u>[PAD1]  ", add_special_tokens=False).ids
    assert ids[:2] == [first, first + 1]
    assert ids[-1] == first + 4
    assert first + 2 not in ids
    assert made.decode(ids) == "<u>[PAD1]  "
    assert made.get_vocab_size() == first + 5
    assert made.id_to_token(first + 3) == f"[EMPTY_{first + 3}]"


# SentencePiece.


@pytest.fixture(scope="module")
def scored() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a vocabulary like Llama's, learned from the texts here."""
    from tokenizers import trainers

    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    texts = [text for text in varied_texts(1200) if "<" not in text and text.isprintable()]
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1200, limit_alphabet=150, show_progress=False))
    made = json.loads(learner.to_str())["model"]
    learned = [a + b for a, b in (pair if isinstance(pair, list) else pair.split(" ") for pair in made["merges"])]
    learned = list(dict.fromkeys(learned))
    characters = sorted(token for token in made["vocab"] if len(token) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *characters]
    scores = [0.0] * 259 + [-float(number) for number in range(len(learned) + len(characters))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(learned) + len(characters))
    return [*tokens, "<|user|>", "<tool>"], [*scores, -1000.0, -1000.0], [*types, CONTROL, USER_DEFINED]


def sentence_piece(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Its algorithm: the neighbours whose token has the highest score become one, the leftmost of them first."""
    ids = {token: number for number, token in enumerate(tokens)}
    parts = list(text)
    while True:
        made = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not made:
            break
        at = -max(made)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_give_the_tokens_of_sentence_piece(
    prefix: bool, scored: tuple[list[str], list[float], list[int]], tmp_path: Path
) -> None:
    """With a space before the text, as Llama's, and without, as Gemma's."""
    tokens, scores, types = scored
    more = {} if prefix else {"add_space_prefix": False}
    file = write_file(tmp_path / "a.gguf", "llama", tokens, types, pre="default", scores=scores, **more)
    made = converted(file, tmp_path / "out")
    for text in varied_texts(700):
        if not text or "<" in text:
            continue
        ids = made.encode(text, add_special_tokens=False).ids
        assert ids == sentence_piece(("▁" if prefix else "") + text.replace(" ", "▁"), tokens, scores), repr(text)
        assert made.decode(ids) == text.replace("▁", " ")
    assert made.encode("a").ids[0] == 1


@pytest.mark.parametrize(("name", "strips"), [("llama", False), ("phi3", True)])
def test_special_tokens_in_text_of_sentence_piece(
    name: str, strips: bool, scored: tuple[list[str], list[float], list[int]], tmp_path: Path
) -> None:
    tokens, scores, types = scored
    file = write_file(tmp_path / "a.gguf", "llama", tokens, types, scores=scores, name=name)
    made = converted(file, tmp_path / "out")
    user, tool = len(tokens) - 2, len(tokens) - 1
    after = sentence_piece("▁the" if strips else "▁▁the", tokens, scores)
    ids = made.encode("<|user|> the<tool>", add_special_tokens=False).ids
    assert ids == [user, *after, tool]
    assert made.decode(ids).strip() == "the<tool>"


@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_transformers_makes_the_same_of_the_file(
    architecture: str, scored: tuple[list[str], list[float], list[int]], tmp_path: Path
) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    tokens, scores, types = scored
    more: dict[str, Any] = {"add_space_prefix": False} if architecture == "gemma2" else {}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    file = tmp_path / "a.gguf"
    write_file(file, "llama", tokens, types, scores=scores, name=architecture, **ids, **more)
    ours = converted(file, tmp_path / "out")
    theirs, _ = mapping.convert_gguf_tokenizer(*mapping.get_gguf_tokenizer(str(file))[:2])
    for text in varied_texts(500):
        if "<" in text and architecture == "phi3":
            continue  # it does not know that the tokens take white space
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids, (
            text
        )


def test_merges_in_the_file_come_before_scores(tmp_path: Path) -> None:
    tokens, types = ["<unk>", "a", "b", "c", "▁", "ab", "bc"], [UNKNOWN] + [NORMAL] * 6
    more: dict[str, Any] = {"scores": [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0]}
    for merges, wanted in (({}, ["▁", "ab", "c"]), ({"merges": ["b c", "a b"]}, ["▁", "a", "bc"])):
        file = write_file(tmp_path / "a.gguf", "llama", tokens, types, **more, **merges, add_bos_token=False)
        assert converted(file, tmp_path / "out").encode("abc").tokens == wanted


# The real one.


def test_real_file_has_the_tokens_of_the_model(tmp_path: Path) -> None:
    """Of SmolLM2's own tokenizer: what transformers makes of the file, with the cuts at digits that it leaves out."""
    pytest.importorskip("transformers")
    ours = converted(default_model_file(), tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    conversion._tokenizer_by_transformers(default_model_file(), tmp_path / "theirs")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    texts = varied_texts(1000)
    without = [text for text in texts if not any(unicodedata.category(each)[0] == "N" for each in text)]
    assert len(without) > 300
    assert_same(ours, theirs, without)
    theirs.pre_tokenizer = digits_and_bytes()
    assert_same(ours, theirs, texts)
    assert (tmp_path / "ours" / "chat_template.jinja").read_text() == (
        tmp_path / "theirs" / "chat_template.jinja"
    ).read_text()
    one, two = TextTokenizer(tmp_path / "ours"), TextTokenizer(tmp_path / "theirs")
    assert one.special == two.special
    assert one.end_tokens == two.end_tokens
    rng = random.Random(1)
    for _ in range(300):  # tokens that are no text together
        ids = [rng.randrange(49152) for _ in range(rng.randint(1, 8))]
        assert one.decode(ids) == two.decode(ids)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """`anyaccel quantize` puts these files into a folder for everybody."""
    transformers = pytest.importorskip("transformers")
    ours = converted(default_model_file(), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 49152}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in varied_texts(600):
        ids = ours.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False)
    message = [{"role": "user", "content": "Hi 12  3"}]
    chat = theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat == TextTokenizer(tmp_path / "out").chat(message)


# What is not known, and what is damaged.


def test_what_is_not_known_is_left_to_transformers(
    byte_merges: tuple[list[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    file = byte_file(tmp_path / "a.gguf", byte_merges, "nobody-knows")
    lines: list[str] = []
    made = load_text_tokenizer(file, lines.append)
    assert lines == [
        f"no rules for cutting a text that GGUF calls 'nobody-knows' ({file}); transformers converts it, once"
    ]
    assert made.decode(made.encode("the quick fox")) == "the quick fox"
    load_text_tokenizer(file, lines.append)
    assert len(lines) == 1
    known = byte_file(tmp_path / "b.gguf", byte_merges, "smollm")
    load_text_tokenizer(known, lines.append)
    assert len(lines) == 1


def test_what_nobody_reads_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    file = write_file(tmp_path / "a.gguf", "bert", ["[UNK]", "a"], [NORMAL, NORMAL])
    with pytest.raises(Unsupported, match="GGUF tokenizers of kind 'bert'"):
        write_tokenizer(file, tmp_path)
    with pytest.raises(ModelError, match=r"a\.gguf: transformers cannot read this GGUF file's tokenizer"):
        load_text_tokenizer(file, lambda line: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Exception, match="pip install 'anyaccel"):
        load_text_tokenizer(file, lambda line: None)
    left = [path.name for path in (tmp_path / "cache" / "tokenizers").iterdir() if not path.name.endswith(".lock")]
    assert left == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"types": [NORMAL]}, "token_type is not one number for each token"),
        ({"scores": [1.0]}, "scores is not one number for each token"),
        ({"kind": "gpt2", "pre": "gpt-2"}, "lack tokenizer.ggml.merges"),
        ({"tokens": []}, "lack tokenizer.ggml.tokens"),
    ],
)
def test_damage_is_named(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"kind": "llama", "tokens": ["a", "b"], "types": [NORMAL, NORMAL], **more}
    if not given["tokens"]:
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_string("tokenizer.ggml.model", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        write_file(tmp_path / "a.gguf", **given)
    with pytest.raises(ModelError, match=message):
        write_tokenizer(tmp_path / "a.gguf", tmp_path)


def test_an_id_that_is_written_for_none_is_passed_over(
    byte_merges: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    file = byte_file(tmp_path / "a.gguf", byte_merges, "gpt-2", bos_token_id=(1 << 32) - 1, add_bos_token=True)
    made = converted(file, tmp_path / "out")
    assert made.encode("a").ids == made.encode("a", add_special_tokens=False).ids
    assert "bos_token" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], database=None
)
def test_damage_anywhere_is_an_error_of_ours(data: st.DataObject, tmp_path: Path) -> None:
    file = write_file(
        tmp_path / "a.gguf",
        "gpt2",
        ["a", "b", "ab", "<s>"],
        [NORMAL, NORMAL, NORMAL, CONTROL],
        pre="gpt-2",
        merges=["a b"],
        bos_token_id=3,
    )
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        made = converted(file, tmp_path / "out")
    except ModelError as error:
        assert str(file) in str(error)
        return
    made.encode("ab")


def test_a_damaged_conversion_is_made_again(
    byte_merges: tuple[list[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to a file of the cache, also when it keeps its size: the tokens stay the same."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    file = byte_file(tmp_path / "a.gguf", byte_merges, "smollm", bos_token_id=0, add_bos_token=True)
    folder = conversion.converted_tokenizer(file)
    whole = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "anyaccel.json"} <= set(whole)
    wanted = load_text_tokenizer(file).encode("the quick fox")
    for name, content in whole.items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:middle], b"[" * 100_000, b"\xff" * len(content), None):
            if damaged is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(damaged)
            assert load_text_tokenizer(file).encode("the quick fox") == wanted
            assert {each.name: each.read_bytes() for each in folder.iterdir()} == whole
    made = (folder / "tokenizer.json").stat().st_ino
    load_text_tokenizer(file)
    assert (folder / "tokenizer.json").stat().st_ino == made  # what is whole is not made again


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["a", "<|im_end|>", "<|endoftext|>", "b"], {"eos_token_id": 1}, [1, 2]),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "x"], {"eos_token_id": 2, "eot_token_id": 0}, [0, 1, 2]),
        (["a", "b", "c"], {"eos_token_id": 2, "eot_token_id": 1, "eom_token_id": 0}, [0, 1, 2]),
        (["a", "b"], {"eos_token_id": (1 << 32) - 1}, []),
        # HTML's marks are text, unless the file says otherwise.
        (["a", "</s>", "<eos>"], {}, []),
        (["a", "</s>", "<eos>"], {"token_type": [NORMAL, CONTROL, CONTROL]}, [1, 2]),
        # gpt-oss and Solar Open: <|end|> ends a part of an answer, such as its thoughts.
        (["<|return|>", "<|call|>", "<|end|>"], {"eos_token_id": 0, "eot_token_id": 2}, [0, 1]),
        (["<|flush|>", "<|calls|>", "<|end|>"], {"eos_token_id": 2}, [0, 1]),
        (["<|end|>", "<|return|>"], {}, [0, 1]),
        (["a", "<|fim_pad|>", "<|file_sep|>", "b"], {"fim_rep_token_id": 3}, [1, 2, 3]),
    ],
)
def test_tokens_that_end_an_answer(tokens: list[str], named: dict[str, Any], ends: list[int], tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.gguf", "gpt2", tokens, **named)
    assert gguf_ends(GgufFile(file)) == ends


def test_the_template_for_tools_is_kept(byte_merges: tuple[list[str], list[str]], tmp_path: Path) -> None:
    templates = {"chat_template": "plain", "chat_template.tool_use": "{{ tools | length }} tools"}
    converted(byte_file(tmp_path / "a.gguf", byte_merges, "smollm", **templates), tmp_path / "made")
    tokenizer = TextTokenizer(tmp_path / "made")
    assert (tokenizer.render([]), tokenizer.render([], [{}])) == ("plain", "1 tools")
