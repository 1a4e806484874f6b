#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records GGUF files of tiny models, as llama.cpp's own converter writes them, with transformers' logits.

    python tools/record_gguf.py /path/of/llama.cpp [NAME ...]

The folder needs llama.cpp's `conversion` and `gguf-py`; run it with a Python that has torch and transformers. The files
go to tests/data/gguf, where tests/unit/inference/test_gguf_architectures.py reads them. Facts that a GGUF file of an
architecture does not have (a window of Mistral, a factor that llama.cpp knows by the number of layers) have to be those
that llama.cpp assumes.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data" / "gguf"
TOKENS = [3, 17, 29, 5, 38, 11, 22, 3, 9, 30, 14, 27]
_COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_INDEXER = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 12}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_MSCALE = {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 4,
    "global_head_dim": 8,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 40,
}
_GEMMA3N = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 4,
    "intermediate_size": [24, 24, 24, 20, 20, 28],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 40,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.8, 0.95, 0.3, 0.0, 0.0, 0.0],
}
_HYBRID = ["linear_attention", "full_attention"]
_DELTA = {
    "layer_types": _HYBRID,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
}
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
_GRANITE_HYBRID = {
    "layer_types": _HYBRID,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 20,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
}
_MAMBA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 6,
    "time_step_rank": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_NEMOTRON_H = {"ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "head_dim": 4}
_WINDOWS = {"num_hidden_layers": 4, "sliding_window": 5}


def common(*without: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in without} | more


# Name -> configuration class, its arguments, type of the matrices.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "arcee": ("ArceeConfig", common(mlp_bias=True), "F32"),
    "bloom": ("BloomConfig", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40}, "F32"),
    "cohere2": ("Cohere2Config", common(**_WINDOWS), "F32"),
    "deepseek2-v2": ("DeepseekV2Config", common(**_DEEPSEEK, n_shared_experts=2), "F32"),
    "deepseek2-v2-lite": (
        "DeepseekV2Config",
        common(**{**_DEEPSEEK, "q_lora_rank": None}, rope_parameters=_MSCALE),
        "F32",
    ),
    "deepseek2-v2-groups": (
        "DeepseekV2Config",
        common(**_DEEPSEEK, n_group=2, topk_group=1, topk_method="group_limited_greedy"),
        "F32",
    ),
    "deepseek32": ("DeepseekV32Config", common(**_DEEPSEEK, **_INDEXER, n_group=2, topk_group=1), "F32"),
    "glm-dsa": (
        "GlmMoeDsaConfig",
        common(**_DEEPSEEK, **_INDEXER, n_group=1, topk_group=1, indexer_types=["full", "shared"]),
        "F32",
    ),
    "deepseek2-v3": ("DeepseekV3Config", common(**_DEEPSEEK, n_group=2, topk_group=1), "F32"),
    "deepseek2-v3-q8_0": (
        "DeepseekV3Config",
        common(
            **_DEEPSEEK
            | {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 32}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 32}
            | {"n_group": 1, "topk_group": 1}
        ),
        "Q8_0",
    ),
    "ernie4_5": ("Ernie4_5Config", common(head_dim=6, use_bias=True), "F32"),
    "dots1": (
        "Dots1Config",
        common(
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            sliding_window=None,
        ),
        "F32",
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        common(moe_num_experts=4, moe_k=2, moe_intermediate_size=8, moe_num_shared_experts=1, num_hidden_layers=3),
        "F32",
    ),
    "afmoe": (
        "AfmoeConfig",
        common(
            **_WINDOWS,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            num_shared_experts=1,
            num_dense_layers=1,
            head_dim=4,
            route_scale=1.5,
            mup_enabled=True,
        ),
        "F32",
    ),
    "apertus": ("ApertusConfig", common(), "F32"),
    "jais2": ("Jais2Config", common(), "F32"),
    "mellum": (
        "MellumConfig",
        common(
            **_WINDOWS,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            head_dim=4,
        ),
        "F32",
    ),
    "minicpm3": (
        "MiniCPM3Config",
        common(
            num_key_value_heads=4,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
        ),
        "F32",
    ),
    "granite_swa": ("GraniteSWAConfig", common(**_WINDOWS, mlp_bias=True), "F32"),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        common(num_experts=4, moe_topk=[2, 2], num_shared_expert=[1, 1], moe_intermediate_size=[24, 24], head_dim=4),
        "F32",
    ),
    "hy_v3": (
        "HYV3Config",
        common(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            num_shared_experts=1,
            first_k_dense_replace=1,
            head_dim=4,
        ),
        "F32",
    ),
    "cohere2moe": (
        "Cohere2MoeConfig",
        common(
            **_WINDOWS,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=20,
            head_dim=4,
        ),
        "F32",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        common(**_GEMMA3N, num_kv_shared_layers=3),
        "F32",
    ),
    "gemma4": ("Gemma4TextConfig", common(**_GEMMA4, hidden_size_per_layer_input=8, num_kv_shared_layers=3), "F32"),
    "gemma4-large": (
        "Gemma4TextConfig",
        common(
            **_GEMMA4,
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            final_logit_softcapping=3.0,
        ),
        "F32",
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        common(
            **_GEMMA4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=8,
        ),
        "F32",
    ),
    "llama4": (
        "Llama4TextConfig",
        common(
            num_hidden_layers=5,
            head_dim=4,
            intermediate_size_mlp=32,
            num_local_experts=2,
            interleave_moe_layer_step=2,
        ),
        "F32",
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        common(
            **_EXPERTS,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        "F32",
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        common(**_WINDOWS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, num_shared_experts=2),
        "F32",
    ),
    "granitemoe-shared": (
        "GraniteMoeSharedConfig",
        common(**_EXPERTS, shared_intermediate_size=12, attention_multiplier=0.2, residual_multiplier=0.4),
        "F32",
    ),
    "exaone4": ("Exaone4Config", common(**_WINDOWS), "F32"),
    "exaone4-no-window": (
        "Exaone4Config",
        common(sliding_window=None, layer_types=["full_attention"] * 2),
        "F32",
    ),
    "falcon-7b": (
        "FalconConfig",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "multi_query": True,
            "num_kv_heads": 1,
            "new_decoder_architecture": False,
            "vocab_size": 40,
        },
        "F32",
    ),
    "falcon-h1": (
        "FalconH1Config",
        common(
            mamba_n_heads=4,
            mamba_d_head=6,
            mamba_d_ssm=24,
            mamba_d_state=6,
            mamba_n_groups=2,
            head_dim=4,
            attention_in_multiplier=0.9,
            attention_out_multiplier=0.6,
            key_multiplier=0.8,
            mlp_multipliers=[0.7, 1.2],
            ssm_in_multiplier=1.1,
            ssm_multipliers=[0.9, 0.8, 1.3, 0.7, 1.2],
            ssm_out_multiplier=0.5,
            embedding_multiplier=3.0,
            lm_head_multiplier=0.3,
        ),
        "F32",
    ),
    "falcon-40b": (
        "FalconConfig",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "vocab_size": 40,
        },
        "F32",
    ),
    "chatglm": ("GlmConfig", common(head_dim=4, rms_norm_eps=1e-5), "F32"),
    "glm4": ("Glm4Config", common(head_dim=4), "F32"),
    "glm4moe": (
        "Glm4MoeConfig",
        common(
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            head_dim=8,
            use_qk_norm=True,
            attention_bias=True,
        ),
        "F32",
    ),
    "gpt-oss": ("GptOssConfig", common(**_EXPERTS, head_dim=8, sliding_window=5), "F32"),
    "gptneox": (
        "GPTNeoXConfig",
        common("num_key_value_heads", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "F32",
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        common(
            **_EXPERTS,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.4,
        ),
        "F32",
    ),
    "hunyuan-dense": ("HunYuanDenseV1Config", common(head_dim=4), "F32"),
    "mistral3": (
        "Ministral3Config",
        common(head_dim=4, rope_parameters={**_MSCALE, "llama_4_scaling_beta": 0.1}),
        "F32",
    ),
    "mpt": (
        "MptConfig",
        {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 4, "attn_config": {"clip_qkv": 0.5}},
        "F32",
    ),
    "nemotron": ("NemotronConfig", common(head_dim=4, attention_bias=True), "F32"),
    "olmo": ("OlmoConfig", common(clip_qkv=0.5), "F32"),
    "olmo2-olmo3": ("Olmo3Config", common(**_WINDOWS), "F32"),
    "olmoe": ("OlmoeConfig", common(num_experts=4, num_experts_per_tok=2), "F32"),
    "phi2": ("PhiConfig", common(intermediate_size=64, num_key_value_heads=4), "F32"),
    "seed_oss": ("SeedOssConfig", common(head_dim=6), "F32"),
    "smollm3": ("SmolLM3Config", common(num_hidden_layers=5), "F32"),
    "granitehybrid": (
        "GraniteMoeHybridConfig",
        common(**_GRANITE_HYBRID, num_local_experts=4, num_experts_per_tok=2),
        "F32",
    ),
    "granitehybrid-dense": ("GraniteMoeHybridConfig", common(**_GRANITE_HYBRID, num_local_experts=0), "F32"),
    "granitehybrid-bamba": (
        "BambaConfig",
        common(
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_d_state=6,
            mamba_n_groups=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        "F32",
    ),
    "lfm2": ("Lfm2Config", common(layer_types=["conv", "full_attention"], block_multiple_of=8), "F32"),
    "lfm2moe": (
        "Lfm2MoeConfig",
        common(
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
        ),
        "F32",
    ),
    "jamba": (
        "JambaConfig",
        common(
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=0,
            num_experts=4,
            mamba_d_state=6,
            mamba_dt_rank=5,
        ),
        "F32",
    ),
    "mamba": ("MambaConfig", _MAMBA, "F32"),
    "mamba-falcon": ("FalconMambaConfig", _MAMBA, "F32"),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": 48,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "state_size": 6,
            "n_groups": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        "F32",
    ),
    "mamba2-q8_0": (
        "Mamba2Config",
        {
            "vocab_size": 48,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        "Q8_0",
    ),
    "nemotron_h": (
        "NemotronHConfig",
        common("num_hidden_layers", **_NEMOTRON_H, layers_block_type=["linear_attention", "full_attention", "mlp"]),
        "F32",
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        common(
            "num_hidden_layers",
            **_NEMOTRON_H,
            layers_block_type=["linear_attention", "moe", "full_attention"],
            n_routed_experts=4,
            moe_intermediate_size=8,
            moe_shared_expert_intermediate_size=12,
            routed_scaling_factor=0.5,
        ),
        "F32",
    ),
    "qwen3next": ("Qwen3NextConfig", common(**_DELTA, **_SPARSE), "F32"),
    "qwen35": ("Qwen3_5TextConfig", common(**_DELTA), "F32"),
    "qwen35-q8_0": (
        "Qwen3_5TextConfig",
        common(**_DELTA | {"linear_value_head_dim": 8}, hidden_size=32, intermediate_size=32),
        "Q8_0",
    ),
    "qwen35moe": ("Qwen3_5MoeTextConfig", common("intermediate_size", **_DELTA, **_SPARSE), "F32"),
    "starcoder": ("GPTBigCodeConfig", _GPT, "F32"),
    "starcoder-heads": ("GPTBigCodeConfig", {**_GPT, "multi_query": False}, "F32"),
}


def model_of(name: str) -> Any:
    """A random model, whose norms and biases are not ones and zeros."""
    import torch
    import transformers

    kind, values, _ = CASES[name]
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for each_name, buffer in model.named_buffers():
            if each_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model.eval()


# What the converter reads from a configuration, and transformers 5 does not write any more.
def _as_before(values: dict[str, Any]) -> dict[str, Any]:
    kind, rope = values["model_type"], values.get("rope_parameters") or {}
    if kind == "gpt_neox":
        values |= {"rotary_pct": rope.get("partial_rotary_factor", 0.25), "rotary_emb_base": rope.get("rope_theta")}
    if kind == "cohere2":
        values.setdefault("rotary_pct", 1.0)
    if kind == "mpt":
        values["architectures"] = ["MPTForCausalLM"]
    if kind in ("deepseek_v2", "deepseek_v3"):
        values["scoring_func"] = "sigmoid" if kind == "deepseek_v3" else "softmax"
    if kind == "minimax_m2":
        values["rotary_dim"] = int(values["head_dim"] * rope["partial_rotary_factor"])
    if kind == "llama4_text":
        values["architectures"] = ["Llama4ForConditionalGeneration"]
    if kind == "granitemoehybrid":
        named = {"linear_attention": "mamba", "full_attention": "attention"}
        values["layer_types"] = [named.get(each, each) for each in values["layer_types"]]
    if kind == "bamba":
        values["attn_rotary_emb"] = int(
            values["hidden_size"] / values["num_attention_heads"] * rope.get("partial_rotary_factor", 0.5)
        )
    if kind == "nemotron_h" and "layers_block_type" in values:
        values["num_hidden_layers"] = len(values["layers_block_type"])
        letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
        values["hybrid_override_pattern"] = "".join(letters[each] for each in values.pop("layers_block_type"))
        if "E" not in values["hybrid_override_pattern"]:
            values.pop("num_experts_per_tok")
    if kind in ("deepseek_v3", "glm4_moe", "exaone_moe"):
        values["num_nextn_predict_layers"] = 0
    return values


def convert(folder: Path, out: Path, kind: str) -> None:
    """Convert a folder by llama.cpp's classes, with a vocabulary of names in the place of a tokenizer's."""
    import gguf
    import torch
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class

    def set_vocab(self: Any) -> None:
        writer, count = self.gguf_writer, self.hparams["vocab_size"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([f"token {index}" for index in range(count)])
        writer.add_token_types([1] * count)
        writer.add_token_merges(["t o"])
        writer.add_eos_token_id(2)

    def below(kind: type) -> list[type]:
        return [kind, *(each for sub in kind.__subclasses__() for each in below(sub))]

    load = ModelBase.load_hparams
    ModelBase.load_hparams = staticmethod(lambda *args, **more: _as_before(load(*args, **more)))
    try:
        chosen = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
        for each in below(TextModel):
            each.set_vocab = set_vocab  # type: ignore[attr-defined]
        chosen.no_mtp = True
        file_type = gguf.LlamaFileType.ALL_F32 if kind == "F32" else gguf.LlamaFileType.MOSTLY_Q8_0
        with torch.inference_mode():
            chosen(folder, file_type, out).write()
    finally:
        ModelBase.load_hparams = load


def main() -> int:
    llama_cpp = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import torch
    import transformers

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    DATA.mkdir(exist_ok=True)
    for name in sys.argv[2:] or CASES:
        model = model_of(name)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(_as_before(json.loads(config.read_text()))))
            # Some of the converter's classes count its tokens.
            vocabulary = {f"token {index}": index for index in range(model.config.vocab_size)}
            tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
            (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
            convert(Path(folder), DATA / f"{name}.gguf", CASES[name][2])
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0]
        rows = [[round(value, 5) for value in row] for row in logits[[1, -1]].tolist()]
        recorded = {"tokens": TOKENS, "model_type": model.config.model_type, "logits of tokens 1 and 11": rows}
        (DATA / f"{name}.json").write_text(json.dumps(recorded) + "\n")
        print(f"{name}: {(DATA / f'{name}.gguf').stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
