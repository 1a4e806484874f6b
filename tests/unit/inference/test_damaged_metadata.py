# SPDX-License-Identifier: Apache-2.0
"""Values of a model's files that contradict its tensors or vocabulary are told, with the file; none is passed over."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import fuzz_models
from anyaccel.errors import ModelError
from anyaccel.inference.families.gguf_models import open_gguf
from anyaccel.inference.generate import check_prompt
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_tokenizer import write_tokenizer
from anyaccel.inference.text.tokenizer import TextTokenizer, end_tokens, load_text_tokenizer
from fuzz_models import ARRAY, F32, HEAD_DIM, I32, TEXT, TOKENS, U32

ROWS = len(TOKENS)


def written(file: fuzz_models.Gguf, folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(file.content())
    return folder / "model.gguf"


# Kind of file, key, value, what is said.
WRONG: list[tuple[str, str, tuple[int, Any], str]] = [
    *(
        (kind, "rope.dimension_count", (U32, 0), f"rope.dimension_count=0 is not a whole number of 2 to {HEAD_DIM}")
        for kind in ("llama", "granite", "phi3", "stablelm", "gemma3")
    ),
    *(
        (kind, "rope.dimension_count", (U32, count), f"rope.dimension_count={count} is not")
        for kind in ("llama", "granite", "phi3", "stablelm", "gemma3")
        for count in (3, HEAD_DIM - 1, HEAD_DIM + 2, 2 * HEAD_DIM)
    ),
    # These rotate whole heads only.
    ("granite", "rope.dimension_count", (U32, HEAD_DIM - 2), f"=6, but this architecture rotates all {HEAD_DIM}"),
    ("gemma3", "rope.dimension_count", (U32, HEAD_DIM - 2), f"=6, but this architecture rotates all {HEAD_DIM}"),
    (
        "llama",
        "attention.value_length",
        (U32, 2 * HEAD_DIM),
        "attention.value_length=16, but keys have a length of 8",
    ),
    ("granite", "attention.value_length", (U32, 0), "attention.value_length=0 is not"),
    ("granite", "attention.key_length", (U32, HEAD_DIM // 2), "'blk.0.attn_q.weight' of shape (32, 32) has not 4 x 4"),
    ("llama", "vocab_size", (U32, ROWS - 1), f"vocab_size={ROWS - 1} is not a whole number of {ROWS} to {ROWS}"),
    ("gpt2", "vocab_size", (U32, 1 << 20), "vocab_size=1048576 is not"),
    ("llama", "rope.scaling.type", (TEXT, "foo"), "rope.scaling.type='foo' is none of none, linear, yarn, longrope"),
    ("granite", "rope.scaling.type", (TEXT, "longrope"), "'longrope', but the file has no 'rope_factors_long.weight'"),
    ("granite", "rope.scaling.factor", (F32, 0.0), "rope.scaling.factor=0.0 is not a number above 0"),
]


@pytest.mark.parametrize(("kind", "key", "value", "said"), WRONG)
def test_metadata_that_contradict_the_file_are_refused(
    kind: str, key: str, value: tuple[int, Any], said: str, tmp_path: Path
) -> None:
    file = fuzz_models.healthy_gguf(kind)
    file.pairs[f"{kind}.{key}"] = value
    path = written(file, tmp_path)
    with pytest.raises(ModelError) as error:
        Plan(read_checkpoint(path), Precision(None), 0, 1)
    assert not isinstance(error.value, Unsupported)  # nobody has to import transformers to say it
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("count", [ROWS - 5, ROWS + 2])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(count: int, tmp_path: Path) -> None:
    file = fuzz_models.healthy_gguf("llama")
    tokens = [*TOKENS, "x", "y"][:count]
    file.pairs["tokenizer.ggml.tokens"] = (ARRAY, (TEXT, tokens))
    with pytest.raises(ModelError, match=f"tokens has {count} tokens, but 'token_embd.weight' {ROWS} rows"):
        open_gguf(written(file, tmp_path))


def test_a_factor_without_a_type_scales_linearly(tmp_path: Path) -> None:
    """As in llama.cpp, which also knows the factor's former name; it was passed over."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        file = fuzz_models.healthy_gguf("granite")
        file.pairs[f"granite.{key}"] = (F32, 4.0)
        assert open_gguf(written(file, tmp_path)).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        file.add(rope__scaling__type="none")
        assert "rope_scaling" not in open_gguf(written(file, tmp_path)).config
    file = fuzz_models.healthy_gguf("granite")
    file.add(rope__scaling__type="linear")
    assert "rope_scaling" not in open_gguf(written(file, tmp_path)).config


@pytest.mark.parametrize("kind", [-1, 7, 99])
def test_kinds_of_tokens_are_checked(kind: int, tmp_path: Path) -> None:
    file = fuzz_models.healthy_gguf("llama")
    file.pairs["tokenizer.ggml.token_type"] = (ARRAY, (I32, [1] * (ROWS - 1) + [kind]))
    with pytest.raises(ModelError, match=rf"model\.gguf: tokenizer\.ggml\.token_type\[\d+\]={kind} is not"):
        write_tokenizer(written(file, tmp_path), tmp_path)


@pytest.mark.parametrize("number", [ROWS, 99999, (1 << 32) - 2])
def test_a_token_that_begins_texts_has_to_exist(number: int, tmp_path: Path) -> None:
    """Another one was put before each prompt."""
    file = fuzz_models.healthy_gguf("llama")
    file.pairs["tokenizer.ggml.bos_token_id"] = (U32, number)
    with pytest.raises(ModelError, match=rf"bos_token_id={number} is outside the vocabulary of {ROWS} tokens"):
        write_tokenizer(written(file, tmp_path), tmp_path)
    file.pairs["tokenizer.ggml.bos_token_id"] = (U32, (1 << 32) - 1)  # none
    write_tokenizer(written(file, tmp_path), tmp_path)


def test_an_end_that_never_comes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = {"vocab_size": 300}
    assert end_tokens({"eos_token_id": 300}, config, tmp_path) == []
    said = caplog.messages.pop()
    place = tmp_path / "generation_config.json"
    assert said == f"{place}: eos_token_id=300 is outside the vocabulary of 300 tokens: no text ends by it"
    caplog.clear()
    assert end_tokens({"eos_token_id": [2, 999]}, {"text_config": config}, tmp_path) == [2]
    assert caplog.messages == [f"{place}: eos_token_id=999 is outside the vocabulary of 300 tokens: no text ends by it"]
    caplog.clear()
    assert end_tokens({"eos_token_id": 300}, config, tmp_path, note=False) == []
    assert end_tokens({"eos_token_id": [2, 299, -1]}, config, tmp_path) == [2, 299]
    assert end_tokens({}, {"eos_token_id": 5}) == [5]
    assert not caplog.messages


def test_an_end_of_a_gguf_file_that_never_comes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = fuzz_models.healthy_gguf("llama")
    file.pairs["tokenizer.ggml.eos_token_id"] = (U32, 99999)
    path = written(file, tmp_path)
    opened = open_gguf(path)
    assert end_tokens(opened.generation_config, opened.config, path) == [2]  # </s>, which ends one by its text
    assert caplog.messages[-1].startswith(f"{path}: eos_token_id=99999 is outside the vocabulary of {ROWS} tokens")


# Messages name the file.


def test_what_is_wrong_in_a_folder_is_said_with_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    for name, place in (("generation_config", "generation_config.json"), ("config", "config.json")):
        given: dict[str, dict[str, Any]] = {"generation_config": {}, "config": {}}
        given[name] = {"eos_token_id": "x"}
        with pytest.raises(ModelError) as error:
            end_tokens(given["generation_config"], given["config"], folder)
        assert str(error.value).startswith(f"{folder / place}: eos_token_id='x' is not")
    with pytest.raises(ModelError) as error:
        check_prompt([1, 1000000], 1, ROWS, 0, TextTokenizer(folder).where)
    assert str(error.value).startswith(f"{folder / 'tokenizer.json'}: it gives token 1000000, outside")


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_wrong_chat_template_is_said_with_its_file(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text("{}")
    for template, what in (("{% for %}", "cannot be read"), ("{{ raise_exception('no') }}", "does not take this")):
        (folder / place).write_text(template if place.endswith("jinja") else json.dumps({"chat_template": template}))
        with pytest.raises(ModelError, match=what) as error:
            TextTokenizer(folder).chat([{"role": "user", "content": "a"}])
        assert str(error.value).startswith(f"{folder / place}: its chat template")


def test_a_missing_tokenizer_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, which took seconds to say it in many lines, is not asked."""
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as error:
        load_text_tokenizer(folder)
    assert str(error.value).startswith(f"{folder / 'tokenizer.json'}: missing, and the folder has no other tokenizer; ")
