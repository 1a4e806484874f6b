# SPDX-License-Identifier: Apache-2.0
"""Every causal LM that transformers has, as far as a tiny one can be built: two ranks give the logits of one.

Nothing may be divided wrongly without a word, whoever wrote the model. Slow; `make test-all` runs it.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import anyaccel
import ranks
from anyaccel import comm
from anyaccel.errors import ModelError

pytestmark = pytest.mark.slow

# Whatever of these a configuration has is set; families have many names for the same thing.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), 48),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "ffn_hidden_size", "decoder_ffn_dim"), 80
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "attention_heads"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "intermediate_size_mlp": 80,
    "shared_expert_intermediate_size": 40,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "rotary_dim": 4,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "global_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "zero_expert_num": 0,
    "mamba_d_state": 8,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "sliding_window": 4,
    "attention_window_size": 8,
    "layer_types": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LARGEST = 30_000_000


def _architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _sizes(configuration: type) -> dict[str, Any]:
    known = set(inspect.signature(configuration.__init__).parameters)
    for base in configuration.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    renamed = getattr(configuration, "attribute_map", {})
    return {name: value for name, value in _SIZES.items() if name in known and name not in renamed}


def tiny(architecture: str) -> Any:
    """A small random model, the same on every call.

    Raises:
        Exception: the configuration does not take these sizes; whatever transformers raises.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    configuration = CONFIG_MAPPING[architecture]
    sizes = _sizes(configuration)
    config = configuration(**sizes)
    text = config.get_text_config()
    for name, part in getattr(configuration, "sub_configs", {}).items():
        if text is not config and getattr(config, name, None) is text:
            config = configuration(**sizes, **{name: _sizes(part)})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > _LARGEST:
        raise ValueError(f"{count} parameters are too many for a test")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        output = model(torch.tensor([[5, 17, 99, 3, 64, 28, 101]]), use_cache=True)
        collected, cache = [output.logits[0]], getattr(output, "past_key_values", None)
        for token in (7, 77) if cache is not None else ():
            collected.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(collected).float()


def compare(architecture: str) -> str | dict[str, str | float]:
    """For each runtime the relative error of the logits or why it refuses; or why there is nothing to compare."""
    try:
        want = logits_of(tiny(architecture))
    except Exception as error:  # noqa: BLE001  transformers' own, before anything of ours is called
        return f"no tiny model of it can be built and run: {type(error).__name__}: {str(error)[:200]}"
    found: dict[str, str | float] = {}
    for runtime in ("plain", "auto"):
        try:
            engine = anyaccel.init_inference(
                tiny(architecture),
                dtype="fp32",
                runtime=runtime,
                tensor_parallel={"tp_size": comm.get_world_size()},
            )
        except ModelError as refusal:
            found[runtime] = f"refused: {refusal}"
        else:
            found[runtime] = float((logits_of(engine) - want).abs().max() / want.abs().max())
    return found


@pytest.mark.parametrize("architecture", _architectures())
def test_two_ranks_give_the_logits_of_one(architecture: str) -> None:
    first, second = ranks.run(compare, 2, architecture, timeout=110)
    if isinstance(first, str):
        assert isinstance(second, str)
        pytest.skip(first)
    assert first.keys() == second.keys()
    for runtime, error in first.items():
        other = second[runtime]
        if isinstance(error, str):
            assert other == error
        else:
            assert error < 1e-4, runtime
            assert other < 1e-4, runtime
    if all(isinstance(error, str) for error in first.values()):
        pytest.skip(str(first))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "xglm"])
def test_tiny_models_can_be_built(architecture: str) -> None:
    """Else the test above would compare nothing and pass."""
    assert logits_of(tiny(architecture)).isfinite().all()
