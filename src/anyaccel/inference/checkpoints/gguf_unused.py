# SPDX-License-Identifier: Apache-2.0
"""Checks that a model uses all tensors of its GGUF file, except for some that it may leave out, as in llama.cpp.

A file whose metadata describe fewer layers or another architecture than its tensors would run, and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Collection

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.validation import Fields, one_line, short_repr

# Prefixes of a multimodal model's vision encoder, audio encoder and projectors, which are not computed for text.
_ENCODERS = ("v.", "a.", "mm.")


def check_all_used(source: GgufSource, used: Collection[str]) -> None:
    """Check that a model uses all tensors of its file that its answers depend on.

    Args:
        used: the names, in the file, of the tensors that the model reads.

    Raises:
        ModelError: it leaves one out.
    """
    left = [name for name in source.names() if name not in used and not _may_be_unused(source, name)]
    if not left:
        return
    path = source.file_of(left[0]).path
    kind = Fields(source.metadata, f"{path}: ").text("general.architecture")
    layers = source.metadata.get(f"{kind}.block_count")
    more = f", nor are {len(left) - 1} others" if len(left) > 1 else ""
    raise ModelError(
        f"{path}: tensor {short_repr(left[0])} is no part of a model of architecture '{one_line(kind)}' with "
        f"block_count={short_repr(layers)}{more}: the file is damaged, or of a kind that is not known here"
    )


def _may_be_unused(source: GgufSource, name: str) -> bool:
    """Whether the next token does not depend on this tensor, so that the model may leave it out."""
    if name.startswith(_ENCODERS):
        return True
    if name == "rope_freqs.weight":
        # Divisors of the rotary frequencies, which have no effect if all are 1.
        info = source.file_of(name).infos[name]
        return info.type == "f32" and set(source.file_of(name).floats(name, info.shape)) == {1.0}
    # The last layers may be for multi-token prediction, which only speculative decoding runs.
    values = Fields(source.metadata, f"{source.files[0].path}: ")
    kind = values.text("general.architecture")
    guessing = values.get_int(f"{kind}.nextn_predict_layers", 0)
    words = name.split(".")
    # Keys and values of layers that see those of earlier ones.
    sharing = values.get_int(f"{kind}.attention.shared_kv_layers", 0)
    if sharing and len(words) == 4 and words[1].isdecimal() and words[2] in ("attn_k", "attn_v", "attn_k_norm"):
        return int(words[1]) >= values.get_int(f"{kind}.block_count") - sharing
    if not guessing or words[0] != "blk" or len(words) < 3 or not words[1].isdecimal():
        return False
    layers = values.get_int(f"{kind}.block_count")
    return layers - guessing <= int(words[1]) < layers
