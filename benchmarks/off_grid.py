# SPDX-License-Identifier: Apache-2.0
"""A copy of a Llama whose weights lie on no grid and which computes the same: for measuring what quantising costs.

A model that was made of a 4-bit file has weights that 4 bits hold exactly, in the groups of that file. Here its
features change places: those of the residual stream by one permutation, those inside each MLP by one of its own, and
the values of each attention head are turned by an orthogonal matrix. A group of 32 columns then holds weights of many
groups of the old file, with their many scales, and weights keep their sizes; norms, the tied embedding and the rotary
positions stay as they are. Exact but for the rounding to bf16 of the values' and the attention outputs' weights.

With --gguf, a GGUF file of the same model in bf16 too, whose metadata are those of the file given.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Moves:
    """Where the features of a model go: the same for its folder and its GGUF file."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", heads)
        self.shared = heads // self.kv_heads
        width = config.get("head_dim") or hidden // heads
        made = torch.Generator().manual_seed(seed)
        self.residual = torch.randperm(hidden, generator=made)
        layers = range(config["num_hidden_layers"])
        self.inner = [torch.randperm(inner, generator=made) for _ in layers]
        self.turns = [
            [torch.linalg.qr(torch.randn(width, width, generator=made))[0] for _ in range(self.kv_heads)]
            for _ in layers
        ]

    def moved(self, kind: str, layer: int, values: Tensor) -> Tensor:
        """A tensor of the copy; `kind`: norm, embedding, qk, v, out, up (or gate) or down."""
        if kind == "norm":
            return values[self.residual]
        if kind == "up":
            return values[self.inner[layer]][:, self.residual]
        if kind == "down":
            return values[self.residual][:, self.inner[layer]]
        if kind == "v":
            return torch.block_diag(*self.turns[layer]) @ values[:, self.residual].float()
        if kind == "out":
            each = [turn for turn in self.turns[layer] for _ in range(self.shared)]
            return values[self.residual].float() @ torch.block_diag(*each).T
        return values[:, self.residual]  # embedding, queries and keys


_OF_FOLDER = {
    "input_layernorm": "norm", "post_attention_layernorm": "norm", "q_proj": "qk", "k_proj": "qk", "v_proj": "v",
    "o_proj": "out", "up_proj": "up", "gate_proj": "up", "down_proj": "down",
}  # fmt: skip
_OF_GGUF = {
    "attn_norm": "norm", "ffn_norm": "norm", "attn_q": "qk", "attn_k": "qk", "attn_v": "v", "attn_output": "out",
    "ffn_up": "up", "ffn_gate": "up", "ffn_down": "down", "output_norm": "norm",
}  # fmt: skip
_OUTSIDE = {"model.norm": "norm", "model.embed_tokens": "embedding", "lm_head": "embedding"}


def kind_of(name: str) -> tuple[str, int]:
    """What a tensor is, and of which layer; 0 for those of none."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return _OF_GGUF[parts[-1]], int(parts[1])
    if parts[:2] == ["model", "layers"]:
        return _OF_FOLDER[parts[-1]], int(parts[2])
    if name in ("output_norm.weight", "token_embd.weight", "output.weight"):
        return _OF_GGUF.get(parts[0], "embedding"), 0
    return _OUTSIDE[".".join(parts)], 0


def write_folder(source: Path, out: Path, moves: Moves) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                found = {
                    name: moves.moved(*kind_of(name), opened.get_tensor(name)).bfloat16().contiguous()
                    for name in opened.keys()  # noqa: SIM118 (it is no dictionary)
                }
            save_file(found, out / file.name, {"format": "pt"})
        elif file.is_file():
            shutil.copyfile(file, out / file.name)


def write_gguf(source: Path, out: Path, moves: Moves) -> None:
    import gguf

    known = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for key, value in known.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type=of)
    for tensor in known.tensors:
        if tensor.name.startswith("rope_"):
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        kind, layer = kind_of(tensor.name)
        moved = moves.moved(kind, layer, values).contiguous()
        if kind == "norm":
            writer.add_tensor(tensor.name, moved.numpy())
        else:
            data = moved.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face folder of a Llama in 16 bits")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same model in 16 bits: OUT.gguf is made of it")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = json.loads((options.source / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        parser.error(f"{options.source}: only Llama models without biases are known here")
    moves = Moves(config, options.seed)
    write_folder(options.source, options.out, moves)
    if options.gguf:
        write_gguf(options.gguf, options.out.with_suffix(".gguf"), moves)


if __name__ == "__main__":
    main()
