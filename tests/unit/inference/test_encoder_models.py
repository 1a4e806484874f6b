# SPDX-License-Identifier: Apache-2.0
"""Encoders through `init_inference`, and in the places of models of transformers and sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

import anyaccel
import encoder_models
from anyaccel.errors import UsageError
from anyaccel.inference import add_to_sentence_transformers

TEXTS = ["the cat sat on the mat", "rain", "the rain in spain falls on the river bank", "a dog"]


def padded(tokenizer: Any, side: str = "right") -> Any:
    tokenizer.padding_side = side
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_hidden_states_of_padded_texts(tmp_path: Path, in_memory: bool, side: str) -> None:
    model = encoder_models.build("nomic_bert")  # rotary positions: padding in front of a text changes nothing
    model.save_pretrained(tmp_path)
    inputs = padded(encoder_models.add_tokenizer(tmp_path), side)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
    engine = anyaccel.init_inference(model if in_memory else tmp_path, dtype="fp32", threads=1)
    assert engine.runtime == "native"
    found = engine(**inputs).last_hidden_state
    torch.testing.assert_close(found[mask], wanted[mask], atol=1e-4, rtol=0)
    assert not found[~mask].any()
    assert torch.equal(engine(**inputs, return_dict=False)[0], found)


@pytest.mark.parametrize("case", ["bert", "roberta", "mpnet", "data2vec-text", "ernie"])
def test_the_poolers_output(tmp_path: Path, case: str) -> None:
    model = encoder_models.build(case)
    model.save_pretrained(tmp_path)
    inputs = padded(encoder_models.add_tokenizer(tmp_path))
    with torch.no_grad():
        wanted = model(**inputs).pooler_output
    found = anyaccel.init_inference(tmp_path, dtype="fp32", threads=1)(**inputs).pooler_output
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert, mean"])
def test_a_classifier_in_a_pipeline(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the pipeline sets it
    model = encoder_models.build(case, "AutoModelForSequenceClassification")
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    if case == "roberta":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    options: dict[str, Any] = {"tokenizer": tokenizer, "top_k": None}
    wanted = transformers.pipeline("text-classification", model=model, **options)(TEXTS, batch_size=4)
    engine = anyaccel.init_inference(model, dtype="fp32", threads=1)
    found = transformers.pipeline("text-classification", model=engine, **options)(TEXTS, batch_size=4)
    for one, other in zip(found, wanted, strict=True):
        assert [each["label"] for each in one] == [each["label"] for each in other]
        numpy.testing.assert_allclose([each["score"] for each in one], [each["score"] for each in other], atol=1e-4)


def test_zero_shot_classification_in_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the pipeline sets it
    model = encoder_models.build("deberta-v3", "AutoModelForSequenceClassification")
    model.config.id2label = {0: "entailment", 1: "neutral", 2: "contradiction"}
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path, types=True)
    labels = ["rain", "a cat", "money"]

    def classify(model: Any) -> Any:
        pipeline = transformers.pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
        return pipeline(TEXTS, candidate_labels=labels, hypothesis_template="the {} sat.", batch_size=4)

    wanted = classify(model)
    for source in (tmp_path, model):
        engine = anyaccel.init_inference(source, dtype="fp32", threads=1)
        assert engine.runtime == "native"
        for one, other in zip(classify(engine), wanted, strict=True):
            assert one["labels"] == other["labels"]
            numpy.testing.assert_allclose(one["scores"], other["scores"], atol=1e-4)


def test_what_the_native_encoder_does_not_take(tmp_path: Path) -> None:
    model = encoder_models.build("bert")
    engine = anyaccel.init_inference(model, dtype="fp32", threads=1)
    ids = torch.tensor([[2, 5, 3]])
    for wrong, message in (
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "no input_ids|inputs_embeds"),
        ({"input_ids": ids, "output_hidden_states": True}, "output_hidden_states"),
        ({"input_ids": ids[0]}, r"\(3,\)"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 2)}, r"\(1, 2\)"),
        ({"input_ids": ids, "attention_mask": torch.zeros(1, 3)}, "text 0 has no tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            engine(**wrong)


def test_a_decoder_of_such_a_family_runs_its_own_code() -> None:
    config = transformers.BertConfig(**{**encoder_models.CASES["bert"], "is_decoder": True})
    model = transformers.BertLMHeadModel(config).eval()
    assert anyaccel.init_inference(model, dtype="fp32", threads=1).runtime != "native"


def test_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder_models.build("mpnet").save_pretrained(tmp_path)
    encoder_models.add_tokenizer(tmp_path).model_input_names = ["input_ids", "attention_mask"]
    encoder_models.add_modules(tmp_path)
    add_to_sentence_transformers()
    add_to_sentence_transformers()
    wanted = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    model = library.SentenceTransformer(str(tmp_path), device="cpu", backend="anyaccel")
    numpy.testing.assert_allclose(model.encode(TEXTS, batch_size=3), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["AlbertModel", "Qwen3Model"])
def test_sentence_transformers_with_models_of_their_own_code(tmp_path: Path, kind: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    config = getattr(transformers, kind).config_class(**encoder_models._SIZES, num_key_value_heads=2, embedding_size=32)
    torch.manual_seed(0)
    getattr(transformers, kind)(config).eval().save_pretrained(tmp_path)
    encoder_models.add_tokenizer(tmp_path)
    encoder_models.add_modules(tmp_path, "mean" if kind == "AlbertModel" else "last")
    add_to_sentence_transformers()
    wanted = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    model = library.SentenceTransformer(str(tmp_path), device="cpu", backend="anyaccel")
    assert any(type(module).__name__ == "PackedLinear" for module in model.modules())
    numpy.testing.assert_allclose(model.encode(TEXTS, batch_size=3), wanted, atol=1e-4)


def _sentence_model(folder: Path) -> Any:
    """A folder of sentence-transformers, and what that library makes of TEXTS with it."""
    library = pytest.importorskip("sentence_transformers")
    encoder_models.build("mpnet").save_pretrained(folder)
    encoder_models.add_tokenizer(folder).model_input_names = ["input_ids", "attention_mask"]
    encoder_models.add_modules(folder)
    add_to_sentence_transformers()
    return library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def test_langchains_embeddings(tmp_path: Path) -> None:
    library = pytest.importorskip("langchain_huggingface")
    wanted = _sentence_model(tmp_path)
    embeddings = library.HuggingFaceEmbeddings(
        model_name=str(tmp_path), model_kwargs={"device": "cpu", "backend": "anyaccel"}
    )
    numpy.testing.assert_allclose(embeddings.embed_documents(TEXTS), wanted, atol=1e-4)
    numpy.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), wanted[1], atol=1e-4)
    assert is_native(embeddings._client)


def test_llama_indexs_embedding(tmp_path: Path) -> None:
    library = pytest.importorskip("llama_index.embeddings.huggingface")
    wanted = _sentence_model(tmp_path)
    embedding = library.HuggingFaceEmbedding(
        model_name=str(tmp_path),
        device="cpu",
        backend="anyaccel",
        normalize=False,
        query_instruction="",
        text_instruction="",
    )
    numpy.testing.assert_allclose(embedding.get_text_embedding_batch(TEXTS), wanted, atol=1e-4)
    numpy.testing.assert_allclose(embedding.get_query_embedding(TEXTS[1]), wanted[1], atol=1e-4)
    assert is_native(embedding._model)


def is_native(model: Any) -> bool:
    """Whether a SentenceTransformer has the native encoder."""
    return model.get_backend() == "anyaccel"


@pytest.mark.parametrize("case", ["bert", "deberta-v3"])
def test_cross_encoders_of_sentence_transformers(tmp_path: Path, case: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder_models.build(case, "AutoModelForSequenceClassification", labels=1).save_pretrained(tmp_path)
    encoder_models.add_tokenizer(tmp_path)
    add_to_sentence_transformers()
    pairs = [(TEXTS[0], each) for each in TEXTS]
    wanted = library.CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    found = library.CrossEncoder(str(tmp_path), device="cpu", backend="anyaccel").predict(pairs)
    numpy.testing.assert_allclose(found, wanted, atol=1e-4)
