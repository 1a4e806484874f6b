# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` for matrices in the layout of compressed-tensors ("pack-quantized"). Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_FORMAT = "pack-quantized"
_VERSION = "0.9.0"  # the version of compressed-tensors that has this format

Kind = tuple[int, int, bool]  # bits, columns that share a scale (0: all), whether there are zero points


def compressed_config(by_kind: Mapping[Kind, list[str]], ignored: Collection[str]) -> dict[str, Any]:
    """The `quantization_config` for modules by kind; those of all kinds but the commonest are named in it."""
    common = max(by_kind, key=lambda kind: len(by_kind[kind]))
    groups = {}
    for number, kind in enumerate(sorted(by_kind, key=lambda each: (each != common, each))):
        bits, group, zeros = kind
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if kind == common else by_kind[kind],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": not zeros,
                "strategy": "group" if group else "channel",
                "group_size": group or None,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
            "format": _FORMAT,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted({*ignored, "lm_head"}),
        "kv_cache_scheme": None,
        "version": _VERSION,
    }
