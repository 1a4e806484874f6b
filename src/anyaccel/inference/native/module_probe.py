# SPDX-License-Identifier: Apache-2.0
"""A few tokens through a model in memory and through the native decoder, before its weights are taken over.

This finds whatever somebody changed in what the model computes: its numbers, functions, classes or configuration. The
first layers, all kinds of them where that is a small part, run in float32 and with some of the vocabulary; then each
other layer runs with the weights of the first one of its kind, as only its code and its numbers are in question.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anyaccel.inference.checkpoints.sources import TorchSource
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.checkpoint import Checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, weights
from anyaccel.inference.spec.mapping import Unsupported

if TYPE_CHECKING:
    from anyaccel import _llm

_VOCABULARY = 512
_ROWS, _TOKENS, _STEPS = 2, 40, 2
_FEW_TOKENS = 4  # of one prompt, for the other layers
_MOST_TOKENS, _MOST_PRODUCTS = 1000, 1 << 32  # for a prompt that is longer than a window of attention
_TOLERANCE = 4e-3  # a factor that the model's conversion to bfloat16 has rounded; float32 sums differ by far less
_SAME = 1e-5  # the same sums, which may lie elsewhere in memory
_TRIES = 3  # experts whose scores are equal but for rounding may be chosen otherwise, not thrice
_MOST_LAYERS = 8
_SMALL = 1 << 22  # values; not worth several threads
_HALVES = (torch.bfloat16, torch.float16)
# transformers' implementations of attention that compute the same, and may not run without a GPU.
_NOT_HERE = re.compile(r"paged\|.*|flex_attention|flash_attention_\d")
# For the copies of both sides: of one layer, and of several, which may take so much of what the weights take, too.
_MOST_BYTES, _FEW_BYTES, _SHARE = 4 << 30, 64 << 20, 1 / 8


def check_computes_the_same(
    model: Any, config: Mapping[str, Any], rounded: Callable[[Sequence[float]], tuple[float, ...]] | None = None
) -> None:
    """Compare the logits of prompts and of cached steps after them.

    Args:
        model: a causal LM of transformers in memory, which is left as it is.
        config: `model.config.to_dict()`.
        rounded: what was done to the frequencies of rotary positions.

    Raises:
        Unsupported: they differ, or the model's own code fails.
        ModelError: see `Plan`.
    """
    family = family_of(config)
    spec = family.spec(config)
    count = _layers(family, spec, model)
    if count == 0:
        return
    part = replace(spec, layers=spec.layers[:count], vocab=min(spec.vocab, _VOCABULARY))
    used = _tensors(family, part)
    if any(not parameter.is_cpu for parameter in model.parameters()):
        return  # packing refuses it
    copier = _Copier(model, used, part)
    twin = copier.copy()
    checkpoint = Checkpoint(TorchSource(twin.state_dict(keep_vars=True)), dict(config), {}, rounded=rounded)
    plan = Plan(checkpoint, Precision("fp32"), 0, 1, part)
    native = _native(plan)
    # transformers keeps all tokens in the cache of a window of 1, of which its own uncached forward shows none: steps
    # through that are no measure.
    steps = 0 if any(each.window == 1 for each in _attentions(part)) else _STEPS
    tokens = _prompt_tokens(plan, steps)
    if tokens < 1:
        return
    _compare_logits(twin, native, part, tokens, steps)
    del native  # its threads wait by spinning, and would slow torch's down
    with _one_thread(), torch.inference_mode():
        _compare_layers(copier, twin, spec, torch.arange(min(_FEW_TOKENS, tokens))[None])


def _compare_layers(copier: _Copier, twin: Any, spec: DecoderSpec, ids_BT: torch.Tensor) -> None:
    """Give each other layer the weights and inputs of the first one of its kind, whose output it must have."""
    calls: dict[int, tuple[Any, Any]] = {}
    usual: dict[int, torch.Tensor] = {}

    def record(place: int, _layer: nn.Module, inputs: Any, named: Any) -> None:
        calls[place] = inputs, named

    copies = copier.layers
    handles = [
        layer.register_forward_pre_hook(functools.partial(record, place), with_kwargs=True)
        for place, layer in enumerate(copies)
    ]
    twin(ids_BT, use_cache=False)
    for handle in handles:
        handle.remove()
    kinds = copier.spec.layers
    for number in range(len(kinds), len(spec.layers)):
        place = kinds.index(spec.layers[number]) if spec.layers[number] in kinds else -1
        if place not in calls:
            continue
        if place not in usual:
            usual[place] = _output(copies[place], *calls[place])
        difference = _difference(_output(copier.layer(number, place), *calls[place]), usual[place])
        if difference > _SAME:
            raise _difference_error(twin, f" in layer {number}", difference)


def _output(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    inputs = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in inputs)  # it may write there
    try:
        found = layer(*inputs, **named)
    except Exception as error:
        raise _failure(error) from error
    first: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return first


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products of few tokens read weights, in which several threads gain little and wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _prompt_tokens(plan: Plan, steps: int) -> int:
    """How many tokens the prompt has: more than the windows of attention where those are short."""
    products = sum(each.rows * each.cols for each in plan.matrices)
    tokens = _TOKENS
    for window in (each.window + 8 for each in _attentions(plan.spec)):
        if tokens < window <= _MOST_TOKENS and _ROWS * window * products <= _MOST_PRODUCTS:
            tokens = window
    return min(tokens, plan.spec.max_tokens - steps) if plan.spec.max_tokens else tokens


def _compare_logits(twin: Any, native: _llm.Model, part: DecoderSpec, tokens: int, steps: int) -> None:
    """Compare the logits of prompts of so many tokens and of steps after them."""
    difference = 0.0
    for seed in range(_TRIES):
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(part.vocab, (_ROWS, tokens + steps), generator=generator)
        try:
            theirs = _module_logits(twin, ids_BT, tokens, part.is_recurrent)
        except Exception as error:
            raise _failure(error) from error
        ours = _native_logits(native, ids_BT, tokens, part.vocab)
        difference = _difference(ours, theirs)
        if difference <= _TOLERANCE:
            return
    raise _difference_error(twin, "", difference)


def _failure(error: Exception) -> Unsupported:
    """A model that was edited can fail in any way."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return Unsupported(f"code for a model whose own code fails ({text})")


def _difference_error(twin: Any, where: str, difference: float) -> Unsupported:
    return Unsupported(
        f"code for what this {type(twin).__name__} computes{where}: the results of a few tokens differ by "
        f"{difference:.2g} of the largest (was something in it, or in transformers, replaced or set?)"
    )


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where infinities and NaN do not match."""
    finite = theirs.isfinite()
    if not torch.equal(ours.where(~finite, 0.0).nan_to_num(7.0), theirs.where(~finite, 0.0).nan_to_num(7.0)):
        return math.inf
    ours, theirs = ours.where(finite, 0.0), theirs.where(finite, 0.0)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def _tensors(family: Family, spec: DecoderSpec) -> set[str]:
    """Names of what the weights of `spec` may be made of."""
    return {
        tensor
        for shapes in weights(spec)
        for shape in shapes
        for alternative in family.names.parts(spec, shape.name)
        for part in alternative
        for tensor in part.tensors
    }


def _layers(family: Family, spec: DecoderSpec, model: Any) -> int:
    """How many of the first layers show what all of them do, as far as there is room; 0: not even one has."""
    kinds = list(dict.fromkeys(spec.layers))
    count = max(spec.layers.index(kind) for kind in kinds) + 1
    state = model.state_dict()
    sizes = {name: tensor.numel() for name, tensor in state.items()}
    room = max(_FEW_BYTES, sum(tensor.nbytes for tensor in state.values()) * _SHARE)
    for fewer in range(min(count, _MOST_LAYERS), 0, -1):
        part = replace(spec, layers=spec.layers[:fewer], vocab=min(spec.vocab, _VOCABULARY))
        bodies = replace(part, layers=())
        values = sum(sizes.get(name, 0) for name in _tensors(family, part) - _tensors(family, bodies))
        if 8 * values <= (min(room, _MOST_BYTES) if fewer > 1 else _MOST_BYTES):  # four bytes on each side
            return fewer
    return 0


@dataclass
class _Copier:
    """Copies a model's modules, with its first layers only; the weights that count are float32, the others shared."""

    model: Any
    used: set[str]
    spec: DecoderSpec
    modules: dict[int, nn.Module] = field(default_factory=dict)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    configs: dict[int, Any] = field(default_factory=dict)
    # The layers: before their numbers in names, the model's own, the copies.
    prefix: str = ""
    originals: nn.ModuleList = field(default_factory=nn.ModuleList)
    layers: nn.ModuleList = field(default_factory=nn.ModuleList)

    def copy(self) -> Any:
        config = copy.deepcopy(self.model.config, self.configs)
        if _NOT_HERE.fullmatch(str(config._attn_implementation)):
            config._attn_implementation = "eager"
        self.vocabulary = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return self._module(self.model, "")

    def _module(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        twin = self.modules[id(module)] = copy.copy(module)
        for attribute, value in vars(module).items():
            if id(value) in self.configs:
                vars(twin)[attribute] = self.configs[id(value)]
        vars(twin)["training"] = False
        # Hooks that are left are transformers' own, to train and to record outputs; what is compiled is the original.
        vars(twin).update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), _compiled_call_impl=None)
        prefix = f"{name}." if name else ""
        in_vocabulary = any(module is each for each in self.vocabulary)
        if in_vocabulary and hasattr(module, "padding_idx"):
            vars(twin)["padding_idx"] = None  # it says which row has no gradient
        twin._parameters = {
            key: self._parameter(each, prefix + key, in_vocabulary) for key, each in module._parameters.items()
        }
        twin._buffers = {
            key: None if each is None else each.float() if each.dtype in _HALVES else each.clone()
            for key, each in module._buffers.items()
        }
        children = list(module._modules.items())
        if isinstance(module, nn.ModuleList) and any(each.startswith(f"{prefix}0.") for each in self.used):
            children = [each for each in children if any(one.startswith(f"{prefix}{each[0]}.") for one in self.used)]
            if not self.prefix:  # further lists are inside of this one
                self.prefix, self.originals, self.layers = prefix, module, twin  # type: ignore[assignment]
        twin._modules = {key: child and self._module(child, prefix + key) for key, child in children}
        return twin

    def layer(self, number: int, place: int) -> nn.Module:
        """A copy of a layer, with the weights that the copied one at `place` has."""
        weights = dict(self.layers[place].named_parameters())
        for name, parameter in self.originals[number].named_parameters():
            if name in weights:
                self.parameters[id(parameter)] = weights[name]
        twin = self._module(self.originals[number], f"{self.prefix}{number}")
        for name, buffer in self.layers[place].named_buffers():
            if f"{self.prefix}{place}.{name}" in self.used:
                above, _, short = name.rpartition(".")
                twin.get_submodule(above)._buffers[short] = buffer
        return twin

    def _parameter(self, parameter: nn.Parameter | None, name: str, in_vocabulary: bool) -> nn.Parameter | None:
        if parameter is None or id(parameter) in self.parameters:
            return None if parameter is None else self.parameters[id(parameter)]
        value = parameter.detach()
        if in_vocabulary:
            value = value[: self.spec.vocab]
        if in_vocabulary or name in self.used:
            value = value.float()
        twin = self.parameters[id(parameter)] = nn.Parameter(value, requires_grad=False)
        return twin


def _native(plan: Plan) -> _llm.Model:
    from anyaccel import _llm

    shapes = plan.shapes()
    limit = _ROWS * 1024 * max(1, _cache_values(plan.spec)) * 4
    if plan.spec.is_recurrent:
        limit = 0  # none: sequences have states too
    threads = 1 if sum(each.rows * each.cols for each in plan.matrices) < _SMALL else 0
    made = _llm.DecoderModel(plan.spec, shapes["matrices"], shapes["vectors"], threads, "f32", limit)
    plan.fill(made, lambda _done, _total: None)
    made.finish()
    return made


def _cache_values(spec: DecoderSpec) -> int:
    """The number of values that one token takes in the cache, at most."""
    return sum(each.kv_heads * (each.head_dim + each.value_dim) for each in _attentions(spec))


def _attentions(spec: DecoderSpec) -> list[Attention]:
    return [layer.attention for layer in spec.layers if layer.attention is not None]


def _row_slices(tokens: int, every: int) -> Sequence[tuple[int, int]]:
    """The prompt at once, then one token a step."""
    return [(0, tokens), *((each, each + 1) for each in range(tokens, every))]


def _module_logits(twin: Any, ids_BT: torch.Tensor, tokens: int, recurrent: bool) -> torch.Tensor:
    found: list[torch.Tensor] = []
    past: dict[str, Any] = {}
    # Mamba's models have a name of their own for the cache, and those of hybrids do not count what is in it.
    counts = recurrent and "position_ids" in inspect.signature(twin.forward).parameters
    with torch.inference_mode():
        twin(ids_BT[:, :1], use_cache=False)  # frequencies of rotary positions may be those of an earlier, longer text
        for first, last in _row_slices(tokens, ids_BT.shape[1]):
            output = twin(ids_BT[:, first:last], use_cache=tokens < ids_BT.shape[1], **past)
            past = {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}
            if not past and last < ids_BT.shape[1]:  # RecurrentGemma keeps its states to itself
                return twin(ids_BT, use_cache=False).logits.float()  # type: ignore[no-any-return]
            if counts and past:
                past["position_ids"] = torch.arange(last, last + 1)[None].expand(len(ids_BT), 1)
            found.append(output.logits.float())
    return torch.cat(found, 1)


def _native_logits(model: _llm.Model, ids_BT: torch.Tensor, tokens: int, vocabulary: int) -> torch.Tensor:
    sequences = [model.create() for _ in ids_BT]
    found = []
    try:
        for first, last in _row_slices(tokens, ids_BT.shape[1]):
            ids = ids_BT[:, first:last].contiguous()
            logits = torch.empty(*ids.shape, vocabulary)
            rows = list(range(ids.numel()))
            model.forward(sequences, [last - first] * len(sequences), ids.data_ptr(), logits.data_ptr(), rows)
            found.append(logits)
    finally:
        for sequence in sequences:
            model.destroy(sequence)
    return torch.cat(found, 1)
