# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores of texts beside those of transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors.torch import save_file

import encoder_models
import family_cases
from anyaccel.cli import main
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.encoders.embedder import Embedder, Reranker
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.mapping import Unsupported

FP32 = ModelOptions(dtype="fp32", threads=1)
TEXTS = ["the cat sat on the mat", "rain", "the rain in spain falls on the river bank", "a dog"]


def make(folder: Path, case: str = "bert", kind: str = "AutoModel", **more: Any) -> tuple[Any, Any]:
    model = encoder_models.build(case, kind, **more)
    model.save_pretrained(folder)
    return model, encoder_models.add_tokenizer(folder, types=case == "bert")


def hidden_of(model: Any, tokenizer: Any, text: str, longest: int = 128) -> torch.Tensor:
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)["input_ids"]
    with torch.no_grad():
        found: torch.Tensor = model(ids).last_hidden_state[0]
    return found


POOLINGS = {
    "mean": lambda h: h.mean(0),
    "cls": lambda h: h[0],
    "last": lambda h: h[-1],
    "max": lambda h: h.max(0).values,
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_are_what_modules_json_says(tmp_path: Path, pooling: str, normalize: bool) -> None:
    model, tokenizer = make(tmp_path)
    encoder_models.add_modules(tmp_path, pooling, normalize, longest=6)  # cuts the third text
    wanted = torch.stack([POOLINGS[pooling](hidden_of(model, tokenizer, text, 6)) for text in TEXTS])
    if normalize:
        wanted = torch.nn.functional.normalize(wanted, dim=1)
    embedder = Embedder(tmp_path, FP32)
    numpy.testing.assert_allclose(embedder.embed(TEXTS), wanted.numpy(), atol=1e-4)
    assert embedder.embed([]).shape == (0, 64)
    assert embedder.size == 64


def test_a_linear_behind_the_pooling(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    make(tmp_path, "mpnet")
    encoder_models.add_modules(tmp_path)
    add_dense(tmp_path, 16, "torch.nn.modules.activation.Tanh")
    wanted = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    numpy.testing.assert_allclose(Embedder(tmp_path, FP32).embed(TEXTS), wanted, atol=1e-4)


def test_prompts(tmp_path: Path) -> None:
    make(tmp_path)
    prompts = {"prompts": {"query": "the bank ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    embedder = Embedder(tmp_path, FP32)
    assert embedder.prompt(None) == embedder.prompt("query") == "the bank "
    assert embedder.prompt("document") == ""
    with pytest.raises(UsageError, match=r"'passage'.*query, document"):
        embedder.prompt("passage")
    numpy.testing.assert_allclose(embedder.embed(["a dog"], "the bank "), embedder.embed(["the bank a dog"]))


def test_a_causal_model_embeds_by_its_last_token(tmp_path: Path) -> None:
    model = family_cases.build("qwen3")
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    encoder_models.add_modules(tmp_path, "last")
    wanted = torch.stack([hidden_of(model.model, tokenizer, text)[-1] for text in TEXTS])
    wanted = torch.nn.functional.normalize(wanted, dim=1)
    for folder_says in (True, False):
        if not folder_says:
            (tmp_path / "modules.json").unlink()
        numpy.testing.assert_allclose(Embedder(tmp_path, FP32).embed(TEXTS), wanted.float().numpy(), atol=1e-4)
    with pytest.raises(Unsupported, match="pooling max of a causal model"):
        Embedder(tmp_path, FP32, pooling="max")


def add_dense(folder: Path, size: int, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a linear behind what a folder's modules.json has so far; returns its weight and bias."""
    torch.manual_seed(0)
    weight, bias = torch.randn(size, 64), torch.randn(size)
    (folder / "3_Dense").mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "3_Dense" / "model.safetensors")
    config = {"in_features": 64, "out_features": size, "bias": True, "activation_function": activation}
    (folder / "3_Dense" / "config.json").write_text(json.dumps(config))
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 3, "name": "dense", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return weight, bias


@pytest.mark.parametrize("normalize", [False, True])
def test_a_causal_model_with_a_linear_behind_the_pooling(tmp_path: Path, normalize: bool) -> None:
    """As Stella: the mean of hidden states, and lengths that are not 1."""
    config = transformers.Qwen2Config(**encoder_models._SIZES, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.Qwen2Model(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    encoder_models.add_modules(tmp_path, "mean", normalize)
    weight, bias = add_dense(tmp_path, 16, "torch.nn.modules.linear.Identity")
    wanted = torch.stack([hidden_of(model, tokenizer, text).mean(0) @ weight.T + bias for text in TEXTS])
    if normalize:
        wanted = torch.nn.functional.normalize(wanted, dim=1)
    embedder = Embedder(tmp_path, FP32)
    assert embedder.size == 16
    numpy.testing.assert_allclose(embedder.embed(TEXTS), wanted.numpy(), atol=1e-4)


ALBERT = {**encoder_models._SIZES, "embedding_size": 32}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(("kind", "values"), [("Albert", ALBERT), ("T5", T5)])
def test_an_encoder_without_a_native_family(
    tmp_path: Path, kind: str, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As paraphrase-albert and Instructor: transformers' code, in batches with padding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    model = getattr(transformers, "AlbertModel" if kind == "Albert" else "T5EncoderModel")(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    encoder_models.add_modules(tmp_path, "mean")
    wanted = torch.stack([hidden_of(model, tokenizer, text).mean(0) for text in TEXTS])
    wanted = torch.nn.functional.normalize(wanted, dim=1)
    embedder = Embedder(tmp_path, FP32)
    numpy.testing.assert_allclose(embedder.embed(TEXTS), wanted.numpy(), atol=1e-4)
    assert embedder.embed([]).shape == (0, 64)
    with pytest.raises(UsageError, match="no head that scores pairs"):
        Reranker(tmp_path, FP32)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    capsys.readouterr()
    assert main(["embed", str(tmp_path / "a.txt"), "--model", str(tmp_path), "--dtype", "fp32", "-q"]) == 0
    shown = numpy.array([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    numpy.testing.assert_allclose(shown, wanted.numpy(), atol=1e-4)


def test_a_model_of_pictures_says_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config={**sizes, "vocab_size": 99}, vision_config={**sizes, "image_size": 32})
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    encoder_models.add_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="CLIPModel: it does not read texts alone"):
        Embedder(tmp_path, FP32).embed(TEXTS)


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("kind", ["Albert", "Qwen3"])
def test_a_classifier_without_a_native_family_scores_pairs(tmp_path: Path, kind: str, pads: bool) -> None:
    torch.manual_seed(0)
    more = ALBERT if kind == "Albert" else {**encoder_models._SIZES, "num_key_value_heads": 2, "head_dim": 16}
    padding = {"pad_token_id": 0} if pads or kind == "Albert" else {}
    config = getattr(transformers, f"{kind}Config")(**more, num_labels=1, **padding)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path, types=kind == "Albert")
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            wanted.append(float(torch.sigmoid(model(**tokenizer(TEXTS[2], text, return_tensors="pt")).logits[0, 0])))
    numpy.testing.assert_allclose(Reranker(tmp_path, FP32).scores(TEXTS[2], TEXTS), wanted, atol=1e-4)


def test_a_folder_with_a_vocabulary_only(tmp_path: Path) -> None:
    """As checkpoints before tokenizer.json: transformers makes a tokenizer of the library tokenizers of it."""
    model = encoder_models.build("bert")
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*encoder_models.SPECIAL, *encoder_models.WORDS]) + "\n")
    values = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 128}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = torch.stack([hidden_of(model, tokenizer, text).mean(0) for text in TEXTS])
    numpy.testing.assert_allclose(Embedder(tmp_path, FP32).embed(TEXTS), wanted.numpy(), atol=1e-4)


def test_a_causal_model_without_a_head(tmp_path: Path) -> None:
    """As E5-Mistral: weights under names without "model.", and a class that predicts nothing."""
    model = family_cases.build("mistral").model
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["MistralModel"]
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    wanted = torch.stack([hidden_of(model, tokenizer, text)[-1] for text in TEXTS])
    wanted = torch.nn.functional.normalize(wanted, dim=1)
    numpy.testing.assert_allclose(Embedder(tmp_path, FP32).embed(TEXTS), wanted.float().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("case", "activation"), [("bert", "Sigmoid"), ("roberta", "Identity"), ("deberta-v3", "Sigmoid")]
)
def test_a_cross_encoder_scores_pairs(tmp_path: Path, case: str, activation: str) -> None:
    model, tokenizer = make(tmp_path, case, "AutoModelForSequenceClassification", labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.activation.{activation}"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = []
    for text in TEXTS:
        inputs = tokenizer(TEXTS[2], text, return_tensors="pt")
        with torch.no_grad():
            logit = model(**inputs).logits[0, 0]
        wanted.append(float(torch.sigmoid(logit) if activation == "Sigmoid" else logit))
    reranker = Reranker(tmp_path, FP32)
    numpy.testing.assert_allclose(reranker.scores(TEXTS[2], TEXTS), wanted, atol=1e-4)
    best = reranker.rank(TEXTS[2], TEXTS, 2)
    assert [each.index for each in best] == list(numpy.argsort(wanted)[::-1][:2])


def test_a_causal_model_answers_yes_or_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_models, "WORDS", ["yes", "no", *encoder_models.WORDS])
    monkeypatch.setattr(encoder_models, "SPECIAL", [*encoder_models.SPECIAL, "<|im_start|>", "<|im_end|>"])
    model = family_cases.build("qwen3", positions=512)
    model.save_pretrained(tmp_path)
    tokenizer = encoder_models.add_tokenizer(tmp_path)
    reranker = Reranker(tmp_path, FP32)
    scores = reranker.scores("the river", TEXTS)
    judge = reranker._score.__self__  # type: ignore[attr-defined]
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    from anyaccel.inference.encoders import embedder

    for score, text in zip(scores, TEXTS, strict=True):
        parts = (
            embedder._JUDGE,
            f"<Instruct>: {embedder.INSTRUCTION}\n<Query>: the river\n<Document>: {text}",
            embedder._JUDGEMENT,
        )
        ids = [token for part in parts for token in judge.tokenizer.encode(part, special=False)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        assert score == pytest.approx(float(torch.softmax(logits[[no, yes]], 0)[1]), abs=1e-4)
    assert judge.native.model.cache_used_bytes == 0


def test_models_that_score_no_pairs(tmp_path: Path) -> None:
    for name, kind, message in (
        ("encoder", "AutoModel", "anyaccel embed"),
        ("classes", "AutoModelForSequenceClassification", "3 classes"),
    ):
        make(tmp_path / name, "bert", kind)
        with pytest.raises(UsageError, match=message):
            Reranker(tmp_path / name, FP32)
    family_cases.build("llama").save_pretrained(tmp_path)
    encoder_models.add_tokenizer(tmp_path)
    with pytest.raises(Unsupported, match="Qwen3-Reranker"):
        Reranker(tmp_path, FP32)


def test_the_command_embeds_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    encoder_models.add_modules(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS[:2]) + "\n\n")
    (tmp_path / "b.jsonl").write_text("\n".join([json.dumps({"text": TEXTS[2]}), json.dumps(TEXTS[3])]))
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    common = ["embed", *files, "--model", str(tmp_path), "--dtype", "fp32", "--threads", "1", "-q"]
    assert main(common) == 0
    shown = numpy.array([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    numpy.testing.assert_allclose(shown, Embedder(tmp_path, FP32).embed(TEXTS), atol=1e-6)
    assert main([*common, "--output", str(tmp_path / "out.npy")]) == 0
    numpy.testing.assert_allclose(numpy.load(tmp_path / "out.npy"), shown, atol=1e-6)
    odd = "rain\u2028falls\x0cin\x85spain"  # one line to JSON and to wc -l, four to str.splitlines
    (tmp_path / "a.txt").write_text(f"{odd}\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps(odd.replace("\x0c", " "), ensure_ascii=False), encoding="utf-8")
    assert main(common) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (tmp_path / "b.jsonl").write_text("[1]")
    assert main(common) == 2
    assert "b.jsonl, line 1" in capsys.readouterr().err


def test_the_command_reranks_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "bert", "AutoModelForSequenceClassification", labels=1)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    common = ["rerank", "the river", str(tmp_path / "a.txt"), "--model", str(tmp_path), "--dtype", "fp32", "-q"]
    assert main([*common, "--json", "--top", "3", "--threads", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = Reranker(tmp_path, FP32).rank("the river", TEXTS, 3)
    assert [line["index"] for line in lines] == [each.index for each in wanted]
    assert [line["text"] for line in lines] == [TEXTS[each.index] for each in wanted]
    assert main([*common, "--top", "0"]) == 2
