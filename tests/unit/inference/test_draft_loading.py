# SPDX-License-Identifier: Apache-2.0
"""Draft models from files: of the same tokens, of others through the text, of none; from commands and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import anyaccel
import family_cases
import native_models
from anyaccel.cli import generate as command
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import generate_tokens
from anyaccel.inference.native.draft import TextBridge, check_draft_path, same_tokens
from anyaccel.inference.text.tokenizer import TextTokenizer

VOCAB = 131
IDS = torch.tensor([[5, 17, 99, 3, 64], [8, 9, 8, 9, 8]])
TEXT = ["the cat sat on the mat and the dog sat on the cat", "naïve café, 名前 and 😀 faces", "a b c d e f g h i j k"]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    native_models.always_drafting(monkeypatch)


def save_tokenizer(folder: Path, prefix: str = "w") -> None:
    words = Tokenizer(models.WordLevel({f"{prefix}{token}": token for token in range(VOCAB)}, unk_token=f"{prefix}0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def save(folder: Path, seed: int = 0, prefix: str = "w", **more: Any) -> Path:
    model = family_cases.build("llama-64", seed, positions=256)
    model.save_pretrained(folder)
    save_tokenizer(folder, prefix)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None} | more))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    prompt = "w5 w17 w99 w3 w64"
    assert (
        command.main([prompt, "--json", "--max-new-tokens", "60", "--threads", "1", "--dtype", "fp32", *arguments]) == 0
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_generate_with_a_draft_model(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Itself in int4, and one with other words for the same numbers, which goes through the text."""
    plain = run(capsys, "--model", str(target))
    found = run(capsys, "--model", str(target), "--draft", str(target))
    assert found["tokens"] == plain["tokens"] and plain["drafted_tokens"] == 0
    assert 0 < found["accepted_tokens"] <= found["drafted_tokens"]
    other = save(tmp_path, prefix="v")
    assert command.main(["w5 w17", "--max-new-tokens", "30", "--model", str(target), "--draft", str(other)]) == 0
    assert f"drafts: {tmp_path.name} has other tokens: they go through the text" in capsys.readouterr().err
    found = run(capsys, "--model", str(target), "--draft", str(other), "--temperature", "0.7")
    assert found["tokens"] == run(capsys, "--model", str(target), "--temperature", "0.7")["tokens"]


def test_a_draft_of_another_number_of_tokens(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that stand for nothing at the end of one vocabulary do not matter."""
    model = family_cases.build("llama-64", 0, positions=256)
    model.resize_token_embeddings(VOCAB + 29)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    found = run(capsys, "--model", str(target), "--draft", str(tmp_path))
    assert found["tokens"] == run(capsys, "--model", str(target))["tokens"]
    assert found["drafted_tokens"] > 0


def test_what_is_no_draft_model(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(draft: Path, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            run(capsys, "--model", str(target), "--draft", str(draft))

    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, ModelError, "empty: not a Hugging Face model folder")
    head = save(tmp_path / "head", architectures=["LlamaForCausalLMEagle"])
    refused(head, UsageError, "LlamaForCausalLMEagle is a head that guesses from the hidden states of its model")
    third = save(tmp_path / "third", architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    refused(third, ModelError, "hidden states behind layers .* of a model with 2|has no tensor 'fc.weight'")
    bare = save(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    refused(bare, ModelError, "tokenizer.json: missing")
    cut = save(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(cut, ModelError, "model.safetensors")
    bert = save(tmp_path / "bert", model_type="rwkv", architectures=["RwkvForCausalLM"])
    refused(bert, UsageError, "the native runtime has no .* and a draft model needs it")


def test_engines_and_generate_tokens(target: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "threads": 1}
    plain = anyaccel.init_inference(target, **options)
    want = list(generate_tokens(plain, IDS[0], max_new_tokens=50))
    for draft in (target, str(target), anyaccel.init_inference(target, **options)):
        engine = anyaccel.init_inference(target, draft=draft, **options)
        result = anyaccel.inference.Generation()
        assert list(generate_tokens(engine, IDS[0], max_new_tokens=50, result=result)) == want
        assert result.drafted > 0
        result = anyaccel.inference.Generation()
        assert list(generate_tokens(engine, IDS[0], max_new_tokens=50, draft_tokens=0, result=result)) == want
        assert result.drafted == 0
        assert torch.equal(engine.generate(IDS, max_new_tokens=40), plain.generate(IDS, max_new_tokens=40))
    with pytest.raises(UsageError, match="draft=Linear: must be the path of a model, or a native engine"):
        anyaccel.init_inference(target, draft=torch.nn.Linear(2, 2), **options)
    with pytest.raises(UsageError, match="draft='x' needs the native runtime, not runtime='plain'"):
        anyaccel.init_inference(target, draft="x", runtime="plain", dtype="fp32")
    with pytest.raises(ModelError, match="no-such"):
        anyaccel.init_inference(target, draft=tmp_path / "no-such", **options)
    smaller = family_cases.build("llama-64", 0)
    smaller.resize_token_embeddings(VOCAB - 3)
    smaller.save_pretrained(tmp_path / "smaller")
    with pytest.raises(UsageError, match="the draft model has 128 tokens and the model 131"):
        anyaccel.init_inference(target, draft=anyaccel.init_inference(tmp_path / "smaller", **options), **options)


@pytest.mark.parametrize("sample", [False, True])
def test_an_assistant_of_generate_drafts_natively(
    sample: bool, caplog: pytest.LogCaptureFixture, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyaccel.inference.hf import native_generate

    monkeypatch.setattr(native_generate, "_warned_of", set())
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": sample, "pad_token_id": 0, "num_return_sequences": 1}
    if sample:
        options |= {"num_return_sequences": 3, "seed": 5, "temperature": 0.8}
    engine = anyaccel.init_inference(family_cases.build("llama", positions=256), dtype="fp32", threads=1)
    assistant = anyaccel.init_inference(family_cases.build("llama", positions=256), dtype="fp32", threads=1)
    want = engine.generate(IDS, **options)
    for given in (assistant, assistant.module):
        assert torch.equal(engine.generate(IDS, assistant_model=given, **options), want)
        assert engine.native is not None and engine.native.draft is None
    assert "assistant_model" not in caplog.text
    other = anyaccel.init_inference(target, dtype="fp32", threads=1)
    stopped = engine.generate(IDS, assistant_model=assistant, **options | {"eos_token_id": int(want[0, 12])})
    assert torch.equal(stopped, engine.generate(IDS, **options | {"eos_token_id": int(want[0, 12])}))
    if not sample:  # its own drafts, with a note, where the assistant is none of ours
        theirs = family_cases.build("llama", positions=256)
        got = engine.generate(IDS[:1], assistant_model=theirs, **options)
        assert torch.equal(got, want[:1])
        assert "assistant_model is not part of the native loop" in caplog.text
    assert other.native is not None and other.native.draft is None


def trained(folder: Path, size: int, text: list[str]) -> TextTokenizer:
    folder.mkdir()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def test_tokens_through_the_text(tmp_path: Path) -> None:
    own = trained(tmp_path / "own", 300, TEXT[:1])
    other = trained(tmp_path / "other", 290, TEXT[1:])
    assert not same_tokens(own, other, 290) and same_tokens(own, own, 290)
    for text in TEXT:
        bridge = TextBridge(own, other)
        tokens = own.encode(text)
        for count in range(1, len(tokens) + 1):  # as an answer grows
            found = bridge.to_draft(tokens[:count])
            begun = own.decode(tokens[:count])
            assert other.decode(found) == ("" if begun.endswith("\ufffd") else begun)
        assert bridge.to_draft(tokens) == found
        half = len(tokens) // 2
        begun = own.decode(tokens[:half]).rstrip("\ufffd")
        before, said = other.encode(begun), other.encode(text[len(begun) :])
        back = TextBridge(own, other).from_draft(own.encode(begun), before, said)
        assert own.decode([*own.encode(begun), *back]) == text
    # An answer of another text in between, as in a batch, and one that goes another way.
    assert other.decode(bridge.to_draft(own.encode("a cat"))) == "a cat"
    assert other.decode(bridge.to_draft(own.encode("a b c x"))) == "a b c x"
    assert bridge.from_draft(own.encode("a"), other.encode("a"), []) == []
    assert bridge.to_draft([]) == []


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    for config in ({"model_type": "eagle"}, {"architectures": ["Glm4MoeMTPModel"]}, {"eagle_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="is a head that guesses"):
            check_draft_path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": 3}))
    check_draft_path(tmp_path)
