# SPDX-License-Identifier: Apache-2.0
"""GGUF files give the decoder and the weights of the Hugging Face model that they were made from."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import anyaccel.inference.checkpoints.gguf_file as gguf_file
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.model_path import default_model_file
from anyaccel.inference.families.gguf_models import open_gguf
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.in_memory import checkpoint_in_memory
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.spec.mapping import Unsupported
from recorded_model import RecordedModel

gguf = pytest.importorskip("gguf")

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 20000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 20000.0,
    "short_factor": [1.0 + 0.25 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}

# Name -> class, its config beyond COMMON, architecture of GGUF, further metadata of the file.
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}, "llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "llama", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "llama", {}),
    "qwen2": ("Qwen2", {}, "qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}, "qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}, "qwen3", {}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        "qwen2moe",
        {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "qwen3moe",
        {"expert_feed_forward_length": 32},
    ),
    "qwen2vl": ("Qwen2", {}, "qwen2vl", {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("Qwen3", {"head_dim": 32}, "qwen3vl", {"n_deepstack_layers": 3}),
    "qwen3vlmoe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "qwen3vlmoe",
        {"expert_feed_forward_length": 32, "n_deepstack_layers": 3},
    ),
    "gemma": ("Gemma", {"head_dim": 32}, "gemma", {}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
        "gemma2",
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "rope_theta": 1000000.0,
        },
        "gemma3",
        {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "sliding_window": None},
        "phi3",
        {"rope.scaling.original_context_length": 32, "rope.dimension_count": 16},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.5, "logits_scaling": 8.0},
        "granite",
        {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.5, "logit_scale": 8.0},
    ),
    "olmo2": ("Olmo2", {}, "olmo2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}, "starcoder2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}, "stablelm", {"rope.dimension_count": 4}),
    "cohere": ("Cohere", {"logit_scale": 0.25}, "command-r", {"logit_scale": 0.25}),
    "gpt2": (
        "GPT2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96},
        "gpt2",
        {},
    ),
}


def hugging_face_model(name: str) -> Any:
    import torch
    import transformers

    kind, config, _, _ = MODELS[name]
    torch.manual_seed(0)
    config_kind = {"Gemma3": "Gemma3Text"}.get(kind, kind)
    own = dict(COMMON)
    if "rope_parameters" in config or kind == "GPT2":
        own.pop("rope_theta")
    if kind == "GPT2":
        own = {key: own[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    values = {**own, **config}
    if kind == "Gemma3":
        values.pop("rope_theta", None)
    made = getattr(transformers, f"{config_kind}Config")(**values)
    with torch.no_grad():
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{kind}{head}")(made).eval()
        for parameter in model.parameters():  # norms and biases would be ones and zeros
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def permuted(weight: Any, heads: int) -> Any:
    """As convert_hf_to_gguf.py's LlamaModel.permute."""
    rows = weight.shape[0]
    split = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, name: str, model: Any, kind: str = "F32") -> None:
    """After llama.cpp's converters, with the package gguf's own names."""
    _, _, architecture, more = MODELS[name]
    config = model.config
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", heads) or heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner)
    eps = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
    found = next(each for each in eps if hasattr(config, each))
    (writer.add_layer_norm_rms_eps if found == "rms_norm_eps" else writer.add_layer_norm_eps)(getattr(config, found))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if hasattr(config, "rope_parameters"):
        parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(parameters["rope_theta"])
        if parameters["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(parameters["factor"])
            writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        if parameters["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(config.hidden_size // heads, parameters))
        if parameters["rope_type"] == "longrope":
            for length in ("long", "short"):
                values = np.array(parameters[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", values)
            writer.add_float32(f"{architecture}.rope.scaling.attn_factor", attention_factor(config))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    for key, value in more.items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add: Any = kinds[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(96)])
    names = gguf.get_tensor_name_map(
        next(arch for arch, called in gguf.MODEL_ARCH_NAMES.items() if called == architecture), config.num_hidden_layers
    )
    for tensor, values in tensors_of(model).items():
        module, suffix = tensor.rsplit(".", 1)
        stored = f"{names.get_name(module)}.{suffix}"
        if architecture in ("llama", "granite"):
            if ".q_proj." in tensor:
                values = permuted(values, heads)
            if ".k_proj." in tensor:
                values = permuted(values, keys)
        if architecture.startswith("gemma") and tensor.endswith("norm.weight"):
            values = values + 1
        if architecture == "gpt2" and any(f"{each}.weight" in tensor for each in ("c_attn", "c_proj", "c_fc")):
            values = values.T
        values = np.ascontiguousarray(values)
        if kind != "F32" and values.ndim > 1 and "gate_inp" not in stored:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quantize(values, type_), raw_dtype=type_)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(model: Any) -> dict[str, Any]:
    """The tensors of a checkpoint of the model; experts stacked as in GGUF."""
    found = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            found[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found


def llama3_divisors(dim: int, parameters: dict[str, Any]) -> Any:
    """As convert_hf_to_gguf.py's LlamaModel.generate_extra_tensors."""
    divisors = []
    context = parameters["original_max_position_embeddings"]
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * parameters["rope_theta"] ** (index / dim)
        if wavelength < context / 4.0:
            divisors.append(1.0)
        elif wavelength > context / 1.0:
            divisors.append(parameters["factor"])
        else:
            smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(divisors, np.float32)


def attention_factor(config: Any) -> float:
    ratio = config.max_position_embeddings / config.original_max_position_embeddings
    return float(np.sqrt(1 + np.log(ratio) / np.log(config.original_max_position_embeddings)))


def packed(checkpoint: Any, dtype: str | None = None) -> tuple[Plan, RecordedModel]:
    plan = Plan(checkpoint, Precision(dtype), 0, 1)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    model.check_full()
    return plan, model


def close(a: Any, b: Any) -> bool:
    """Numbers in GGUF's metadata are float32."""
    if isinstance(a, float):
        return bool(np.isclose(a, b, rtol=1e-6, atol=0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    return bool(a == b)


def test_rotary_divisors_of_another_first_context_than_metas(monkeypatch: Any, tmp_path: Path) -> None:
    import torch

    from anyaccel import init_inference

    parameters = {**LLAMA3, "original_max_position_embeddings": 48}
    monkeypatch.setitem(MODELS, "own-context", ("Llama", {"rope_parameters": parameters}, "llama", {}))
    model = hugging_face_model("own-context").eval()
    write_gguf(tmp_path / "model.gguf", "own-context", model)
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        wanted = model(ids).logits
    for runtime in ("native", "device"):
        found = init_inference(str(tmp_path / "model.gguf"), dtype="fp32", runtime=runtime)(ids).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_decoder_and_weights_are_those_of_the_hugging_face_model(name: str, tmp_path: Path) -> None:
    from dataclasses import asdict

    model = hugging_face_model(name)
    write_gguf(tmp_path / "model.gguf", name, model)
    plan, found = packed(read_checkpoint(tmp_path / "model.gguf"))
    wanted_plan, wanted = packed(checkpoint_in_memory(model, None, release=False))
    assert close(asdict(plan.whole), asdict(wanted_plan.whole)), (plan.whole, wanted_plan.whole)
    for matrix, values in wanted.matrices.items():
        np.testing.assert_array_equal(found.matrices[matrix], values, err_msg=matrix)
    for vector, values in wanted.vectors.items():
        np.testing.assert_allclose(found.vectors[vector], values, rtol=0, atol=3e-7, err_msg=vector)


@pytest.mark.parametrize(
    ("kind", "form"), [("Q8_0", "i8"), ("Q4_0", "i4"), ("Q4_1", "i4"), ("BF16", "bf16"), ("F16", "f16")]
)
def test_formats_of_the_file_are_kept(kind: str, form: str, tmp_path: Path) -> None:
    model = hugging_face_model("llama")
    write_gguf(tmp_path / "model.gguf", "llama", model, kind)
    plan, found = packed(read_checkpoint(tmp_path / "model.gguf"))
    assert {m.format for m in plan.matrices} == {form}
    assert {m.minimum for m in plan.matrices} == {kind == "Q4_1"}
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    type_ = gguf.GGMLQuantizationType[kind]
    wanted = gguf.dequantize(gguf.quantize(weight, type_), type_)
    np.testing.assert_array_equal(found.matrices["layers.1.mlp.down"], wanted)


def test_real_file_keeps_its_formats() -> None:
    opened = open_gguf(default_model_file())
    assert opened.config["model_type"] == "llama"
    assert opened.config["vocab_size"] == 49152
    assert opened.generation_config == {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 2}
    plan = Plan(read_checkpoint(default_model_file()), Precision(None), 0, 1)
    assert {(m.format, m.group, m.minimum) for m in plan.matrices} == {("i4", 32, True), ("i8", 32, False)}
    assert family_of(opened.config).spec(opened.config).tied


def test_split_files(tmp_path: Path) -> None:
    for number, tensor in enumerate(("a", "b"), 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_tensor(tensor, np.full((2, 4), number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    source = gguf_file.GgufSource(tmp_path / "m-00001-of-00002.gguf")
    assert sorted(source.names()) == ["a", "b"]
    assert source.file_of("b").floats("b", (2, 4)) == [2.0] * 8
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: missing"):
        gguf_file.GgufSource(tmp_path / "m-00001-of-00002.gguf")


def small_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("q", gguf.quantize(np.ones((4, 32), np.float32), gguf.GGMLQuantizationType.Q4_0), raw_dtype=2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_truncated_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    whole = small_file(file)
    tensors = 4 * 32 * 4 + 4 * 18
    for cut in [*range(4, len(whole) - tensors, 7), len(whole) - 80, len(whole) - tensors]:
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"model\.gguf: .*(truncated|damaged|past the end)"):
            gguf_file.GgufFile(file)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        gguf_file.GgufFile(file)
    file.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ModelError, match="GGUF of version 1, and 2 and 3 are known"):
        gguf_file.GgufFile(file)


@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_damage_never_leads_outside_the_file(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    content = bytearray(small_file(file))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, 400))
        content[at] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        opened = gguf_file.GgufFile(file)
    except ModelError as error:
        assert str(file) in str(error)
        return
    for info in opened.infos.values():
        assert 0 <= info.begin <= info.end <= len(content)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Unsupported, match="'rwkv7'"):
        open_gguf(tmp_path / "model.gguf")


def test_what_types_run_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import describe_weights

    class Screen:
        lines: list[str]

        def line(self, text: str) -> None:
            self.lines.append(text)

        def progress(self, done: int, total: int) -> None: ...

    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", "llama", hugging_face_model("llama"), "Q5_1")
    for cached in (False, True):
        native = load_native(tmp_path / "model.gguf", ModelOptions("auto"))
        assert (native.cached, native.forms) == (cached, {"q5_1": ["int5 in groups of 32 with a minimum"]})
        screen = Screen()
        screen.lines = []
        describe_weights(native, screen)
        size = native.model.weight_bytes / 2**20
        assert screen.lines == [f"weights: q5_1 as int5 in groups of 32 with a minimum; {size:.0f} MiB"]
    screen.lines = []
    describe_weights(load_native(tmp_path / "model.gguf"), screen)
    assert screen.lines == ["weights: q5_1 as bf16; --dtype auto leaves them as they are, smaller and faster"]


def test_a_small_vocabulary_is_enough_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family's default for a token, such as Phi-3's padding 32000, may be outside of the file's vocabulary."""
    import torch

    import anyaccel
    from anyaccel.inference.generic.loading import native_skeleton
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "0")
    for name in MODELS:
        path = tmp_path / f"{name}.gguf"
        model = hugging_face_model(name)
        write_gguf(path, name, model)
        native = load_native(path, ModelOptions("fp32"))
        assert native_skeleton(path, native, torch.float32).config.vocab_size == COMMON["vocab_size"]
        if name == "phi3":
            ids = torch.tensor([[5, 17, 90, 3, 64, 28, 11]])
            with torch.inference_mode():
                engine = anyaccel.init_inference(path, dtype="fp32", runtime="native")
                torch.testing.assert_close(engine(ids).logits, model.eval()(ids).logits, rtol=1e-3, atol=1e-3)
            assert engine.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 9)


def test_padding_outside_of_the_vocabulary_is_none(tmp_path: Path) -> None:
    import json

    import torch
    import transformers

    import anyaccel

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": 96}))
    ids = torch.tensor([[5, 17, 90]])
    with torch.inference_mode():
        expected = model(ids).logits
        for runtime in ("native", "torch"):
            engine = anyaccel.init_inference(tmp_path, dtype="fp32", runtime=runtime)
            torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)
