# SPDX-License-Identifier: Apache-2.0
"""The language models of models that also read images or sound, as configurations of plain decoders. Torch-free.

In these models such input takes the place of embeddings, and the decoder behind it is that of a text model: without
it they compute what that model computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anyaccel.inference.checkpoints.sources import Tensor, TensorSource
from anyaccel.validation import Fields

_IMAGES, _SOUND = "no image", "no sound"
# model_type -> what it reads beside text.
READS = {
    "aya_vision": _IMAGES,
    "cohere2_vision": _IMAGES,
    "exaone4_5": _IMAGES,
    "glm46v": _IMAGES,
    "glm4v": _IMAGES,
    "glm4v_moe": _IMAGES,
    "got_ocr2": _IMAGES,
    "idefics2": _IMAGES,
    "idefics3": _IMAGES,
    "internvl": _IMAGES,
    "kimi_k25": _IMAGES,
    "kimi_vl": _IMAGES,
    "lighton_ocr": _IMAGES,
    "llava": _IMAGES,
    "llava_next": _IMAGES,
    "llava_next_video": _IMAGES,
    "llava_onevision": _IMAGES,
    "mistral3": _IMAGES,
    "ovis2": _IMAGES,
    "qwen2_5_vl": _IMAGES,
    "qwen2_audio": _SOUND,
    "qwen2_vl": _IMAGES,
    "qwen3_5": _IMAGES,
    "qwen3_5_moe": _IMAGES,
    "qwen3_vl": _IMAGES,
    "qwen3_vl_moe": _IMAGES,
    "smolvlm": _IMAGES,
    "video_llama_3": _IMAGES,
    "video_llava": _IMAGES,
    "vipllava": _IMAGES,
    "voxtral": _SOUND,
}
# Decoders with an own name -> the text model that computes the same where there is only text.
_SAME = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
}
# Text models that are published with code of their own, which is that of a model of transformers.
_WITH_OWN_CODE = ("kimi_k2", "mimo")
# What these decoders always do, and the text models only if they are told.
_ALWAYS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True},
}
# The same of whole models: their logits are without the decoder's factor.
_ALWAYS_WHOLE: dict[str, dict[str, Any]] = {
    "aya_vision": {"logit_scale": 1.0},
    "cohere2_vision": {"logit_scale": 1.0},
}
# What these decoders take for a value that is missing, where the text model takes another.
_MISSING: dict[str, dict[str, Any]] = {
    "glm4v_text": {
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    "glm4v_moe_text": {"partial_rotary_factor": 1.0, "attention_bias": True},
}
# What the outer level of a config says of the text, where it says it.
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
# transformers' text models where a config does not name its own.
_DEFAULTS = {"mistral3": "mistral", "voxtral": "llama", "qwen2_audio": "qwen2", "idefics2": "mistral"}


# Beginnings of the decoder's tensors -> those of a text model.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
_OWN = ("model.layers.", "model.mtp_layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


class TextPart:
    """The decoder's tensors of a source, under the names of a text model."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for name in source.names():
            begin = next((each for each in _PREFIXES if name.startswith(each)), "")
            plain = _PREFIXES.get(begin, "") + name.removeprefix(begin)
            if plain.startswith(_OWN):
                self._stored[plain] = name

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(self._stored.get(name, name))

    def release(self, name: str) -> None:
        self._source.release(self._stored.get(name, name))


def text_part(config: Mapping[str, Any], has_head: bool) -> dict[str, Any] | None:
    """The configuration of a model's decoder, as of a text model of transformers; None where it is one already.

    Args:
        config: config.json of the whole.
        has_head: whether the checkpoint has a head of its own; without one it is tied, whatever the config says.

    Raises:
        ModelError: a value is of a wrong kind.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READS:
        return {**config, "model_type": _SAME[kind]} if kind in _WITH_OWN_CODE else None
    outer = Fields(config, "config: ")
    part = outer.mapping("text_config")
    values = part.known() or {name: value for name, value in config.items() if name != "vision_config"}
    own = Fields(values, part.where).text("model_type", _DEFAULTS.get(kind, "llama"))
    found = {name: value for name, value in values.items() if name != "architectures"}
    found |= {name: config[name] for name in _OUTER if outer.has(name)}
    tied = outer if outer.has("tie_word_embeddings") else Fields(values, part.where)
    found["tie_word_embeddings"] = not has_head or tied.get_bool("tie_word_embeddings")
    for name in ("rope_scaling", "rope_parameters"):
        rope = Fields(values, part.where).mapping(name).known() if name in values else {}
        if "mrope_section" in rope:  # positions of three kinds, which are all the same for text
            kept = {each: value for each, value in rope.items() if not each.startswith("mrope")}
            of_text = Fields(rope, part.where).text("rope_type", "") or Fields(rope, part.where).text("type", "")
            of_text = "default" if of_text in ("", "mrope") else of_text
            found[name] = kept | {"type": of_text, "rope_type": of_text}
    if own == "glm4v_text":  # its heads are not of the text model's usual size
        sizes = Fields({"hidden_size": 4096, "num_attention_heads": 32} | values, part.where)
        found["head_dim"] = sizes.get_int("hidden_size", minimum=1) // sizes.get_int("num_attention_heads", minimum=1)
    always = _ALWAYS.get(own, {}) | _ALWAYS_WHOLE.get(kind, {})
    return _MISSING.get(own, {}) | found | always | {"model_type": _SAME.get(own, own)}
