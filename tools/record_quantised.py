# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/quantised: small matrices as other libraries quantise and store them, and what they make of them.

Needs a Python with torch, transformers and, for all cases, bitsandbytes, compressed-tensors, hqq, torchao,
auto-round and autoawq. A case whose library is missing is left as it is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "quantised"
AT = "model.layers.0.mlp.down_proj"
ROWS, COLS = 32, 128

# Config, the tensors as they are in a file, what the library says that they stand for, the file's metadata.
Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor, dict[str, str]]


def _weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed)) * 0.05


def _linear(dtype: torch.dtype) -> torch.nn.Linear:
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    linear.weight.data = _weight()
    return linear.to(dtype)


def bitsandbytes() -> Iterator[tuple[str, Case]]:
    import bitsandbytes as bnb
    import bitsandbytes.functional as F

    for kind in ("nf4", "fp4"):
        for double in (False, True):
            name = f"bnb-{kind}{'-double' if double else ''}"
            weight = torch.randn(96, COLS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) * 0.05
            data, state = F.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
            tensors = {f"{AT}.weight": data}
            tensors |= {f"{AT}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
            wanted = F.dequantize_4bit(data, state)
            yield name, ({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, wanted, {})
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    data, state = F.quantize_4bit(weight, blocksize=128, quant_type="nf4")  # blocks that are no part of a row
    tensors = {f"{AT}.weight": data}
    tensors |= {f"{AT}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    # As one row: of such a matrix, version 0.50 on a CPU multiplies by the scales of other blocks.
    wanted = F.dequantize_4bit(*F.quantize_4bit(weight.reshape(1, -1), blocksize=128, quant_type="nf4")).reshape(32, 96)
    yield "bnb-nf4-across-rows", (config, tensors, wanted, {})
    weight = _weight().half()
    q, scales, _ = F.int8_vectorwise_quant(weight)
    tensors = {f"{AT}.weight": q, f"{AT}.SCB": scales, f"{AT}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    wanted = F.int8_vectorwise_dequant(q, scales)
    yield "bnb-int8", ({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, wanted, {})
    assert bnb.__version__


def compressed_tensors() -> Iterator[tuple[str, Case]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "pack-w4-sym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "pack-w4-asym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        "pack-w3": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
        "pack-w8": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "int8-channel-asym": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "fp8-tensor": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "fp8-block": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        ),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    }
    for name, (form, settings) in cases.items():
        if form.startswith("mx"):
            settings = {**settings, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
        if form.startswith("nv"):
            settings = {**settings, "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        weight = _weight().to(torch.bfloat16)
        blocks = {"channel": weight, "tensor": weight.reshape(1, -1)}.get(str(settings["strategy"]))
        if settings["strategy"] == "block":
            tall, wide = settings["block_structure"]
            cut = weight.reshape(ROWS // tall, tall, COLS // wide, wide)
            low, high = cut.amin((1, 3)), cut.amax((1, 3))
        elif blocks is None:
            cut = weight.reshape(ROWS, -1, settings["group_size"])
            low, high = cut.amin(-1), cut.amax(-1)
        else:
            low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
            if settings["strategy"] == "tensor":
                low, high = low.reshape(1), high.reshape(1)
        whole = generate_gparam(weight.amin(), weight.amax()).reshape(1) if form.startswith("nv") else None
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        wanted = compressor.decompress(dict(stored), scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": form}
        if settings["strategy"] == "block":
            config["weight_block_size"] = settings["block_structure"]
        tensors = {f"{AT}.{key}": value.detach() for key, value in stored.items() if value is not None}
        yield f"compressed-{name}", (config, tensors, wanted.detach(), {})


def hqq() -> Iterator[tuple[str, Case]]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits, axis, group in ((4, 1, 64), (8, 1, 128), (3, 1, 64), (2, 1, 16), (4, 0, 64), (3, 0, 32), (1, 1, 32)):
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        layer = HQQLinear(_linear(torch.float16), config, compute_dtype=torch.float16, device="cpu")
        layer.encoded_state_dict = True
        tensors = {f"{AT}.{key}": value for key, value in layer.state_dict().items() if value is not None}
        wanted = layer.dequantize()
        yield f"hqq-{bits}-axis{axis}", ({"quant_method": "hqq"}, tensors, wanted, {})


def torchao() -> Iterator[tuple[str, Case]]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
        quantize_,
    )

    configs = {
        "int8": Int8WeightOnlyConfig(version=2),
        "int8-dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
        "intx4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "intx8": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        "float8": Float8WeightOnlyConfig(),
    }
    for name, config in configs.items():
        model = torch.nn.Sequential(_linear(torch.bfloat16))
        quantize_(model, config)
        weight: Any = model[0].weight
        tensors, metadata = flatten_tensor_state_dict({f"{AT}.weight": weight.data})
        yield f"torchao-{name}", ({"quant_method": "torchao"}, tensors, weight.dequantize(), metadata)


def auto_round() -> Iterator[tuple[str, Case]]:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    for bits in (2, 3, 4, 5, 8):
        for name, module in (("gptq", qlinear_torch_zp), ("own", qlinear_torch)):
            generator = torch.Generator().manual_seed(bits)
            layer = module.QuantLinear(bits, 32, COLS, ROWS, False)
            layer.device = torch.device("cpu")
            middle, spread = 1 << bits - 1, max((1 << bits) >> 3, 1)
            zeros = torch.randint(middle - spread, middle + spread + 1, (ROWS, COLS // 32), generator=generator)
            scales = torch.rand(ROWS, COLS // 32, generator=generator) * 0.01 + 0.001
            layer.pack(_linear(torch.float32), scales, zeros.int(), device="cpu")
            layer.post_init()
            wanted = layer(torch.eye(COLS, dtype=torch.float16)).T
            tensors = {f"{AT}.{key}": getattr(layer, key) for key in ("qweight", "qzeros", "scales")}
            packing = "auto_round:auto_gptq" if name == "gptq" else "auto_round"
            config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "packing_format": packing}
            yield f"auto-round-{name}-{bits}", (config, tensors, wanted, {})


def auto_awq() -> Iterator[tuple[str, Case]]:
    found = importlib.util.find_spec("awq")
    if found is None or not found.submodule_search_locations:
        raise ImportError("no awq")
    # Without its own __init__, which needs an old transformers.
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        package = ModuleType(name)
        package.__path__ = [found.submodule_search_locations[0] + name.removeprefix("awq").replace(".", "/")]
        sys.modules[name] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV

    for version, kind, group in (("gemm", WQLinear_GEMM, 32), ("gemv", WQLinear_GEMV, 32), ("gemv", WQLinear_GEMV, 64)):
        generator = torch.Generator().manual_seed(group)
        scales = (torch.rand(ROWS, COLS // group, generator=generator) * 0.01 + 0.001).half()
        zeros = torch.randint(0, 16, scales.shape, generator=generator)
        q = torch.randint(0, 16, (ROWS, COLS), generator=generator)
        weight = (q - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
        linear = _linear(torch.float32)
        linear.weight.data = weight
        gemm = version == "gemm"
        layer = kind.from_linear(
            *(linear, 4, group, False),
            scales=scales.T.contiguous() if gemm else scales,
            zeros=zeros.T.contiguous() if gemm else zeros,
        )
        tensors = {f"{AT}.{key}": getattr(layer, key) for key in ("qweight", "qzeros", "scales")}
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version}
        yield f"awq-{version}-{group}", (config, tensors, weight, {})


def mxfp4() -> Iterator[tuple[str, Case]]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, ROWS, COLS // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 124, (2, ROWS, COLS // 32), generator=generator, dtype=torch.uint8)
    at = "model.layers.0.mlp.experts.gate_up_proj"
    wanted = convert_moe_packed_tensors(blocks, scales)
    yield "mxfp4-experts", ({"quant_method": "mxfp4"}, {f"{at}_blocks": blocks, f"{at}_scales": scales}, wanted, {})


def bitnet() -> Iterator[tuple[str, Case]]:
    from transformers.integrations.bitnet import pack_weights

    ternary = torch.randint(-1, 2, (ROWS, COLS), generator=torch.Generator().manual_seed(0))
    packed, scale = pack_weights(ternary.clone().float()), torch.tensor([0.75], dtype=torch.bfloat16)
    tensors = {f"{AT}.weight": packed, f"{AT}.weight_scale": scale}
    for kind, wanted in (("autobitlinear", ternary * 0.75), ("bitlinear", ternary / 0.75)):
        yield f"bitnet-{kind}", ({"quant_method": "bitnet", "linear_class": kind}, tensors, wanted, {})


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    sources: list[Callable[[], Iterator[tuple[str, Case]]]] = [
        *(bitsandbytes, compressed_tensors, hqq, torchao, auto_round, auto_awq, mxfp4, bitnet),
    ]
    for source in sources:
        try:
            for name, (config, tensors, wanted, metadata) in source():
                everything = {key: value.contiguous() for key, value in tensors.items()} | {
                    "wanted": wanted.contiguous()
                }
                save_file(everything, FOLDER / f"{name}.safetensors", metadata | {"config": json.dumps(config)})
                print(name)
        except ImportError as error:
            print(f"{source.__name__}: left as it is ({error})", file=sys.stderr)


if __name__ == "__main__":
    main()
