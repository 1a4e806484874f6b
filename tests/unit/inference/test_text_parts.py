# SPDX-License-Identifier: Apache-2.0
"""Folders of other classes than causal LMs: language models of several modalities run, the others say what they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import anyaccel
import family_cases
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.model_path import check_decoder_only
from anyaccel.inference.families.text_part import READS, text_part
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.quantize import quantize
from anyaccel.inference.ranks.backends import open_backend

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 16}
CLIP = {"vision_config": {"model_type": "clip_vision_model", **VISION}}
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model", **VISION}}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
DEEP = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
}
STACKED = {**DEEP, "deepstack_visual_indexes": [0]}
TURNED = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GLM = {"model_type": "glm4v_text", "rope_parameters": TURNED}
GLM_EXPERTS = {
    "model_type": "glm4v_moe_text",
    "rope_parameters": TURNED,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
DELTA = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SQUARE = {"image_size": [28, 28], "patch_size": [14, 14]}
RESAMPLER = {
    "hidden_size": 64,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
# model_type, text model, the rest of the configuration; a name after "/" tells cases of one type apart.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        {"model_type": "mistral", "head_dim": 16},
        {"vision_config": {"model_type": "pixtral", **VISION}, "image_token_index": 150},
    ),
    "mistral3/ministral3": (
        {"model_type": "ministral3", "head_dim": 16},
        {"vision_config": {"model_type": "pixtral", **VISION}, "image_token_index": 150},
    ),
    "mistral3/mistral4": (
        {"model_type": "mistral4", **LATENT},
        {"vision_config": {"model_type": "pixtral", **VISION}, "image_token_index": 150},
    ),
    "aya_vision": ({"model_type": "cohere2", "sliding_window": 5}, SIGLIP),
    "cohere2_vision": ({"model_type": "cohere2", "sliding_window": 5}, SIGLIP),
    "exaone4_5": (
        {"model_type": "exaone4", "sliding_window": 5, "num_hidden_layers": 4},
        {"vision_config": {**DEEP, "num_key_value_heads": 2}},
    ),
    "glm4v": (GLM, {"vision_config": DEEP}),
    "glm46v": (GLM, {"vision_config": DEEP}),
    "glm46v/experts": (GLM_EXPERTS, {"vision_config": DEEP}),
    "glm4v_moe": (GLM_EXPERTS, {"vision_config": DEEP}),
    "got_ocr2": (
        {"model_type": "qwen2"},
        {"vision_config": {**LAYERS, "output_channels": 16, "mlp_dim": 64, "image_size": 64, "patch_size": 16}},
    ),
    "kimi_k25": ({"model_type": "deepseek_v3", **LATENT, "n_group": 1, "topk_group": 1}, {"vision_config": LAYERS}),
    "lighton_ocr": ({"model_type": "qwen3"}, {"vision_config": {"model_type": "pixtral", **VISION}}),
    "ovis2": ({"model_type": "qwen2"}, {"vision_config": LAYERS}),
    "video_llama_3": ({"model_type": "qwen2"}, {"vision_config": LAYERS}),
    "video_llava": ({"model_type": "llama"}, CLIP),
    "llava": ({"model_type": "llama"}, {**CLIP, "image_token_index": 150}),
    "llava_next": ({"model_type": "mistral"}, {**CLIP, "image_token_index": 150}),
    "llava_next_video": ({"model_type": "llama"}, {**CLIP, "image_token_index": 150, "video_token_index": 151}),
    "llava_onevision": ({"model_type": "qwen2"}, {**SIGLIP, "image_token_index": 150}),
    "vipllava": ({"model_type": "llama"}, {**CLIP, "image_token_index": 150}),
    "internvl": (
        {"model_type": "qwen2"},
        {
            "vision_config": {
                "model_type": "internvl_vision",
                **VISION,
                "image_size": [28, 28],
                "patch_size": [14, 14],
            },
            "image_token_id": 150,
        },
    ),
    "idefics2": (
        {"model_type": "mistral"},
        {
            "vision_config": {"model_type": "idefics2", **VISION},
            "perceiver_config": RESAMPLER,
            "image_token_id": 150,
        },
    ),
    "idefics3": (
        {"model_type": "llama"},
        {"vision_config": {"model_type": "idefics3_vision", **VISION}, "image_token_id": 150},
    ),
    "smolvlm": (
        {"model_type": "llama"},
        {"vision_config": {"model_type": "smolvlm_vision", **VISION}, "image_token_id": 150},
    ),
    "qwen2_vl": (
        MROPE,
        {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}},
    ),
    "qwen2_5_vl": (MROPE, {"vision_config": DEEP}),
    "qwen3_5": ({**DELTA, "head_dim": 16}, {"vision_config": DEEP}),
    "qwen3_5_moe": ({**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}, {"vision_config": DEEP}),
    "qwen3_vl": ({**MROPE, "head_dim": 16}, {"vision_config": STACKED}),
    "qwen3_vl_moe": ({**MROPE, **EXPERTS}, {"vision_config": STACKED}),
    "voxtral": (
        {"model_type": "llama", "head_dim": 16},
        {
            "audio_config": {
                **AUDIO,
                "hidden_size": 32,
                "intermediate_size": 256,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "audio_token_id": 150,
        },
    ),
    "qwen2_audio": (
        {"model_type": "qwen2"},
        {
            "audio_config": {
                **AUDIO,
                "d_model": 32,
                "encoder_ffn_dim": 64,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
            },
            "audio_token_index": 150,
        },
    ),
}
IDS = torch.arange(3, 20)[None]


def saved(case: str, folder: Path) -> Any:
    """A tiny model of several modalities, saved; returns it."""
    kind = case.partition("/")[0]
    text, rest = CASES[case]
    torch.manual_seed(0)
    made: Any = transformers.AutoConfig.for_model(kind)
    config = type(made)(text_config={**TEXT, **text}, **rest)
    model = transformers.AutoModelForMultimodalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    if kind == "kimi_k25":  # transformers saves other names than it reads, and than published checkpoints have
        stored = load_file(folder / "model.safetensors")
        named = {name.replace("model.blocks.", "model.layers."): value for name, value in stored.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return model


def check(model: Any, folder: Path, runtime: str) -> Any:
    engine = anyaccel.init_inference(folder, dtype="fp32", runtime=runtime)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        torch.testing.assert_close(engine(input_ids=IDS).logits, wanted, rtol=0, atol=1e-5)
    return engine


def test_each_kind_has_a_case() -> None:
    assert {case.partition("/")[0] for case in CASES} | {"kimi_vl"} == READS.keys()


@pytest.mark.parametrize("kind", ["kimi_vl", "kimi_k2"])
def test_a_model_with_code_of_its_own_is_known_by_its_text_model(kind: str, tmp_path: Path) -> None:
    """As Moonshot's are published: transformers has not their type, and nothing of the folder's code is run."""
    if kind == "kimi_vl":
        model = saved("kimi_k25", tmp_path)
    else:
        model = family_cases.build("deepseek_v3")
        model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": kind, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    if kind == "kimi_vl":
        config["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, tmp_path, "native")


@pytest.mark.parametrize("case", CASES)
def test_the_language_model_computes_what_the_whole_one_does(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(case, tmp_path)
    with caplog.at_level(logging.WARNING):
        check(model, tmp_path, "native")
    kind = case.partition("/")[0]
    said = [each.message for each in caplog.records if each.name.startswith("anyaccel")]
    assert said == [f"{tmp_path}: the language model of {kind} runs, {READS[kind]} is read"]


@pytest.mark.parametrize("case", ["mistral3", "qwen2_5_vl"])
def test_other_runtimes(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    check(model, tmp_path, "device")
    engine = check(model, tmp_path, "torch")
    assert isinstance(engine.module, type(model))  # with its own code, it reads images too
    with torch.no_grad():
        wanted = model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False)
        assert torch.equal(engine.generate(input_ids=IDS, max_new_tokens=5, do_sample=False), wanted)


def test_a_flat_config_as_qwen2_5_vl_is_published() -> None:
    flat = {
        "model_type": "qwen2_5_vl",
        "vision_config": {"depth": 1},
        "tie_word_embeddings": True,
        **TEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    part = text_part(flat, has_head=True)
    assert part is not None
    assert part["model_type"] == "qwen2"
    assert part["hidden_size"] == 64
    assert part["tie_word_embeddings"] is True
    assert part["rope_scaling"]["rope_type"] == "default"
    assert "vision_config" not in part


def test_the_kind_of_rotary_positions_is_kept_beside_those_of_images() -> None:
    scaled = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mrope_section": [2, 3, 3]}
    part = text_part({"model_type": "qwen2_5_vl", **TEXT, "rope_scaling": scaled}, has_head=True)
    assert part is not None
    assert part["rope_scaling"]["rope_type"] == "yarn"
    assert part["rope_scaling"]["factor"] == 4.0


def test_an_encoder_decoder_runs_with_its_own_code(tmp_path: Path) -> None:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    engine = anyaccel.init_inference(tmp_path, dtype="fp32")
    found = engine.generate(input_ids=IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False))


def test_commands_say_what_an_encoder_decoder_is(tmp_path: Path) -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = r"T5ForConditionalGeneration is an encoder-decoder, not a decoder-only language model"
    with pytest.raises(ModelError, match=said):
        check_decoder_only(tmp_path)
    lines: list[str] = []

    class Lines:
        line = staticmethod(lines.append)
        progress = staticmethod(lambda done, total: None)

    with pytest.raises(ModelError, match=said):
        open_backend(tmp_path, ModelOptions(), Lines())
    assert not lines


@pytest.mark.parametrize(
    ("architecture", "model_type", "what"),
    [
        ("LlamaForSequenceClassification", "llama", "is a sequence classifier, not a language model"),
        ("Qwen3ForSequenceClassification", "qwen3", "is a sequence classifier, not a language model"),
        ("AlbertModel", "albert", "is an encoder without a head that predicts the next token, not a language model"),
        ("AlbertForMaskedLM", "albert", "is a masked language model, which fills gaps"),
        ("WhisperForConditionalGeneration", "whisper", "is a model of speech"),
        ("LlamaModel", "llama", "has no head that predicts the next token"),
    ],
)
@pytest.mark.parametrize("runtime", ["auto", "torch"])
def test_other_models_say_what_they_are(
    architecture: str, model_type: str, what: str, runtime: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if model_type in ("llama", "qwen3"):
        model = family_cases.build(model_type)
        kept = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
        model.config.save_pretrained(tmp_path)
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"architectures": [architecture], "tie_word_embeddings": False}
    else:
        config = {"architectures": [architecture], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError) as error:
        anyaccel.init_inference(tmp_path, runtime=runtime)
    if architecture == "LlamaModel" and runtime == "torch":
        assert "lm_head" in str(error.value)
    else:
        assert f"{architecture} {what}" in str(error.value)
    assert "causal LM" not in caplog.text


def test_an_adapter_beside_a_model_is_said_not_to_be_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        for runtime in ("native", "torch"):
            anyaccel.init_inference(tmp_path, runtime=runtime)
    assert [each.message for each in caplog.records if "adapter" in each.message] == [
        f"{tmp_path}: the adapter beside the model (adapter_config.json) is not applied; merge it with PEFT's "
        "merge_and_unload() where it should be"
    ]


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_alone_says_how_to_merge_it(with_config: bool, tmp_path: Path) -> None:
    if with_config:
        family_cases.build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"an adapter of PEFT for org/base, no model: merge it with .*merge_and_unload"
    ):
        anyaccel.init_inference(tmp_path)


def test_a_sentencepiece_tokenizer_alone_names_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyaccel.inference.text import tokenizer

    family_cases.build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05<unk>")
    monkeypatch.setattr(tokenizer, "_has_protobuf", lambda: False)
    with pytest.raises(ModelError, match=r"tokenizer\.model: a SentencePiece tokenizer .*pip install protobuf"):
        tokenizer.load_text_tokenizer(tmp_path)


@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_a_quantised_model_of_several_modalities(runtime: str, tmp_path: Path) -> None:
    """As Ministral 3 is published: float8 with a scale for each matrix, beside a vision tower that is not quantised."""
    model = saved("mistral3/ministral3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in list(stored.items()):
        if name.startswith("language_model.model.layers") and name.endswith("_proj.weight"):
            scale = (weight.abs().max() / 448).bfloat16()
            stored[name] = (weight / scale.float()).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            own = name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
            model.get_parameter(own).data = stored[name].float() * scale.float()
    assert any(name.endswith("_scale_inv") for name in stored)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    check(model, tmp_path, runtime)


def test_a_quantised_copy_is_a_text_model(tmp_path: Path) -> None:
    saved("llava", tmp_path / "llava")
    quantize(tmp_path / "llava", tmp_path / "copy", dtype="int8")
    names = {name.partition(".")[0] for name in load_file(tmp_path / "copy" / "model.safetensors")}
    assert names == {"model", "lm_head"}
    loaded = anyaccel.init_inference(tmp_path / "copy", dtype="auto", runtime="native")
    assert type(loaded.module).__name__.endswith("LlamaForCausalLM")
