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
    "idefics2": _IMAGES,
    "idefics3": _IMAGES,
    "internvl": _IMAGES,
    "llava": _IMAGES,
    "llava_next": _IMAGES,
    "llava_next_video": _IMAGES,
    "llava_onevision": _IMAGES,
    "mistral3": _IMAGES,
    "qwen2_5_vl": _IMAGES,
    "qwen2_audio": _SOUND,
    "qwen2_vl": _IMAGES,
    "qwen3_vl": _IMAGES,
    "qwen3_vl_moe": _IMAGES,
    "smolvlm": _IMAGES,
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
}
# What these decoders always do, and the text models only if they are told.
_ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
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
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


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
    """The configuration of a model's decoder, as of a text model of its own; None if it is no such model.

    Args:
        config: config.json of the whole.
        has_head: whether the checkpoint has a head of its own; without one it is tied, whatever the config says.

    Raises:
        ModelError: a value is of a wrong kind.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READS:
        return None
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
            found[name] = kept | {"type": "default", "rope_type": "default"}
    return found | _ALWAYS.get(own, {}) | {"model_type": _SAME.get(own, own)}
