# SPDX-License-Identifier: Apache-2.0
"""Damages small models in ways drawn from a seed, and reads each: the result is an answer or one line of error.

    python tests/helpers/fuzz_models.py --count 10000 --seed 7      # many cases
    python tests/helpers/fuzz_models.py --seed 7 --only 1234        # one of them again, with its traceback

A case is made from its seed and number alone. The process limits its address space, and a case has so much CPU time,
which is the same on a loaded machine. Cases are printed before they run, for what ends the process.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError

CPU_SECONDS = 10.0  # of one case: a healthy one takes about a hundredth of a second
MEMORY = 1 << 30  # bytes of address space beside what the process has at the start
LONGEST = 700  # characters of a message

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEATURES, LAYERS, CONTEXT, EXPERTS = 32, 4, 2, 8, 48, 2, 64, 4
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "▁"]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "ab", "▁a", "Ġa", *(f"<0x{byte:02X}>" for byte in range(31))]
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"


# GGUF files, written by hand: a writer that checks what it writes cannot write what is damaged.


def encoded(kind: int, value: Any) -> bytes:
    """A metadata value; an array is (kind of its entries, entries)."""
    if kind == TEXT:
        data = value if isinstance(value, bytes) else value.encode()
        return struct.pack("<Q", len(data)) + data
    if kind == ARRAY:
        of, entries = value
        return struct.pack("<IQ", of, len(entries)) + b"".join(encoded(of, each) for each in entries)
    return struct.pack(f"<{CODES[kind]}", value)


class Gguf:
    """Attributes: pairs: key -> (kind, value); tensors: name -> (type, shape as in the file, data)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pairs: dict[str, tuple[int, Any]] = {"general.architecture": (TEXT, kind)}
        self.tensors: dict[str, tuple[int, list[int], bytes]] = {}

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            kind = {int: U32, float: F32, str: TEXT, bool: BOOL, tuple: ARRAY}[type(value)]
            self.pairs[f"{self.kind}.{name.replace('__', '.')}"] = (kind, value)

    def tensor(self, name: str, *shape: int, value: float = 0.01) -> None:
        count = 1
        for extent in shape:
            count *= extent
        data = struct.pack("<f", value) * count
        self.tensors[f"{name}.weight"] = (0, list(reversed(shape)), data)

    def bias(self, name: str, count: int) -> None:
        self.tensors[f"{name}.bias"] = (0, [count], bytes(4 * count))

    def content(self) -> bytes:
        head = [struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.pairs))]
        for key, (kind, value) in self.pairs.items():
            head.append(encoded(TEXT, key) + struct.pack("<I", kind) + encoded(kind, value))
        at, data = 0, []
        for name, (kind, shape, values) in self.tensors.items():
            head.append(encoded(TEXT, name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at))
            data.append(values + bytes(-len(values) % 32))
            at += len(data[-1])
        whole = b"".join(head)
        return whole + bytes(-len(whole) % 32) + b"".join(data)


def healthy_gguf(kind: str) -> Gguf:
    """A file of each structure that metadata decide about."""
    file = Gguf(kind)
    file.add(
        embedding_length=HIDDEN,
        block_count=LAYERS,
        context_length=CONTEXT,
        feed_forward_length=FEATURES,
        attention__head_count=HEADS,
        attention__head_count_kv=HEADS if kind == "gpt2" else KV_HEADS,
        attention__key_length=HEAD_DIM,
        rope__freq_base=10000.0,
    )
    layer_norm = kind in ("gpt2", "stablelm", "command-r")
    file.add(**{f"attention__layer_norm{'' if layer_norm else '_rms'}_epsilon": 1e-5})
    file.tensor("token_embd", len(TOKENS), HIDDEN)
    norms = ["attn_norm", "ffn_norm"]
    rows = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
    matrices = {name: (count, HIDDEN) for name, count in rows.items()} | {"attn_output": (HIDDEN, HEADS * HEAD_DIM)}
    mlp = {"ffn_gate": (FEATURES, HIDDEN), "ffn_up": (FEATURES, HIDDEN), "ffn_down": (HIDDEN, FEATURES)}
    if kind == "llama":
        file.tensor("rope_freqs", HEAD_DIM // 2, value=1.0)
        file.add(rope__dimension_count=HEAD_DIM)
    elif kind == "granite":
        file.add(attention__scale=0.5, embedding_scale=12.0, residual_scale=0.25, logit_scale=8.0)
    elif kind == "qwen3moe":
        file.add(expert_count=EXPERTS, expert_used_count=2, expert_feed_forward_length=16)
        mlp = {
            "ffn_gate_inp": (EXPERTS, HIDDEN),
            "ffn_gate_exps": (EXPERTS, 16, HIDDEN),
            "ffn_up_exps": (EXPERTS, 16, HIDDEN),
            "ffn_down_exps": (EXPERTS, HIDDEN, 16),
        }
        matrices |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
    elif kind == "gemma3":
        file.add(attention__sliding_window=16, attention__sliding_window_pattern=2)
        file.add(rope__scaling__type="linear", rope__scaling__factor=8.0)
        norms += ["post_attention_norm", "post_ffw_norm"]
        matrices |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
    elif kind == "phi3":
        file.add(rope__dimension_count=HEAD_DIM, rope__scaling__original_context_length=32)
        file.add(rope__scaling__attn_factor=1.5)
        for name in ("rope_factors_long", "rope_factors_short"):
            file.tensor(name, HEAD_DIM // 2, value=1.5)
        matrices = {"attn_qkv": (sum(rows.values()), HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
        mlp = {"ffn_up": (2 * FEATURES, HIDDEN), "ffn_down": (HIDDEN, FEATURES)}
    elif kind == "stablelm":
        file.add(rope__dimension_count=4)
    elif kind == "gpt2":
        file.tensor("position_embd", CONTEXT, HIDDEN)
        matrices = {"attn_qkv": (3 * HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
        mlp.pop("ffn_gate")
    for layer in range(LAYERS):
        for name, shape in {**dict.fromkeys(norms, (HIDDEN,)), **matrices, **mlp}.items():
            file.tensor(f"blk.{layer}.{name}", *shape)
            if layer_norm and (kind == "gpt2" or name in norms):
                file.bias(f"blk.{layer}.{name}", shape[0])
    file.tensor("output_norm", HIDDEN)
    if layer_norm:
        file.bias("output_norm", HIDDEN)
    scores = kind in ("llama", "phi3", "gemma3")
    file.pairs |= {
        "tokenizer.ggml.model": (TEXT, "llama" if scores else "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (TEXT, TOKENS)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3 if text[0] == "<" else 1 for text in TOKENS])),
        "tokenizer.ggml.scores": (ARRAY, (F32, [-float(number) for number in range(len(TOKENS))])),
        "tokenizer.ggml.merges": (ARRAY, (TEXT, ["a b", "Ġ a"])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.chat_template": (TEXT, TEMPLATE),
    }
    if scores:
        del file.pairs["tokenizer.ggml.merges"]
    return file


KINDS = ("llama", "gpt2", "gemma3", "phi3", "granite", "qwen3moe", "stablelm")
COUNTS = (0, 1, 3, 1 << 16, (1 << 24) + 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf"), -float("inf"))


def strange_value(rng: random.Random) -> tuple[int, Any]:
    """A metadata value of any type."""
    kind = rng.randrange(13)
    if kind == ARRAY:
        of = rng.choice([*CODES, TEXT])
        return ARRAY, (of, [_of_kind(rng, of) for _ in range(rng.choice((0, 1, 2, 2, 300)))])
    return kind, _of_kind(rng, kind)


def _of_kind(rng: random.Random, kind: int) -> Any:
    if kind == TEXT:
        return rng.choice(("", "x", "1", "none", "yarn", "longrope", "llama", "gpt2", "é\n" * 2000, b"\xff\xfe", "\0"))
    if kind == BOOL:
        return rng.random() < 0.5
    if kind in (F32, F64):
        return rng.choice(FLOATS if kind == F32 else (*FLOATS, 1e308))
    bits = 8 * struct.calcsize(CODES[kind])
    if CODES[kind].islower():
        return rng.choice((0, 1, 2, -1, -(1 << bits - 1), (1 << bits - 1) - 1))
    return rng.choice([count for count in COUNTS if count < 1 << bits])


def _flip_bits(rng: random.Random, file: Gguf) -> bytes:
    content = bytearray(file.content())
    head = len(Gguf.content(file)) - sum(len(data) + -len(data) % 32 for _, _, data in file.tensors.values())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(head if rng.random() < 0.9 else len(content))
        content[at] ^= 1 << rng.randrange(8)
    return bytes(content)


def _change_types(rng: random.Random, file: Gguf) -> bytes:
    for key in rng.sample(sorted(file.pairs), rng.randint(1, 2)):
        file.pairs[key] = strange_value(rng)
    return file.content()


def _change_numbers(rng: random.Random, file: Gguf) -> bytes:
    numbers = [key for key, (kind, _) in file.pairs.items() if kind in (U32, F32)]
    for key in rng.sample(numbers, rng.randint(1, 2)):
        kind, value = file.pairs[key]
        if kind == F32:
            file.pairs[key] = (F32, rng.choice(FLOATS))
        else:
            file.pairs[key] = (U64, rng.choice((*COUNTS, value + 1, max(value - 1, 0), 2 * value)))
    return file.content()


def _change_sizes(rng: random.Random, file: Gguf) -> bytes:
    """A count of the format itself: of tensors, values, bytes, dimensions."""
    content = bytearray(file.content())
    places = [8, 16]
    at = 24
    for key, (kind, value) in file.pairs.items():
        places.append(at)
        at += 8 + len(key.encode()) + 4
        if kind == TEXT:
            places.append(at)
        if kind == ARRAY:
            places.append(at + 4)
        at += len(encoded(kind, value))
    for name, (_, shape, _) in file.tensors.items():
        places.append(at)
        at += 8 + len(name)
        places += [at + 4 + 8 * index for index in range(len(shape))]
        at += 4 + 8 * len(shape) + 12
        places.append(at - 8)  # where its data begin
    place = rng.choice(places)
    struct.pack_into("<Q", content, place, rng.choice((*COUNTS, len(content))))
    return bytes(content)


def _cut(rng: random.Random, file: Gguf) -> bytes:
    content = file.content()
    if rng.random() < 0.3:
        return content + bytes(rng.choice((1, 4096)))
    at = rng.randrange(len(content))
    return content[:at] + bytes(len(content) - at) * (rng.random() < 0.5)  # cut off, or a hole to the end


def _change_tensors(rng: random.Random, file: Gguf) -> bytes:
    name = rng.choice(sorted(file.tensors))
    kind, shape, data = file.tensors[name]
    what = rng.randrange(5)
    if what == 0:
        del file.tensors[name]
    elif what == 1:
        file.tensors[name] = (rng.choice((1, 2, 8, 12, 14, 24, 28, 30, 39, 99)), shape, data)
    elif what == 2:
        file.tensors[name] = (kind, rng.choice(([*shape, 1], shape[::-1], [len(data) // 4], [0], [])), data)
    elif what == 3:
        other = rng.choice(sorted(file.tensors))
        file.tensors[name], file.tensors[other] = file.tensors[other], file.tensors[name]
    else:
        small = [name for name in file.tensors if name.startswith("rope_")] or [name]
        kind, shape, data = file.tensors[small[0]]
        file.tensors[small[0]] = (kind, shape, struct.pack("<f", rng.choice(FLOATS)) * (len(data) // 4))
    return file.content()


def _drop(rng: random.Random, file: Gguf) -> bytes:
    del file.pairs[rng.choice(sorted(file.pairs))]
    return file.content()


GGUF_DAMAGE: tuple[Callable[[random.Random, Gguf], bytes], ...] = (
    _flip_bits,
    _change_types,
    _change_types,
    _change_numbers,
    _change_numbers,
    _change_sizes,
    _cut,
    _change_tensors,
    _drop,
)


def damaged_gguf(rng: random.Random, folder: Path) -> tuple[Path, str]:
    file = healthy_gguf(rng.choice(KINDS))
    damage = rng.choice(GGUF_DAMAGE)
    path = folder / "model.gguf"
    path.write_bytes(damage(rng, file))
    return path, f"{file.kind}: {damage.__name__}"


# Model folders.


def healthy_folder(folder: Path, kind: str) -> None:
    """kind: llama, mixtral, gptq or compressed; "sharded" has an index."""
    family = "mixtral" if kind == "mixtral" else "llama"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": family,
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": None,
        "eos_token_id": 2,
    }
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    tensors: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("F32", [len(TOKENS), HIDDEN])}
    tensors["model.norm.weight"] = ("F32", [HIDDEN])
    linears = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }
    mlp = {"gate_proj": (64, HIDDEN), "up_proj": (64, HIDDEN), "down_proj": (HIDDEN, 64)}
    if kind == "mixtral":
        config |= {"num_local_experts": 2, "num_experts_per_tok": 1}
        linears["block_sparse_moe.gate"] = (2, HIDDEN)
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for expert in range(2):
            linears |= {f"block_sparse_moe.experts.{expert}.{names[name]}": shape for name, shape in mlp.items()}
    else:
        linears |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    if kind == "gptq":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    if kind == "compressed":
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ("F32", [HIDDEN])
        for name, (rows, cols) in linears.items():
            stem = prefix + name
            if kind == "gptq":
                tensors[f"{stem}.qweight"] = ("I32", [cols // 8, rows])
                tensors[f"{stem}.scales"] = ("F16", [cols // 32, rows])
                tensors[f"{stem}.qzeros"] = ("I32", [cols // 32, rows // 8])
            elif kind == "compressed":
                tensors[f"{stem}.weight_packed"] = ("I32", [rows, cols // 8])
                tensors[f"{stem}.weight_scale"] = ("F16", [rows, cols // 32])
                tensors[f"{stem}.weight_shape"] = ("I64", [2])
            else:
                tensors[f"{stem}.weight"] = ("F32", [rows, cols])
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(_safetensors(tensors))
    if kind == "sharded":
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<unk>"}
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [2], "bos_token_id": 1},
        "tokenizer_config.json": {**special, "add_bos_token": True, "chat_template": TEMPLATE},
        "special_tokens_map.json": special,
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": TOKENS[number], "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}
                for number in range(3)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {text: number for number, text in enumerate(TOKENS)},
                "merges": [["a", "b"], ["Ġ", "a"]],
            },
        },
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    if kind == "mixtral":
        (folder / "chat_template.jinja").write_text(TEMPLATE)


def _safetensors(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    header, data, at = {}, [], 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "I32": 4, "F16": 2, "I64": 8}[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        if dtype == "I64":  # the shape of a packed matrix
            packed = tensors[name.removesuffix("_shape") + "_packed"][1]
            data.append(struct.pack("<2q", packed[0], packed[1] * 8))
        else:
            data.append(b"\x00\x3c" * (size // 2))
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data)


STRANGE = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, 64.0, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 63, 10**400, 1e308, -1e308,
    float("nan"), float("inf"), "", "x", "1", "é" * 5000, "a\nb", [], {}, [None], ["x"], [[1, 2], [3]], [0] * 3,
    {"x": 1}, {"content": 5}, {"rope_type": "yarn"}, {"rope_type": ["x"]}, ["full_attention"] * 2, [1e308],
)  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(min(len(value), 4)):
            yield from _paths(value[key], (*at, key))


def _change_json(rng: random.Random, path: Path) -> None:
    whole = json.loads(path.read_text())
    for _ in range(rng.randint(1, 2)):
        place = rng.choice(list(_paths(whole)))
        inner = whole
        for key in place[:-1]:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.15:
            del inner[place[-1]]
        else:
            inner[place[-1]] = copy.deepcopy(rng.choice(STRANGE))
        if not whole:
            break
    path.write_text(json.dumps(whole))


def _change_header(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = rng.choice(sorted(header))
    what = rng.choice(("dtype", "shape", "data_offsets", "name"))
    if what == "dtype":
        header[name][what] = rng.choice(("F16", "BF16", "F64", "I8", "I32", "U8", "F8_E4M3", "BOOL", "X", 5))
    elif what == "shape":
        shape = header[name][what]
        header[name][what] = rng.choice(
            (shape[::-1], [1, *shape], [1 << 61] * 40, [0], [], "x", [-1], [1e308], [shape])
        )
    elif what == "data_offsets":
        header[name][what] = rng.choice(([0, 0], [0, 1 << 62], [4, 0], [], "x", [0.5, 1], [None, None]))
    else:
        header[name + rng.choice((".x", "\n", "x" * 5000))] = header.pop(name)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _change_bytes(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(min(len(content), 6000))] = rng.randrange(256)
    path.write_bytes(content)


def _replace(rng: random.Random, path: Path) -> None:
    deep = 100_000
    path.write_bytes(
        rng.choice(
            (
                b"",
                b"\xff\xfe\x00",
                b"[" * deep,
                b'{"a":' * deep + b"1" + b"}" * deep,
                b'{"chat_template": ' + b"[" * deep + b"]" * deep + b"}",
                b"null",
                b"5",
                b'{"added_tokens": ' + b"9" * 5000 + b"}",
                b"{{" * 2000,
                b"{% if x %}" * 200,
                b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}",
                path.read_bytes()[: rng.randrange(path.stat().st_size or 1)],
            )
        )
    )


def _take_away(rng: random.Random, path: Path) -> None:
    path.unlink()
    if rng.random() < 0.5:
        path.mkdir()


def damaged_folder(rng: random.Random, folder: Path) -> tuple[Path, str]:
    kind = rng.choice(("llama", "mixtral", "gptq", "compressed", "sharded"))
    model = folder / "model"
    healthy_folder(model, kind)
    path = rng.choice(sorted(model.iterdir()))
    if path.suffix == ".json" and rng.random() < 0.75:
        damage: Callable[[random.Random, Path], None] = _change_json
        if rng.random() < 0.5:
            path = model / "config.json"
    elif path.suffix == ".safetensors" and rng.random() < 0.6:
        damage = _change_header
    else:
        damage = rng.choice((_change_bytes, _replace, _take_away))
    damage(rng, path)
    return model, f"{kind}: {damage.__name__} of {path.name}"


# Reading them.


def read(path: Path, folder: Path) -> None:
    """All that `generate` reads of a model, and two tokens of it."""
    from anyaccel import _llm
    from anyaccel.inference.checkpoints.counts import check_folder, check_gguf
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.spec.mapping import Unsupported
    from anyaccel.inference.text.gguf_tokenizer import write_tokenizer
    from anyaccel.inference.text.tokenizer import TextTokenizer, end_tokens

    problems: list[AnyAccelError] = []
    try:
        native = load_native(path, ModelOptions("auto", threads=1, cache_bytes=1 << 20))
        ends = end_tokens(native.generation_config, native.config)
        options = {"max_new_tokens": 2, "temperature": 0.0, "end_tokens": [end for end in ends if end < len(TOKENS)]}
        request = _llm.Request(native.model, [1, 3, 4], options)
        for _ in range(2):
            native.model.step([request])
        request.finish()
    except AnyAccelError as error:
        problems.append(error)
    if problems and isinstance(problems[0], Unsupported):
        try:  # before transformers gets it
            check_gguf(path) if path.is_file() else check_folder(path, list)
        except AnyAccelError as error:
            problems.append(error)
    try:
        place = path
        if path.is_file():
            place = folder / "tokenizer"
            place.mkdir()
            write_tokenizer(path, place)
        tokenizer = TextTokenizer(place)
        tokenizer.decode(tokenizer.encode("ab a"))
        if tokenizer.has_chat_template:
            tokenizer.chat([{"role": "user", "content": "ab"}])
    except AnyAccelError as error:
        problems.append(error)
    for error in problems:
        said = str(error)
        assert said and "\n" not in said and len(said) < LONGEST, f"not one short line: {said!r}"
        assert "of a wrong kind" not in said, f"a value that nobody has checked: {said}"


class TooLong(BaseException):
    """A case took too much CPU time."""


def _stop(number: int, frame: Any) -> None:
    raise TooLong(f"more than {CPU_SECONDS} s of CPU time in {frame.f_code.co_qualname}")


def case(seed: int, number: int, folder: Path) -> str:
    """Make a case and read it; returns what was damaged."""
    rng = random.Random(f"{seed}-{number}")
    path, what = rng.choice((damaged_gguf, damaged_folder))(rng, folder)
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        read(path, folder)
    except (Exception, TooLong) as error:
        error.add_note(f"case {number} of seed {seed}: {what}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return what


def limit_memory() -> None:
    """Of this process, from now on."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    limit_memory()
    failures = 0
    for number in range(options.count) if options.only is None else [options.only]:
        print(f"case {number}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="anyaccel-fuzz-"))
        try:
            case(options.seed, number, folder)
        except (Exception, TooLong):  # noqa: BLE001  what it prints is the result
            failures += 1
            print(traceback.format_exc(), flush=True)
        finally:
            shutil.rmtree(folder)
    print(f"{failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
