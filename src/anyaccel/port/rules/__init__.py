# SPDX-License-Identifier: Apache-2.0
"""The rules, one file each: every module of this package that has a RULE is one.

docs/add-a-port-rule.md says how to write one; docs/porting-rules.md is made from them, and each example is a test.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from anyaccel.port.rule import NameFinder, NodeFinder, Rule

RULES: list[Rule] = []
BY_CODE: dict[str, Rule] = {}
BY_NAME: dict[str, tuple[Rule, NameFinder]] = {}
BY_KIND: dict[type, list[tuple[Rule, NodeFinder]]] = {}


def register(rule: Rule) -> None:
    """Have the engine apply a rule."""
    RULES.append(rule)
    RULES.sort(key=lambda each: each.code)
    BY_CODE[rule.code] = rule
    BY_NAME.update({name: (rule, finder) for name, finder in rule.name_finders.items()})
    for kinds, finder in rule.node_finders:
        for kind in kinds:
            BY_KIND.setdefault(kind, []).append((rule, finder))


for _module in pkgutil.iter_modules(__path__):
    register(importlib.import_module(f"{__name__}.{_module.name}").RULE)

# A file in which none of these occurs has nothing to port.
WORDS = re.compile(
    r"cuda|nccl|device_ids|pin_memory|is_pinned|SyncBatchNorm|sync_batchnorm|\.cpu\(|triton|nvidia|pynvml|py3nvml|"
    r"GPUtil|gpustat|nvitop|bitsandbytes|flash_attn|flashinfer|apex|xformers|cupy|cuml|cudf|mamba_ssm|tensorrt|"
    r"transformer_engine|spconv|MinkowskiEngine|auto_gptq|amp_C|causal_conv1d|record_stream|rank|"
    r"device ?[=(] ?[\d\w.]*(?:\d|gpu|id|idx|index)\b|\.to\( ?[\w.]*(?:\d|gpu|id|idx|index)\b",
    re.IGNORECASE,
)
