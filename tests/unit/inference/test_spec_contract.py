# SPDX-License-Identifier: Apache-2.0
"""The decoder's contract is written in Python and in C++: the two have the same fields, types, defaults and weights."""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from pathlib import Path
from typing import Any, get_args

import pytest

from anyaccel.inference.checkpoints.gguf_types import HELD
from anyaccel.inference.checkpoints.sources import BLOCKS
from anyaccel.inference.native import formats
from anyaccel.inference.options import GROUP_SIZES
from anyaccel.inference.spec import decoder
from anyaccel.inference.spec.packed_formats import FORMATS, ScaleKind
from anyaccel.inference.spec.stored import spec_from_dict

CSRC = Path(__file__).parents[3] / "csrc"
HEADER = (CSRC / "llm/decoder/spec.h").read_text()
READER = (CSRC / "bindings" / "llm_spec.cpp").read_text()
# Python's class -> C++'s struct and the function that reads it.
STRUCTS = {
    decoder.Norm: ("NormSpec", "read_norm"),
    decoder.Rope: ("RopeSpec", "read_rope"),
    decoder.QkNorm: ("QkNormSpec", "read_qk_norm"),
    decoder.Mla: ("MlaSpec", "read_mla"),
    decoder.Indexer: ("IndexerSpec", "read_indexer"),
    decoder.Attention: ("AttentionSpec", "read_attention"),
    decoder.ShortConv: ("ShortConvSpec", "read_short_conv"),
    decoder.SelectiveScan: ("SelectiveScanSpec", "read_scan"),
    decoder.GatedLru: ("GatedLruSpec", "read_lru"),
    decoder.LinearAttention: ("LinearAttentionSpec", "read_linear_attention"),
    decoder.Mlp: ("MlpSpec", "read_mlp"),
    decoder.Moe: ("MoeSpec", "read_moe"),
    decoder.LayerInputs: ("LayerInputsSpec", "read_layer_inputs"),
    decoder.RelativeBias: ("RelativeBiasSpec", "read_relative_bias"),
    decoder.Distances: ("DistancesSpec", "read_distances"),
    decoder.HiddenInputs: ("HiddenInputsSpec", "read_hidden_inputs"),
    decoder.InputGate: ("InputGateSpec", "read_input_gate"),
    decoder.Laurel: ("LaurelSpec", "read_laurel"),
    decoder.SideBlock: ("SideBlockSpec", "read_side_block"),
    decoder.Streams: ("StreamsSpec", "read_streams"),
    decoder.Layer: ("LayerSpec", "read_layer"),
    decoder.DecoderSpec: ("DecoderSpec", "read_spec"),
}
FIELD = re.compile(r"^  ([\w:<>]+) (\w+)(?: = ([^;]+))?;", re.MULTILINE)
NUMBERS = {int: ("int", "int64_t"), float: ("float", "double"), bool: ("bool",)}


def body_after(text: str, head: str) -> str:
    """What stands between this head and the closing brace at the beginning of a line."""
    found = re.search(rf"^(?:struct |(?:llm::)?\w+ ){head}\b[^;{{]*\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    assert found, head
    return found[1]


def plain(name: str) -> str:
    return name.lower().replace("_", "")


def check_field(cls: type, field: dataclasses.Field[Any], hint: Any, kind: str, default: str | None) -> None:
    """One field of a dataclass against its declaration in C++."""
    where = f"{cls.__name__}.{field.name}: {kind}"
    required = field.default is dataclasses.MISSING
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is types.UnionType:
        accepted = NUMBERS[inner[0]] if inner[0] in NUMBERS else (STRUCTS[inner[0]][0],)
        assert kind in {f"std::optional<{each}>" for each in accepted}, where
        assert required or field.default is None, where
    elif typing.get_origin(hint) is tuple:
        accepted = NUMBERS[inner[0]] if inner[0] in NUMBERS else (STRUCTS[inner[0]][0],)
        assert kind in {f"std::vector<{each}>" for each in accepted}, where
        assert required or field.default == (), where
    elif typing.get_origin(hint) is typing.Literal:
        assert required or (default or "").rpartition("::")[2] == field.default, where
    elif hint in STRUCTS:
        assert kind == STRUCTS[hint][0], where
    else:
        assert kind in NUMBERS[hint], where
        if not required:
            text = {"true": "1", "false": "0"}.get(default or "", (default or "").rstrip("f"))
            assert float(text) == float(field.default), f"{where} is {default}, Python's default {field.default}"


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
def test_python_and_cpp_have_the_same_fields(cls: Any) -> None:
    struct, reader = STRUCTS[cls]
    declared = {name: (kind, default) for kind, name, default in FIELD.findall(body_after(HEADER, struct))}
    read = body_after(READER, reader)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # Python has one field for either of several kinds, C++ an optional one for each.
    if cls is decoder.Layer:
        for either, names in {
            "mlp": ("mlp", "moe"),
            "recurrent": ("short_conv", "linear_attention", "scan", "lru"),
        }.items():
            kinds = [kind for kind in typing.get_args(hints.pop(either)) if kind is not types.NoneType]
            assert [declared.pop(name)[0] for name in names] == [f"std::optional<{STRUCTS[kind][0]}>" for kind in kinds]
            del fields[either]
    assert list(declared) == list(fields)
    for name, field in fields.items():
        check_field(cls, field, hints[name], *declared[name])
        assert re.search(rf'from, "{name}"', read), f"{reader} does not read {name}"
        assert re.search(rf"\b(?:spec|norm|rope)\.{name}\b", read), f"{reader} does not set {name}"


def test_python_and_cpp_have_the_same_words_for_choices() -> None:
    texts = dict(re.findall(r'from,\s*"(\w+)", \w+\.\w+,\s*(\{\{.*?\}\})\)', READER, re.DOTALL))
    texts["activation"] = READER.partition("kActivations")[2].partition(";")[0]
    wanted = {
        field.name: typing.get_args(typing.get_type_hints(cls)[field.name])
        for cls in STRUCTS
        for field in dataclasses.fields(cls)
        if typing.get_origin(typing.get_type_hints(cls)[field.name]) is typing.Literal
    }
    assert texts.keys() == wanted.keys()
    for name, words in wanted.items():
        pairs = re.findall(r'\{"(\w+)", [\w:]*::(\w+)\}', texts[name])
        assert all(text == meaning for text, meaning in pairs), name
        assert sorted(text for text, _ in pairs) == sorted(words), name


def test_python_and_cpp_have_the_same_formats() -> None:
    table = (CSRC / "llm/pack/matrix.h").read_text()
    row = r'\{"(\w+)", (\d+), \{([-\d, ]+)\}(?:, Minima::(\w+))?(?:, \d)?(?:, (\w+))?\}'
    rows = re.findall(row, table)
    names = [name for name, *_ in rows]
    assert list(FORMATS) == names
    assert re.search(rf"enum class Format : uint8_t \{{ {', '.join(names)} \}};", table)
    groups = {name: [group for group in map(int, each.split(",")) if group >= 0] for name, _, each, *_ in rows}
    for name, bits, _, minima, codes in rows:
        mine = FORMATS[name]
        assert (mine.bits, list(mine.groups), mine.minima) == (int(bits), groups[name], minima or "may")
        values = re.search(rf"{codes}\[16\] = \{{(.*?)\}};", table, re.DOTALL) if codes else None
        assert mine.codes == (tuple(map(int, values[1].split(","))) if values else None)
    assert list(GROUP_SIZES) == groups["i4"]
    held = [*formats._STORED.values(), *formats._FLOATS.values(), *(each.format for each in HELD.values())]
    assert all(group in groups[name] and (group or not minimum) for name, group, minimum in held)
    assert all(FORMATS[name].minima in ("may", "always" if minimum else "never") for name, _, minimum in held)


def test_python_and_cpp_have_the_same_types_of_what_is_stored() -> None:
    read = re.findall(r'\{"(\w+)", SourceType::(\w+)\}', READER)
    assert all(text == meaning for text, meaning in read)
    blocks = {name for name, held in HELD.items() if held.read_as}
    assert {text for text, _ in read} - blocks == BLOCKS.keys() == formats._STORED.keys()
    assert blocks < {text for text, _ in read}
    kinds = re.findall(r'\{"(\w+)", ScaleKind::(\w+)\}', READER)
    assert tuple(text for text, meaning in kinds if text == meaning) == get_args(ScaleKind)


def test_a_spec_comes_back_from_what_json_makes_of_it() -> None:
    norm = decoder.Norm("layer", 1e-5, bias=True)
    mlp = decoder.Mlp(8, "relu2", gated=False)
    attention = decoder.Attention(4, 2, 8, 6, 0.5, alibi=(0.5, 0.25), qk_norm=decoder.QkNorm(norm, across=True))
    latent = dataclasses.replace(attention, qk_norm=None, mla=decoder.Mla(0, 8, 4, 4, None, norm))
    layers = (
        decoder.Layer(attention, mlp, attn_norm=norm),
        decoder.Layer(latent, decoder.Moe(4, 2, mlp, shared=mlp), mlp_post_norm=norm),
        decoder.Layer(None, mlp, recurrent=decoder.ShortConv(16, 3)),
        decoder.Layer(None, mlp, recurrent=decoder.SelectiveScan(16, 4, 3, 5, norm=norm)),
        decoder.Layer(None, mlp, recurrent=decoder.GatedLru(2, 8, 3, "gelu")),
        decoder.Layer(attention, None, recurrent=decoder.LinearAttention(4, 2, 8, 8, norm=norm)),
        decoder.Layer(attention, mlp, recurrent=decoder.ShortConv(16, 3), side_block=decoder.SideBlock(norm, 5)),
        decoder.Layer(attention, mlp, laurel=decoder.Laurel(4, norm, 0.5), streams=decoder.Streams(3, norm)),
    )
    spec = decoder.DecoderSpec(100, 16, layers, norm, ropes=(decoder.Rope((1.0, 0.5)),), embedding_norm=norm, streams=3)
    assert spec_from_dict(dataclasses.asdict(spec)) == spec


def test_weights_are_listed_as_far_as_somebody_asks() -> None:
    """A damaged config may say any number of layers and experts, and sizes that no memory has."""
    norm, most = decoder.Norm("rms", 1e-5, bias=True), 2**31 - 1
    attention = decoder.Attention(most, most, most, most, 1.0, qkv_bias=True)
    moe = decoder.Moe(most, 2, decoder.Mlp(8, "silu", gated=True))
    spec = decoder.DecoderSpec(100, 16, (decoder.Layer(attention, moe, attn_norm=norm),) * 10**5, norm, tied=True)
    found = {shape.name: shape for shape in itertools.islice(decoder.each_weight(spec), 1000)}
    assert list(found)[:4] == ["embed", "final_norm.weight", "final_norm.bias", "layers.0.attn_norm.weight"]
    assert found["layers.0.experts.7.gate_up"] == decoder.MatrixShape("layers.0.experts.7.gate_up", 16, 16)
    assert found["layers.0.router"] == decoder.MatrixShape("layers.0.router", most, 16)
    assert isinstance(found["layers.0.qkv.bias"], decoder.VectorShape)
    assert len(found) == 1000
