# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a GGUF file a model may leave out: all others that it does not use are an error, as in llama.cpp.

A file whose metadata give fewer layers or another architecture than it has tensors for would run, and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Collection

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.outside import Values, line, shown

# Other parts of a model of text, pictures and sound, in one file: the encoder of pictures, the one of sound, and what
# brings their output to the text model's width. Nothing of them is computed for a text.
_ENCODERS = ("v.", "a.", "mm.")


def check_all_used(source: GgufSource, used: Collection[str]) -> None:
    """Check that a model made of a file's tensors leaves none of them out that its answers depend on.

    Args:
        used: the file's names of tensors that the model reads.

    Raises:
        ModelError: it does.
    """
    left = [name for name in source.names() if name not in used and not _is_no_part(source, name)]
    if not left:
        return
    path = source.file_of(left[0]).path
    kind = Values(source.metadata, f"{path}: ").text("general.architecture")
    layers = source.metadata.get(f"{kind}.block_count")
    more = f", nor are {len(left) - 1} others" if len(left) > 1 else ""
    raise ModelError(
        f"{path}: tensor {shown(left[0])} is no part of a model of architecture '{line(kind)}' with "
        f"block_count={shown(layers)}{more}: the file is damaged, or of a kind that is not known here"
    )


def _is_no_part(source: GgufSource, name: str) -> bool:
    """Whether the next token does not depend on a tensor that is not used."""
    if name.startswith(_ENCODERS):
        return True
    if name == "rope_freqs.weight":
        # Divisors of the rotary frequencies; ones change nothing.
        info = source.file_of(name).infos[name]
        return info.type == "f32" and set(source.file_of(name).floats(name, info.shape)) == {1.0}
    # The layers that guess several tokens at once are the last ones; only speculative decoding runs them.
    values = Values(source.metadata, f"{source.files[0].path}: ")
    kind = values.text("general.architecture")
    guessing = values.whole(f"{kind}.nextn_predict_layers", 0)
    words = name.split(".")
    if not guessing or words[0] != "blk" or len(words) < 3 or not words[1].isdecimal():
        return False
    layers = values.whole(f"{kind}.block_count")
    return layers - guessing <= int(words[1]) < layers
