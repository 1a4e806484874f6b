# SPDX-License-Identifier: Apache-2.0
"""Packages, kernels and tools that are CUDA's alone."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, dotted, text_of
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import is_text

RULE = Rule(
    code="ACC502",
    title="a package, a kernel or a tool that needs CUDA",
    tier=Tier.REPORT,
    why="What only CUDA has needs another implementation, or a guard such as "
    "`get_accelerator().is_triton_supported()`; the report says what takes its place.",
    left="import flash_attn\nimport triton",
)
# Package -> advice. An import of it is reported.
_PACKAGES = {
    "amp_C": "torch.amp and torch.optim replace it",
    "apex": "torch.amp and torch.optim replace most of it",
    "auto_gptq": "transformers loads other quantised formats everywhere, GGUF among them",
    "bitsandbytes": "quantise with torchao, or load GGUF; anyaccel.ops has CPU optimizers",
    "causal_conv1d": "fall back to torch.nn.functional.conv1d",
    "cudf": "fall back to pandas",
    "cuml": "fall back to scikit-learn",
    "cupy": "use torch or numpy",
    "cupyx": "use torch or scipy",
    "flash_attn": "use torch.nn.functional.scaled_dot_product_attention",
    "flash_attn_interface": "use torch.nn.functional.scaled_dot_product_attention",
    "flashinfer": "use torch.nn.functional.scaled_dot_product_attention",
    "mamba_ssm": "fall back to the reference implementation in torch",
    "MinkowskiEngine": "needs another implementation on other devices",
    "nvidia": "guard it, or use an implementation in torch",
    "pycuda": "use torch",
    "spconv": "needs another implementation on other devices",
    "tensorrt": "use torch.compile with get_accelerator().get_compile_backend()",
    "tensorrt_llm": "use anyaccel.init_inference",
    "torch_tensorrt": "use torch.compile with get_accelerator().get_compile_backend()",
    "transformer_engine": "fall back to torch.nn layers",
    "xformers": "use torch.nn.functional.scaled_dot_product_attention",
}
# Tools and libraries of NVIDIA's driver.
_TOOLS = {"pynvml", "py3nvml", "nvidia_smi", "nvitop", "GPUtil", "gpustat"}
_TOOLS_ADVICE = "use device_count(), total_memory() and available_memory() of the accelerator"

# Things in torch that build CUDA sources.
_EXTENSIONS = {
    "torch.utils.cpp_extension.CUDAExtension",
    "torch.utils.cpp_extension.CUDA_HOME",
    "torch.utils.cpp_extension._find_cuda_home",
}
_LOADERS = {"torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline"}


@RULE.on_node(cst.Import, cst.ImportFrom)
def find_import(module: Module, node: cst.Import | cst.ImportFrom) -> Iterator[Match]:
    """An import of such a package."""
    if isinstance(node, cst.Import):
        names = [dotted(each.name) for each in node.names]
    elif node.relative or node.module is None:
        return
    else:
        name = dotted(node.module)
        names = [name]
        if name.split(".")[:2] == ["torch", "cuda"] and isinstance(node.names, cst.ImportStar):
            yield Match(node, f"`from {name} import *`: name what is imported, so that its uses are seen")
        if name == "numba" and not isinstance(node.names, cst.ImportStar):
            names = [f"numba.{dotted(each.name)}" for each in node.names]
    for name in names:
        root = name.split(".")[0]
        if root == "triton":
            yield Match(
                node,
                f"`import {name}`: guard Triton's kernels by get_accelerator().is_triton_supported()",
                needs_cuda=True,
            )
        elif root in _TOOLS:
            yield Match(node, f"`import {name}`: {_TOOLS_ADVICE}", needs_cuda=True)
        elif root in _PACKAGES or name.startswith("numba.cuda"):
            advice = _PACKAGES.get(root, "write the kernel with torch")
            yield Match(node, f"`import {name}`: it needs CUDA; {advice}", needs_cuda=True)


@RULE.on_node(cst.Name, cst.Attribute)
def find_extension(module: Module, node: cst.Name | cst.Attribute) -> Iterator[Match]:
    """What compiles CUDA sources."""
    full = module.full_name(node)
    if not full.startswith("torch.utils.cpp_extension.") or isinstance(
        module.parent(node), cst.Attribute | cst.ImportAlias
    ):
        return
    call = module.parent(node)
    code = module.code(call).lower() if isinstance(call, cst.Call) else ""
    if full in _EXTENSIONS or (full in _LOADERS and ("cuda" in code or ".cu'" in code or '.cu"' in code)):
        advice = "build_extension() and op builders compile for other devices, see docs/ops.md"
        yield Match(node, f"`{full}`: CUDA sources: not fixed: {advice}", needs_cuda=True)


@RULE.on_node(cst.SimpleString)
def find_command(module: Module, node: cst.SimpleString) -> Iterator[Match]:
    """A call of nvidia-smi."""
    if (text_of(node) or "").startswith(("nvidia-smi", "/usr/bin/nvidia-smi")) and not is_text(module, node):
        yield Match(node, f"`nvidia-smi`: {_TOOLS_ADVICE}", needs_cuda=True)
