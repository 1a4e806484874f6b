# SPDX-License-Identifier: Apache-2.0
"""Served encoders: embeddings, and scores in the shapes of Jina, Cohere and vLLM."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import encoder_models
from anyaccel.errors import UsageError
from anyaccel.inference.encoders.embedder import Embedder, Reranker, TextClassifier
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.serve.engine.encoder import EncoderEngine
from anyaccel.serve.engine.opening import open_engine
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import EngineFullError, EngineStoppedError, GenerationRequest
from serve_fakes import Client

FP32 = ModelOptions(dtype="fp32", threads=1)
TEXTS = ["the cat sat on the mat", "rain", "the rain in spain falls on the river bank", "a dog"]


class Silent:
    def line(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass


def make(folder: Path, kind: str = "AutoModel", **more: Any) -> None:
    encoder_models.build("bert", kind, **more).save_pretrained(folder)
    encoder_models.add_tokenizer(folder, types=True)
    encoder_models.add_modules(folder, "cls")


def opened(folder: Path, **settings: Any) -> EncoderEngine:
    engine = open_engine(folder, FP32, Silent(), EngineSettings(**settings))
    assert isinstance(engine, EncoderEngine)
    return engine


def ask(folder: Path, *requests: tuple[str, Any]) -> list[tuple[int, Any]]:
    """The answers to requests that are sent at once."""

    async def run() -> list[tuple[int, Any]]:
        engine = opened(folder)
        client: Any = Client(engine, load_text_tokenizer(folder))  # type: ignore[arg-type]
        try:
            answers = await asyncio.gather(*(client.send("POST", path, value) for path, value in requests))
        finally:
            await engine.close()
        return [(each.status, json.loads(each.body)) for each in answers]

    return asyncio.run(run())


def test_embeddings_of_requests_that_come_together(tmp_path: Path) -> None:
    make(tmp_path)
    wanted = Embedder(tmp_path, FP32).embed(TEXTS)
    requests = [("/v1/embeddings", {"input": TEXTS[:3], "model": "fake"}), ("/v1/embeddings", {"input": TEXTS[3]})]
    found = []
    for status, answer in ask(tmp_path, *requests):
        assert status == 200, answer
        found += [each["embedding"] for each in answer["data"]]
    numpy.testing.assert_allclose(found, wanted, atol=1e-5)
    (wrong,) = ask(tmp_path, ("/v1/embeddings", {"input": "rain", "pooling": "mean"}))
    assert wrong[0] == 400
    assert "cls of hidden states" in wrong[1]["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(tmp_path: Path, path: str) -> None:
    make(tmp_path, "AutoModelForSequenceClassification", labels=1)
    wanted = Reranker(tmp_path, FP32).rank("the river", TEXTS, 3)
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    body = {"query": "the river", "documents": documents, "top_n": 3, "model": "fake", "return_documents": True}
    ((status, answer),) = ask(tmp_path, (path, body))
    assert status == 200, answer
    assert [each["index"] for each in answer["results"]] == [each.index for each in wanted]
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[each.index] for each in wanted]
    scores = [each["relevance_score"] for each in answer["results"]]
    numpy.testing.assert_allclose(scores, [each.score for each in wanted], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] > 30


def test_score(tmp_path: Path) -> None:
    make(tmp_path, "AutoModelForSequenceClassification", labels=1)
    reranker = Reranker(tmp_path, FP32)
    one, two, three = ask(
        tmp_path,
        ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        ("/score", {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}),
        ("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS[:3]}),
    )
    scores = [each["score"] for each in one[1]["data"]]
    numpy.testing.assert_allclose(scores, reranker.scores(TEXTS[0], TEXTS), atol=1e-5)
    scores = [each["score"] for each in two[1]["data"]]
    wanted = [reranker.scores(TEXTS[0], [TEXTS[2]])[0], reranker.scores(TEXTS[1], [TEXTS[3]])[0]]
    numpy.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert three[0] == 400
    assert "3 texts beside 2" in three[1]["error"]["message"]


@pytest.mark.parametrize("several", [False, True])
def test_classes_of_texts(tmp_path: Path, several: bool) -> None:
    """A text is of one class, or (problem_type) of any number of them; `/pooling` has the same values."""
    names = {"0": "rain", "1": "sun", "2": "snow"}
    make(tmp_path, "AutoModelForSequenceClassification", labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"id2label": names} | ({"problem_type": "multi_label_classification"} if several else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    classifier = TextClassifier(tmp_path, FP32)
    logits = classifier.logits(*classifier.tokenizer.texts(TEXTS))
    wanted = 1 / (1 + numpy.exp(-logits)) if several else numpy.exp(logits) / numpy.exp(logits).sum(1, keepdims=True)
    classes, raw, pooled, scored = ask(
        tmp_path,
        ("/v1/classify", {"input": TEXTS}),
        ("/classify", {"input": TEXTS[0], "use_activation": False}),
        ("/pooling", {"input": TEXTS}),
        ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}),
    )
    numpy.testing.assert_allclose([each["probs"] for each in classes[1]["data"]], wanted, atol=1e-5)
    assert [each["label"] for each in classes[1]["data"]] == [names[str(row.argmax())] for row in wanted]
    assert classes[1]["data"][3]["num_classes"] == 3 and classes[1]["usage"]["prompt_tokens"] > 10
    numpy.testing.assert_allclose(raw[1]["data"][0]["probs"], logits[0], atol=1e-5)
    numpy.testing.assert_allclose([each["data"] for each in pooled[1]["data"]], wanted, atol=1e-5)
    assert scored[0] == 400 and "use /v1/classify" in scored[1]["error"]["message"]


def test_pooling_has_a_vector_of_each_token(tmp_path: Path) -> None:
    make(tmp_path)
    embedder = Embedder(tmp_path, FP32)
    wanted = embedder.embed_each(embedder.tokenizer.texts(TEXTS)[0])
    raw, unit, packed, whole, classes = ask(
        tmp_path,
        ("/pooling", {"input": TEXTS, "use_activation": False}),
        ("/v1/pooling", {"input": TEXTS[1]}),
        ("/pooling", {"input": TEXTS[1], "use_activation": False, "encoding_format": "base64"}),
        ("/pooling", {"input": TEXTS, "task": "embed"}),
        ("/classify", {"input": TEXTS}),
    )
    for each, states in zip(raw[1]["data"], wanted, strict=True):
        numpy.testing.assert_allclose(each["data"], states, atol=1e-5)
    numpy.testing.assert_allclose(numpy.linalg.norm(unit[1]["data"][0]["data"], axis=1), 1, atol=1e-5)
    flat = numpy.frombuffer(base64.b64decode(packed[1]["data"][0]["data"]), numpy.float32)
    numpy.testing.assert_allclose(flat.reshape(wanted[1].shape), wanted[1], atol=1e-5)
    numpy.testing.assert_allclose([each["data"] for each in whole[1]["data"]], embedder.embed(TEXTS), atol=1e-5)
    assert classes[0] == 400 and "classifies no texts" in classes[1]["error"]["message"]


@pytest.mark.parametrize(("said", "possible"), [({"is_matryoshka": True}, 5), ({"matryoshka_dimensions": [8, 16]}, 8)])
def test_embeddings_are_cut_where_the_model_was_trained_for_it(tmp_path: Path, said: Any, possible: int) -> None:
    make(tmp_path)
    ((status, answer),) = ask(tmp_path, ("/v1/embeddings", {"input": "rain", "dimensions": possible}))
    assert status == 400 and "is_matryoshka" in answer["error"]["message"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    whole = Embedder(tmp_path, FP32).embed(TEXTS)
    cut, wrong, ollama = ask(
        tmp_path,
        ("/v1/embeddings", {"input": TEXTS, "dimensions": possible}),
        ("/v1/embeddings", {"input": TEXTS, "dimensions": 1000}),
        ("/api/embed", {"model": "fake", "input": TEXTS, "dimensions": possible}),
    )
    wanted = whole[:, :possible] / numpy.linalg.norm(whole[:, :possible], axis=1, keepdims=True)
    numpy.testing.assert_allclose([each["embedding"] for each in cut[1]["data"]], wanted, atol=1e-5)
    numpy.testing.assert_allclose(ollama[1]["embeddings"], wanted, atol=1e-5)
    assert wrong[0] == 400 and wrong[1]["error"]["param"] == "dimensions"


def test_what_an_encoder_does_not_do(tmp_path: Path) -> None:
    make(tmp_path)
    for path, value, message in (
        ("/v1/completions", {"prompt": "rain"}, "encoder, which generates no text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "makes embeddings and scores no pairs"),
        ("/v1/embeddings", {"input": "rain " * 200}, "202 tokens"),
    ):
        ((status, answer),) = ask(tmp_path, (path, value))
        assert status == 400, answer
        assert message in answer["error"]["message"]
    make(tmp_path, "AutoModelForSequenceClassification", labels=1)
    ((status, answer),) = ask(tmp_path, ("/v1/embeddings", {"input": "rain"}))
    assert status == 400
    assert "makes no embeddings; use /v1/classify or /v1/rerank" in answer["error"]["message"]
    with pytest.raises(UsageError, match="replicas"):
        opened(tmp_path, replicas=2)


def test_what_waits_is_bounded_and_ends(tmp_path: Path) -> None:
    make(tmp_path)

    async def run() -> None:
        engine = opened(tmp_path, max_waiting=2)
        calls = [asyncio.ensure_future(engine.embed([[2, 5, 3]], "mean")) for _ in range(4)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [list, list, EngineFullError, EngineFullError]
        assert engine.stats().prompt_tokens == 6
        with pytest.raises(UsageError, match="generates no text"):
            engine.generate(GenerationRequest([5], 1))
        await engine.drain(1.0)
        assert not engine.ready()
        with pytest.raises(EngineStoppedError):
            await engine.embed([[2, 5, 3]], "mean")
        await engine.close()

    asyncio.run(run())
