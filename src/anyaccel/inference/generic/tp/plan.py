# SPDX-License-Identifier: Apache-2.0
"""Plans tensor parallelism from the structure of a Hugging Face causal LM: which slice of each weight a rank holds.

In each block (attention or MLP) of a decoder layer, the output features of the first linears are sharded
(column-parallel), and the input features of the last linear are sharded in the same way (row-parallel), whose outputs
are all-reduced (Shoeybi et al., "Megatron-LM", 2019). The row-parallel linear is the one that the model's own `tp_plan`
names, else the last of the block. A block whose structure is not understood stays whole on every rank: its results are
right, but it gets no faster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import nn

from anyaccel.errors import UsageError
from anyaccel.inference.checkpoints.slices import Slice
from anyaccel.inference.spec.partition import HeadShard, split_features, split_heads

# The layout of a fused query, key and value linear's rows, by the attention class that splits them.
# "blocks": all queries, all keys, all values. "per_head": query, key and value of head 0, of head 1, ...
FUSED_QKV_LAYOUT = {
    "GPT2Attention": "blocks",
    "Phi3Attention": "blocks",
    "GPTNeoXAttention": "per_head",
}
# MLP classes with a fused linear: the rows of the gate, then those of the up projection.
FUSED_GATE_UP = frozenset({"Phi3MLP", "GlmMLP", "Glm4MLP"})
# Subclasses of nn.Linear that compute the same.
_PLAIN_SUBCLASSES = frozenset({"FalconLinear"})
# Attention classes whose output has the width of their input, so that they cannot be sharded.
_FIXED_WIDTH = frozenset({"TrOCRAttention"})
# Model types whose attention biases are computed for all heads at once, outside the block.
_ALIBI_TYPES = frozenset({"bloom", "mpt"})

_QUERY = re.compile(r"^(w?q|query|q_lin|wq)(_?proj)?$", re.IGNORECASE)
_KEY_VALUE = re.compile(r"^(w?[kv]|key|value|[kv]_lin)(_?proj)?$", re.IGNORECASE)
# Names of the linear that writes back to the hidden states, for a block without a plan of its own.
_ROW = re.compile(r"^(down_proj|o_proj|out_proj|c_proj|dense|dense_4h_to_h|fc2|fc_out|lin2|w2|wo|o)$", re.IGNORECASE)
_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_ROW_STYLES = frozenset({"rowwise", "rowwise_split_input"})

# Attributes of attention modules that count heads or features, which are set to those of this rank.
_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_FEATURE_COUNTS = ("embed_dim", "split_size", "all_head_size")


@dataclass
class TensorParallelPlan:
    """What `apply` does to a model on one rank.

    Attributes:
        slices: parameter name -> the part that this rank holds; parameters not named are whole.
        row_parallel: names of the linears whose outputs the ranks add up.
        attributes: module name -> attributes to set.
        config: module name -> values of the module's own copy of the model configuration.
        whole: name of a block that is not sharded -> the reason.
    """

    rank: int
    size: int
    slices: dict[str, Slice] = field(default_factory=dict)
    row_parallel: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    config: dict[str, dict[str, int]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


class _Whole(Exception):
    """Raised, with the reason, for a block that cannot be sharded and stays whole on every rank."""


@dataclass(frozen=True)
class _Linear:
    """A linear module; Conv1D (GPT-2) stores its weight transposed."""

    name: str
    weight: torch.Tensor
    transposed: bool
    has_bias: bool

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def outputs(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]


def _as_linear(name: str, module: nn.Module) -> _Linear | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    transposed = type(module).__name__ == "Conv1D"
    # A subclass that computes in its own way (quantised, LoRA) is not understood by slicing its weight.
    plain = isinstance(module, nn.Linear) and (
        type(module).forward is nn.Linear.forward or type(module).__name__ in _PLAIN_SUBCLASSES
    )
    if (not transposed and not plain) or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return None
    return _Linear(name, weight, transposed, getattr(module, "bias", None) is not None)


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the decoder layers, i.e. the ModuleList with the most linears; None if none has any."""
    best: tuple[str, nn.ModuleList] | None = None
    most = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            linears = sum(_as_linear("", child) is not None for child in module.modules())
            if linears > most:
                most, best = linears, (name, module)
    return best


def make_plan(model: nn.Module, rank: int, size: int) -> TensorParallelPlan:
    """Plan the shards of rank `rank` of `size`. The model may be on the meta device; it is not changed.

    Blocks that cannot be sharded stay whole on every rank, which may be all of them (Mamba, BitNet).
    """
    plan = TensorParallelPlan(rank, size)
    if size == 1:
        return plan
    found = decoder_layers(model)
    if found is None:
        plan.whole[""] = f"{type(model).__name__} has no list of layers with plain linears"
        return plan
    prefix, layers = found
    styles = getattr(model, "_tp_plan", None) or {}
    for name, module in layers.named_modules(prefix=prefix):
        linears = [
            linear
            for child, sub in module.named_children()
            if (linear := _as_linear(f"{name}.{child}", sub)) is not None
        ]
        if len(linears) < 2:
            continue
        row = _row_parallel(linears, styles)
        columns = [linear for linear in linears if linear is not row]
        kind = type(module).__name__
        try:
            if "attention" in kind.lower():
                _plan_attention(plan, model, name, module, columns, row)
            elif _MLP.search(kind) or [linear.short for linear in linears] == ["fc1", "fc2"]:
                _plan_mlp(plan, name, module, columns, row)
            else:
                plan.whole[name] = f"{kind} is neither an attention block nor an MLP by its name"
        except (_Whole, UsageError) as why:
            plan.whole[name] = str(why)
    if not plan.row_parallel:
        plan.whole.setdefault(prefix, f"no block of {type(model).__name__} has linears that can be divided")
    return plan


def _row_parallel(linears: list[_Linear], styles: dict[str, str]) -> _Linear:
    for linear in linears:
        if styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", linear.name)) in _ROW_STYLES:
            return linear
    named = [linear for linear in linears if _ROW.match(linear.short)]
    return (named or linears)[-1]


def _cut_outputs(plan: TensorParallelPlan, linear: _Linear, ranges: tuple[range, ...]) -> None:
    plan.slices[f"{linear.name}.weight"] = Slice(1 if linear.transposed else 0, ranges)
    if linear.has_bias:
        plan.slices[f"{linear.name}.bias"] = Slice(0, ranges)


def _cut_inputs(plan: TensorParallelPlan, linear: _Linear, ranges: tuple[range, ...]) -> None:
    plan.slices[f"{linear.name}.weight"] = Slice(0 if linear.transposed else 1, ranges)
    plan.row_parallel.append(linear.name)


def _scaled(part: range, factor: int, offset: int = 0) -> range:
    return range(offset + part.start * factor, offset + part.stop * factor)


def _plan_mlp(plan: TensorParallelPlan, name: str, module: nn.Module, columns: list[_Linear], row: _Linear) -> None:
    features = row.inputs
    known = {linear.short for linear in [*columns, row]}
    # A norm or a convolution over the hidden features would need a reduction of its own. In a decoder layer that holds
    # its MLP's linears itself (OPT), the other parameters belong to other blocks.
    between = (
        []
        if not _MLP.search(type(module).__name__)
        else [name for name, _ in module.named_parameters() if name.partition(".")[0] not in known]
    )
    if getattr(module, "slow_but_exact", False):
        raise _Whole("slow_but_exact computes with slices of the weight")
    if between:
        raise _Whole(f"{type(module).__name__} has other parameters between its linears: {', '.join(between)}")
    part = split_features(features, plan.size)[plan.rank]
    cuts: list[tuple[_Linear, tuple[range, ...]]] = []
    for linear in columns:
        if linear.inputs != row.outputs:
            raise _Whole(f"{linear.short} does not read what {row.short} writes")
        if linear.outputs == features:
            cuts.append((linear, (part,)))
        elif linear.outputs == 2 * features and type(module).__name__ in FUSED_GATE_UP:
            cuts.append((linear, (part, _scaled(part, 1, features))))
        else:
            raise _Whole(f"{linear.short} has {linear.outputs} outputs, {row.short} has {features} inputs")
    for linear, ranges in cuts:
        _cut_outputs(plan, linear, ranges)
    _cut_inputs(plan, row, (part,))


def _plan_attention(
    plan: TensorParallelPlan,
    model: nn.Module,
    name: str,
    module: nn.Module,
    columns: list[_Linear],
    row: _Linear,
) -> None:
    config = getattr(module, "config", None) or getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise _Whole("the configuration has no num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in _ALIBI_TYPES:
        raise _Whole("ALiBi biases are computed for all heads at once")
    if type(module).__name__ in _FIXED_WIDTH:
        raise _Whole(f"{type(module).__name__} cannot be narrower than its input")
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if head_dim is None or row.inputs != heads * head_dim:
        raise _Whole(f"{row.short} has {row.inputs} inputs, not {heads} heads of {head_dim}")
    shard = split_heads(heads, kv_heads, plan.size)[plan.rank]
    query, key_value = _scaled(shard.query, head_dim), _scaled(shard.key_value, head_dim)

    cuts: list[tuple[_Linear, tuple[range, ...]]] = []
    query_width, kv_width = heads * head_dim, kv_heads * head_dim
    if len(columns) == 1 and columns[0].outputs == query_width + 2 * kv_width:
        layout = FUSED_QKV_LAYOUT.get(type(module).__name__)
        if layout == "blocks":
            key = _scaled(shard.key_value, head_dim, query_width)
            value = _scaled(shard.key_value, head_dim, query_width + kv_width)
            cuts.append((columns[0], (query, key, value)))
        elif layout == "per_head" and kv_heads == heads:
            cuts.append((columns[0], (_scaled(shard.query, 3 * head_dim),)))
        else:
            raise _Whole(f"the layout of the fused {columns[0].short} of {type(module).__name__} is not known")
    else:
        for linear in columns:
            if _QUERY.match(linear.short) and linear.outputs == query_width:
                cuts.append((linear, (query,)))
            elif _KEY_VALUE.match(linear.short) and linear.outputs == kv_width:
                cuts.append((linear, (key_value,)))
            else:
                raise _Whole(f"{linear.short} with {linear.outputs} outputs is not understood")
        if len(cuts) != 3:
            raise _Whole(f"found {len(cuts)} of the three linears for query, key and value")

    extra = _extra_slices(module, [*columns, row], shard, heads, kv_heads, head_dim)
    for linear, ranges in cuts:
        _cut_outputs(plan, linear, ranges)
    _cut_inputs(plan, row, (query,))
    plan.slices.update({f"{name}.{parameter}": cut for parameter, cut in extra.items()})
    _plan_counts(plan, name, module, shard, heads, kv_heads, head_dim)


def _extra_slices(
    module: nn.Module, linears: list[_Linear], shard: HeadShard, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Slice]:
    """Slices of norms, attention sinks and the like inside an attention block."""
    slices = {}
    known = {linear.short for linear in linears}
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] in known:
            continue
        shape = tuple(parameter.shape)
        if shape == (head_dim,) and "norm" in name and not re.search(r"\.\d+\.", name):
            continue  # one norm that acts on each head alone; a list has one for each head
        if shape in ((heads,), (heads, head_dim)) and not name.startswith("k"):
            slices[name] = Slice(0, (shard.query,))
        elif shape in ((kv_heads,), (kv_heads, head_dim)) and name.startswith(("k", "v")):
            slices[name] = Slice(0, (shard.key_value,))
        else:
            raise _Whole(f"{name} of shape {shape} acts across heads")
    return slices


def _plan_counts(
    plan: TensorParallelPlan,
    name: str,
    module: nn.Module,
    shard: HeadShard,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    local_heads, local_kv = len(shard.query), len(shard.key_value)
    changes = {attribute: local_heads for attribute in _QUERY_COUNTS if getattr(module, attribute, None) == heads}
    changes |= {attribute: local_kv for attribute in _KV_COUNTS if getattr(module, attribute, None) == kv_heads}
    for attribute in _FEATURE_COUNTS:
        if getattr(module, attribute, None) == heads * head_dim:
            changes[attribute] = local_heads * head_dim
    if hasattr(module, "num_key_value_groups"):
        changes["num_key_value_groups"] = local_heads // local_kv
    plan.attributes[name] = changes
    if hasattr(module, "config"):
        # Some blocks read the counts from the configuration at run time, so the block gets a copy of it.
        plan.config[name] = {"num_attention_heads": local_heads}
        if getattr(module.config, "num_key_value_heads", None) is not None:
            plan.config[name]["num_key_value_heads"] = local_kv
