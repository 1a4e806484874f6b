# SPDX-License-Identifier: Apache-2.0
"""The generic path: replaces linears, experts, embedding and RMS norms of a Hugging Face module by packed native ones.

Attention, caches and everything else stay the module's own code, so that every architecture gets faster products.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import logging
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anyaccel import _llm, comm
from anyaccel.inference.checkpoints.dequantised import HeldRows
from anyaccel.inference.generic.tp.layers import RowParallelLinear
from anyaccel.inference.modules.layers import (
    TYPES,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    PackedParallelExperts,
    PackedRMSNorm,
)
from anyaccel.inference.options import QUANTISED

logger = logging.getLogger(__name__)

_FORMATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
# Classes that compute what nn.Linear does, but in a forward of their own.
_PLAIN_SUBCLASSES = frozenset({"FalconLinear", "Conv1D"})
_NOT_RUN = frozenset({"__init__", "_init_weights", "reset_parameters", "tie_weights"})
_ROUTERS = frozenset({"gate", "gating", "shared_expert_gate"})
_ROUNDING = 5e-2  # of what a module computes in 16 bits, as a share of its largest value
_MOST_EXPERTS = 1024  # a linear named "gate" with more outputs is the gate of an MLP, not a router
# Packages with code for many models: that such code reads a weight does not mean that this model uses it.
_NOT_MODELS = ("torch.", "transformers.modeling_", "transformers.generation", "transformers.integrations")
# Matches `self.a.b.weight` in a model's code: (self, "a.b."); not .dtype, .device and .shape, which survive packing.
_WEIGHT_READ = re.compile(r"\b(\w+)\.((?:\w+\.)+)(?:weight|bias)\b(?!\.(?:dtype|device|shape)\b)")


@dataclass
class Packed:
    """What `pack` has replaced, for reports.

    Attributes:
        linears, norms, experts: numbers of replaced modules.
        kept: name of a linear that was not replaced -> the reason.
        bytes: size of the packed matrices.
    """

    linears: int = 0
    norms: int = 0
    experts: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


def pack(module: nn.Module, precision: str, group_size: int) -> Packed:
    """Replace linears, norms, stacked experts and the embedding of `module` in place, freeing each packed weight.

    A tied head and embedding become one matrix. As on the native path, quantised embeddings and heads get 8 bits, and
    routers are not quantised.

    Args:
        precision: fp32, bf16, fp16, int8 or int4.
        group_size: the group size of int4.
    """
    done = Packed()
    read = _weights_read_elsewhere(module)
    shared = _shared_parameters(module)
    embedding, head = _embeddings(module)
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    packed: dict[int, nn.Module] = {}
    for name, parent, short, child in list(_children(module)):
        if id(child) in packed:
            setattr(parent, short, packed[id(child)])
        elif isinstance(child, RowParallelLinear) or _is_linear(child):
            if _is_read(read, parent, short):
                done.kept[name] = f"{type(parent).__name__} reads its weight"
                continue
            if precision in QUANTISED and _is_router(name, parent, child):
                done.kept[name] = "it chooses experts by small differences"
                continue
            if type(child.weight.data) is not torch.Tensor:  # torchao's, which have products of their own
                done.kept[name] = f"its weight is a {type(child.weight.data).__name__}"
                continue
            own = "int8" if child is head and precision in QUANTISED else precision
            linear = packed[id(child)] = _pack_linear(child, own, group_size, name)
            done.linears += 1
            done.bytes += linear.packed.bytes
            if id(child.weight) not in shared:
                child.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
            setattr(parent, short, linear)
        elif (experts := _pack_experts(child, precision, group_size, name)) is not None:
            packed[id(child)] = experts
            done.experts += 1
            done.bytes += sum(each.packed.bytes for each in (*experts.up, *experts.down))
            setattr(parent, short, experts)
        elif (parallel := _pack_parallel_experts(child, precision, group_size, name)) is not None:
            packed[id(child)] = parallel
            done.experts += 1
            done.bytes += sum(each.packed.bytes for each in parallel.linears)
            setattr(parent, short, parallel)
        elif _is_read(read, parent, short):
            continue  # the model's code reads the weight of this norm, which a packed norm does not have
        elif (norm := _rms_norm(child, name)) is not None:
            packed[id(child)] = norm
            setattr(parent, short, norm)
            done.norms += 1
    if embedding is not None:
        _pack_embedding(module, embedding, packed.get(id(head)) if tied else None, precision, read, done)
    for name, why in done.kept.items():
        logger.info("%s stays torch's: %s", name, why)
    return done


def _embeddings(module: nn.Module) -> tuple[Any, Any]:
    """The modules of the embedding and of the head; None for one that is missing or unusual."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        part = None
        with contextlib.suppress(NotImplementedError, AttributeError):
            part = getattr(module, name)()
        found.append(part if isinstance(getattr(part, "weight", None), torch.Tensor) else None)
    return found[0], found[1]


def _pack_embedding(
    module: nn.Module, embedding: Any, head: Any, precision: str, read: Mapping[type, set[str]], done: Packed
) -> None:
    """Replace the embedding by one on the matrix of the head that it is tied to, or, if quantised, on its own."""
    found = [(name, parent, short) for name, parent, short, child in _children(module) if child is embedding]
    places = [(parent, short) for _, parent, short in found]
    scale = _embedding_scale(embedding)
    if scale is None or any(_is_read(read, parent, short) for parent, short in places):
        return
    shape = tuple(embedding.weight.shape)
    if isinstance(head, PackedLinear) and (head.out_features, head.in_features) == shape:
        native = head.packed
    elif precision in QUANTISED:
        native = _packed_matrix(embedding.weight.detach(), "int8", 0)
        done.bytes += native.bytes
    else:
        return
    replaced = PackedEmbedding(native, shape, embedding.weight.dtype, embedding.padding_idx, scale, found[0][0])
    for parent, short in places:
        setattr(parent, short, replaced)


def _embedding_scale(embedding: Any) -> float | None:
    """The factor by which an embedding multiplies its rows, found by running it; None if it does anything else."""
    weight = embedding.weight
    if not isinstance(embedding, nn.Embedding) or not _has_values(weight):
        return None
    if not _is_as_written(embedding) or embedding.max_norm is not None:
        return None
    if type(embedding) is nn.Embedding:
        return 1.0
    if {name for name, _ in embedding.named_parameters()} != {"weight"}:
        return None
    ids = torch.arange(min(64, weight.shape[0]))
    with torch.no_grad():
        try:
            got = embedding(ids).float()
        except (TypeError, ValueError, RuntimeError):
            return None
        rows = weight[ids].float()
        if got.shape != rows.shape or not bool(rows.abs().max() > 0):
            return None
        at = int(rows.abs().argmax())
        scale = float(got.flatten()[at] / rows.flatten()[at])
        named = [getattr(embedding, name, None) for name in ("embed_scale", "scalar_embed_scale")]
        for value in named:  # exact values, as the quotient has the rounding error of a 16-bit product
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                scale = float(value) if math.isclose(float(value), scale, rel_tol=2e-2) else scale  # type: ignore[arg-type]
        return scale if torch.allclose(got, rows * scale, rtol=1e-2, atol=1e-6) else None


def _is_router(name: str, parent: nn.Module, linear: Any) -> bool:
    """Whether a linear is a router of experts, judged by its name or its parent's, and its number of outputs."""
    words = name.split(".")[-2:]
    named = any(word in _ROUTERS or word.endswith("router") for word in words) or "Router" in type(parent).__name__
    return named and linear.weight.shape[0] <= _MOST_EXPERTS and not isinstance(linear, RowParallelLinear)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    for prefix, parent in module.named_modules():
        for short, child in parent.named_children():
            yield f"{prefix}.{short}" if prefix else short, parent, short, child


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not _has_values(weight):
        return False
    if not _is_as_written(module) or {n for n, _ in module.named_parameters()} - {"weight", "bias"}:
        return False
    bias, outputs = getattr(module, "bias", None), weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
    if bias is not None and tuple(bias.shape) != (outputs,):  # torch would broadcast it, but the native kernel not
        return False
    return type(module) is nn.Linear or type(module).__name__ in _PLAIN_SUBCLASSES


def _has_values(weight: torch.Tensor) -> bool:
    return weight.dtype in TYPES and not weight.is_meta and weight.numel() > 0


def _is_as_written(module: nn.Module) -> bool:
    """Whether the module has no hooks and no forward of its own."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def edited_layers() -> str:
    """The first of torch's layers that somebody's code makes compute something else; empty if none does."""
    from transformers.pytorch_utils import Conv1D

    x, ids = _random(2, 4), torch.tensor([2, 0])
    layers: tuple[tuple[Any, torch.Tensor, Callable[[Any], torch.Tensor]], ...] = (
        (nn.Linear(4, 3), x, lambda layer: x @ layer.weight.T + layer.bias),
        (Conv1D(3, 4), x, lambda layer: x @ layer.weight + layer.bias),
        (nn.Embedding(5, 4), ids, lambda layer: layer.weight[ids]),
    )
    wrong = (type(layer).__name__ for layer, given, usual in layers if not _gives(layer, (given,), usual(layer), 1e-4))
    return next(wrong, "")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _gives(module: Any, inputs: tuple[Any, ...], expected: torch.Tensor, tolerance: float) -> bool:
    """Whether a module's result is `expected`, within a share of its largest value; no if it fails."""
    try:
        got = module(*inputs)
    except (TypeError, ValueError, RuntimeError):
        return False
    same_shape = got.shape == expected.shape
    return same_shape and bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def _shared_parameters(module: nn.Module) -> set[int]:
    """id() of parameters that several modules share (a tied head's), which may be freed only after all are packed."""
    seen: set[int] = set()
    twice: set[int] = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _weights_read_elsewhere(module: nn.Module) -> dict[type, set[str]]:
    """Names of children whose `weight` or `bias` the model's code reads directly, so that they must not be replaced.

    They are listed by the class of their parent. Those that are reached through several modules are listed under
    nn.Module by their last name, and count for every parent.
    """
    found: dict[type, set[str]] = {nn.Module: set()}
    for kind in {type(part) for part in module.modules()}:
        # nn.MultiheadAttention passes the weights of its out_proj to a function of torch.
        names = {"out_proj"} if issubclass(kind, nn.MultiheadAttention) else set()
        for base in kind.__mro__:
            if not base.__module__.startswith(_NOT_MODELS) and base is not object:
                for root, path in (each for text in _method_sources(base) for each in _WEIGHT_READ.findall(text)):
                    *above, short = path.rstrip(".").split(".")
                    (names if root == "self" and not above else found[nn.Module]).add(short)
        found[kind] = found.get(kind, set()) | names
    return found


def _is_read(read: Mapping[type, set[str]], parent: nn.Module, short: str) -> bool:
    return short in read.get(type(parent), ()) or short in read[nn.Module]


@functools.cache
def _method_sources(kind: type) -> tuple[str, ...]:
    """The source of a class's methods that inference on a CPU may run, without initialisation, training and CUDA."""
    texts = []
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name not in _NOT_RUN and not name.startswith(("init_", "cuda_")):
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
                texts.append(ast.unparse(_WithoutTraining().visit(tree)))
    return tuple(texts)


class _WithoutTraining(ast.NodeTransformer):
    """Removes the branches of `if self.training:`."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        parts = (
            node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
        )
        if any(isinstance(part, ast.Attribute) and part.attr == "training" for part in parts):
            return node.orelse or ast.Pass()
        return node


def format_for(precision: str, group_size: int, columns: int) -> tuple[str, int, bool]:
    """(format, group, minimum) of a packed matrix; int4 becomes int8 if groups do not divide the columns."""
    if precision == "int4":
        fits = [size for size in (group_size, 64, 32) if size <= group_size and columns % size == 0]
        if fits:
            return "i4", fits[0], True  # a minimum beside the scale: far more accurate
        return "i8", 0, False
    if precision == "int8":
        return "i8", 0, False
    return _FORMATS[precision], 0, False


def _packed_matrix(weight_OI: torch.Tensor, precision: str, group_size: int) -> _llm.Linear:
    rows, columns = weight_OI.shape
    if 0 in weight_OI.stride():  # an expanded one: to `set_rows`, a stride of 0 is that of dense rows
        weight_OI = weight_OI.contiguous()
    name, group, minimum = format_for(precision, group_size, columns)
    native = _llm.Linear(rows, columns, name, group, minimum)
    size = weight_OI.element_size()
    native.set_rows(
        0,
        rows,
        weight_OI.data_ptr(),
        TYPES[weight_OI.dtype],
        weight_OI.stride(0) * size,
        weight_OI.stride(1) * size,
    )
    return native


def _pack_linear(module: nn.Module, precision: str, group_size: int, name: str) -> PackedLinear:
    assert isinstance(module.weight, torch.Tensor)
    weight = module.weight.detach()
    weight_OI = weight.t() if type(module).__name__ == "Conv1D" else weight
    held: HeldRows | None = getattr(module.weight, "held", None)
    native = _packed_matrix(weight_OI, precision, group_size) if held is None else held.pack()
    bias = getattr(module, "bias", None)
    reduce = None
    if isinstance(module, RowParallelLinear):
        reduce = functools.partial(comm.inference_all_reduce, group=module._group)
    rows, columns = weight_OI.shape
    return PackedLinear(native, (rows, columns), None if bias is None else bias.detach(), weight.dtype, reduce, name)


def _pack_experts(module: Any, precision: str, group_size: int, name: str) -> PackedExperts | None:
    """The packed experts of a module that uses transformers' `use_experts_implementation`; None for any other."""
    flags = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")
    if not all(hasattr(module, flag) for flag in flags) or getattr(module, "has_post_expert_norm", False):
        return None
    up = "gate_up_proj" if module.has_gate else "up_proj"
    wanted = {weight + suffix for weight in (up, "down_proj") for suffix in ("", "_bias")[: 1 + module.has_bias]}
    stacked = dict(module.named_parameters())
    if set(stacked) != wanted or not _is_as_written(module):
        return None
    if not all(map(_has_values, stacked.values())):
        return None
    for weight in (up, "down_proj"):
        bias, matrices = stacked.get(f"{weight}_bias"), stacked[weight]
        outputs = -1 if module.is_transposed else -2
        if matrices.dim() != 3 or (bias is not None and bias.shape != (len(matrices), matrices.shape[outputs])):
            return None

    def packed(weight: str, experts: slice, precision: str) -> list[PackedLinear]:
        bias = stacked.get(f"{weight}_bias")
        few = None if bias is None else bias[experts]
        return _pack_stack(stacked[weight][experts], few, module.is_transposed, precision, group_size)

    first = PackedExperts(module, packed(up, slice(1), "fp32"), packed("down_proj", slice(1), "fp32"))
    x = _random(3, stacked[up].shape[-2 if module.is_transposed else -1]).to(stacked[up].dtype)
    inputs = x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1, dtype=x.dtype)
    if not _gives(module, inputs, first(*inputs), _ROUNDING):
        return None
    made = []
    for weight in (up, "down_proj"):
        made.append(packed(weight, slice(None), precision))
        del stacked[weight], module._parameters[weight]
    return PackedExperts(module, made[0], made[1], name)


def _pack_parallel_experts(module: Any, precision: str, group_size: int, name: str) -> PackedParallelExperts | None:
    """The packed linears of a `...ParallelExperts`, whose input is sorted by expert; None for any other module."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("ParallelExperts") or not isinstance(weight, torch.Tensor):
        return None
    if weight.dim() != 3 or not _has_values(weight) or not _is_as_written(module):
        return None
    takes = list(inspect.signature(type(module).forward).parameters)
    shape = tuple(getattr(module, size, 0) for size in ("num_experts", "output_size", "input_size"))
    if takes != ["self", "inputs", "expert_size"] or shape != tuple(weight.shape):
        return None
    x, counts = _random(3, weight.shape[2]).to(weight.dtype), [3] + [0] * (len(weight) - 1)
    first = PackedParallelExperts(_pack_stack(weight[:1], None, False, "fp32", group_size))
    if not _gives(module, (x, counts), first(x, [3]), _ROUNDING):
        return None
    linears = _pack_stack(weight, None, False, precision, group_size)
    module.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
    return PackedParallelExperts(linears, name)


def _pack_stack(
    stack: torch.Tensor, biases: torch.Tensor | None, transposed: bool, precision: str, group_size: int
) -> list[PackedLinear]:
    linears = []
    for index, matrix in enumerate(stack.detach()):
        matrix_OI = matrix.t() if transposed else matrix
        bias = None if biases is None else biases[index].detach()
        rows, columns = matrix_OI.shape
        native = _packed_matrix(matrix_OI, precision, group_size)
        linears.append(PackedLinear(native, (rows, columns), bias, matrix.dtype))
    return linears


def _rms_norm(module: nn.Module, name: str) -> PackedRMSNorm | None:
    """A native norm that computes the same as `module`, checked by running it; None if it is not a plain RMS norm."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if {n for n, _ in module.named_parameters()} != {"weight"} or not _has_values(weight):
        return None
    takes_one = len(inspect.signature(type(module).forward).parameters) == 2
    if weight.numel() < 2 or not takes_one or not _is_as_written(module):
        return None
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if not isinstance(eps, float):
        return None
    compute: Any = module
    generator = torch.Generator().manual_seed(0)
    width = weight.numel()
    # Some rows are so small that eps matters.
    x_TH = torch.randn(4, width, generator=generator) * torch.tensor([[1.0], [3.0], [1e-3], [1e-2]])
    with torch.no_grad():
        try:
            got_TH: torch.Tensor = compute(x_TH).float()
        except (TypeError, ValueError, RuntimeError):
            return None
        normed_TH = x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + eps)
        for factor_H in (weight.detach().float(), 1 + weight.detach().float()):
            if got_TH.shape == x_TH.shape and torch.allclose(
                got_TH, normed_TH * factor_H, rtol=1e-2 if weight.dtype != torch.float32 else 1e-4, atol=1e-5
            ):
                return PackedRMSNorm(weight.detach(), factor_H, eps, name)
    return None
