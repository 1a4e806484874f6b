# SPDX-License-Identifier: Apache-2.0
"""A model in memory that somebody edited, in whatever place, answers as it was edited: natively or by its own code."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import anyaccel
import family_cases
from anyaccel.inference.families.registry import FAMILIES
from anyaccel.inference.native.in_memory import checkpoint_in_memory
from anyaccel.inference.native.module_probe import _difference as difference
from anyaccel.inference.native.module_probe import check_computes_the_same
from anyaccel.inference.spec.mapping import Unsupported

IDS = torch.randint(3, 131, (2, 24), generator=torch.Generator().manual_seed(7))


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Give `path` of the model, of each layer where it has a `*`, another value: of the old one where it is a function.

    A number in a path is an index, or a key where there is a mapping.
    """

    def edit(model: Any) -> None:
        *above, name = path.split(".")
        places = [model]
        for part in above:
            if part == "*":
                places = [each for place in places for each in place]
            else:
                places = [place[part] if isinstance(place, dict) else getattr(place, part) for place in places]
        for place in places:
            old = place[name] if isinstance(place, dict) else getattr(place, name, None)
            new = value(old) if isinstance(value, types.LambdaType) else value
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                old.copy_(new)
            elif isinstance(place, dict):
                place[name] = new
            else:
                setattr(place, name, new)

    return edit


def _sdpa(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def _both(*edits: Callable[[Any], None]) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for each in edits:
            each(model)

    return edit


def _shadowed(path: str, name: str, change: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], None]:
    """Put a function of the instance before the method `name` of its class."""

    def edit(model: Any) -> None:
        module = model.get_submodule(path)
        setattr(module, name, types.MethodType(change(getattr(type(module), name)), module))

    return edit


def _scaled(factor: float) -> Callable[[Any], Any]:
    return lambda old: old * factor


def _swapped(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


def _repeated(model: Any) -> None:
    """The first layer instead of the second, with a cache of its own."""
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def _own_activation(model: Any) -> None:
    for block in model.transformer.h:
        vars(block.mlp.act)["forward"] = torch.tanh


def _own_config(model: Any) -> None:
    """A copy of the configuration in one module, with other values."""
    model.config = copy.deepcopy(model.config)
    model.config.final_logit_softcapping = 0.5


_ATTN = "model.layers.*.self_attn"

# Family case, what is edited, how.
EDITS: list[tuple[str, str, Callable[[Any], None]]] = [
    ("llama", "is_causal", _both(_sdpa, _set(f"{_ATTN}.is_causal", False))),
    ("llama", "scaling", _set(f"{_ATTN}.scaling", _scaled(0.3))),
    ("llama", "inv_freq", _set("model.rotary_emb.inv_freq", _scaled(0.5))),
    ("llama", "attention_scaling", _set("model.rotary_emb.attention_scaling", 1.4)),
    ("llama", "variance_epsilon", _set("model.layers.*.input_layernorm.variance_epsilon", 0.5)),
    ("llama", "config.rms_norm_eps", _set("config.rms_norm_eps", 0.5)),
    ("llama", "config.rope_theta", _set("config.rope_theta", 7.0)),
    ("llama", "config.rope_parameters", _set("config.rope_parameters", {"rope_type": "linear", "factor": 4.0})),
    ("llama", "config.hidden_act", _set("config.hidden_act", "relu")),
    ("llama", "config.num_hidden_layers", _set("config.num_hidden_layers", 1)),
    ("llama", "act_fn", _set("model.layers.*.mlp.act_fn", nn.Tanh())),
    ("llama", "max_norm", _set("model.embed_tokens.max_norm", 0.5)),
    ("llama", "swapped layers", _swapped),
    ("llama", "copied layer", _repeated),
    ("gemma2", "a config of its own", _own_config),
    ("llama-yarn", "attention_scaling", _set("model.rotary_emb.attention_scaling", 0.7)),
    ("llama-longrope", "original_inv_freq", _set("model.rotary_emb.long_inv_freq", torch.ones(4))),
    ("llama-head-dim", "act_fn", _set("model.layers.*.mlp.act_fn", lambda _: nn.SiLU())),
    ("mistral", "sliding_window", _set("config.sliding_window", 2)),
    ("qwen2-windows", "sliding_window", _set(f"{_ATTN}.sliding_window", 2)),
    ("smollm3", "use_rope", _set(f"{_ATTN}.use_rope", lambda old: not old)),
    ("gemma", "embed_scale", _set("model.embed_tokens.embed_scale", _scaled(0.5))),
    ("gemma2-softcaps", "attn_logit_softcapping", _set(f"{_ATTN}.attn_logit_softcapping", 0.2)),
    ("gemma2-softcaps", "config.final_logit_softcapping", _set("config.final_logit_softcapping", 0.5)),
    ("gemma3", "config.layer_types", _set("config.layer_types", ["full_attention", "sliding_attention"])),
    ("granite", "residual_multiplier", _set("model.layers.*.residual_multiplier", 0.9)),
    ("cohere", "logit_scale", _set("logit_scale", 3.0)),
    ("olmo-clip", "config.clip_qkv", _set("config.clip_qkv", 0.1)),
    ("glm4_moe", "routed_scaling_factor", _set("model.layers.1.mlp.gate.routed_scaling_factor", 4.0)),
    ("deepseek_v3", "topk_group", _set("model.layers.1.mlp.gate.topk_group", 4)),
    ("mixtral", "top_k", _set("model.layers.*.mlp.gate.top_k", 1)),
    ("qwen3_moe", "norm_topk_prob", _set("model.layers.*.mlp.gate.norm_topk_prob", False)),
    ("gpt_oss", "alpha", _set("model.layers.*.mlp.experts.alpha", 0.5)),
    ("gpt2", "act", _own_activation),
    ("gpt2", "a method", _shadowed("transformer.h.0.mlp", "forward", lambda f: lambda self, x: 2 * f(self, x))),
    ("gptj", "embed_positions", _set("transformer.h.*.attn.embed_positions", _scaled(0.5))),
    ("gpt_neo", "mask", _set("transformer.h.*.attn.attention.bias", lambda old: torch.ones_like(old))),
    ("gpt_neox", "use_parallel_residual", _set("gpt_neox.layers.*.use_parallel_residual", False)),
    ("opt", "do_layer_norm_before", _set("model.decoder.layers.*.do_layer_norm_before", False)),
    ("opt", "offset", _set("model.decoder.embed_positions.offset", 5)),
    ("bloom", "inv_norm_factor", _set("transformer.h.*.self_attention.inv_norm_factor", 0.9)),
]
# What the modules do not look at any more once they are built, or not with this attention.
_SILENT = (
    *("config.rms_norm_eps", "config.rope_theta", "config.rope_parameters", "config.hidden_act"),
    *("sliding_window", "inv_norm_factor"),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models so small are slower with more, by far where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def _built(case: str) -> Any:
    return family_cases.build(case)


def _edited(case: str, edit: Callable[[Any], None]) -> Any:
    model = copy.deepcopy(_built(case))
    with torch.no_grad():
        edit(model)
    return model


def _logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def _answers_as_edited(model: Any, usual: torch.Tensor | None) -> Any:
    expected = _logits(copy.deepcopy(model))
    if usual is not None:
        assert not torch.allclose(expected, usual, rtol=1e-2, atol=1e-2)
    engine = anyaccel.init_inference(model, dtype="fp32")
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-3, atol=1e-3)
    return engine


@functools.cache
def _usual(case: str) -> torch.Tensor:
    return _logits(copy.deepcopy(_built(case)))


@pytest.mark.parametrize(("case", "name", "edit"), EDITS, ids=[f"{case}-{name}" for case, name, _ in EDITS])
def test_an_edited_model_answers_as_it_was_edited(case: str, name: str, edit: Callable[[Any], None]) -> None:
    engine = _answers_as_edited(_edited(case, edit), None if name in _SILENT else _usual(case))
    if engine.runtime != "native":
        assert engine.why


@pytest.mark.parametrize("runtime", ["native", "torch", "device"])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        ("model.layers.{last}.self_attn.o_proj", (1, 1)),
        ("model.layers.{last}.mlp.down_proj", (-1, 1)),
        ("model.layers.{last}.input_layernorm", (1,)),
        ("model.embed_tokens", (-1, 1)),
        ("lm_head", (-1, 1)),
    ],
)
def test_weights_whose_memory_is_repeated_are_read_as_they_are(
    module: str, shape: tuple[int, ...], runtime: str
) -> None:
    """Tensors with strides of 0, in the last layer: only the first ones are compared when a model is loaded."""
    model = copy.deepcopy(_built("llama"))
    place = model.get_submodule(module.format(last=len(model.model.layers) - 1))
    whole = place.weight.shape
    few = torch.randn([a if b < 0 else b for a, b in zip(whole, shape, strict=True)]) * 0.2
    place.weight = nn.Parameter(few.expand(whole))
    assert 0 in place.weight.stride()
    expected = _logits(model)
    engine = anyaccel.init_inference(model, dtype="fp32", runtime=runtime)
    assert engine.runtime == runtime
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_rotary_frequencies_that_a_conversion_has_rounded_are_used(case: str, back: bool) -> None:
    """As `model.to(torch.bfloat16)` leaves them, also after `.float()`: at later positions that is visible."""
    model = copy.deepcopy(_built(case))
    if back:
        model = model.to(torch.bfloat16).float()
    else:
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                module.to(torch.bfloat16)
    ids = torch.randint(3, 131, (1, 63), generator=torch.Generator().manual_seed(1))
    expected = _logits(model, ids)
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "native"
    assert float((_logits(engine, ids) - expected).abs().max() / expected.abs().max()) < 1e-5


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def _no_rotation(q: Any, k: Any, *_args: Any, **_kwargs: Any) -> Any:
    return q, k


@pytest.mark.parametrize(
    ("case", "place", "name", "change"),
    [
        ("llama", modeling_llama.LlamaMLP, "forward", _twice),
        ("llama", modeling_llama.LlamaRMSNorm, "forward", _twice),
        ("llama", modeling_llama, "apply_rotary_pos_emb", lambda _: _no_rotation),
        (
            "mistral",
            modeling_mistral,
            "create_sliding_window_causal_mask",
            lambda _: create_causal_mask,
        ),
    ],
    ids=["mlp", "norm", "rope", "window"],
)
def test_patched_classes_and_functions_count(
    case: str, place: Any, name: str, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, usual = copy.deepcopy(_built(case)), _usual(case)
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    engine = _answers_as_edited(model, usual)
    assert "code for what this" in engine.why


def test_hooks_of_all_modules_count() -> None:
    model, usual = copy.deepcopy(_built("llama")), _usual("llama")
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, output: output * 2 if isinstance(module, modeling_llama.LlamaMLP) else None
    )
    try:
        engine = _answers_as_edited(model, usual)
    finally:
        hook.remove()
    assert engine.runtime != "native"


_attention = modeling_llama.LlamaAttention.forward


def _second_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
    out, weights = _attention(self, *args, **kwargs)
    return out * (2 if self.layer_idx == 1 else 1), weights


_causal = modeling_llama.LlamaForCausalLM.forward


def _banned(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = _causal(self, *args, **kwargs)
    output.logits[..., 7:50] = float("-inf")
    return output


@functools.wraps(modeling_llama.LlamaMLP.forward)
def _in_disguise(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.up_proj(x))


@pytest.mark.parametrize(
    ("place", "name", "new"),
    [
        (modeling_llama.LlamaAttention, "forward", _second_layer),
        (modeling_llama.LlamaForCausalLM, "forward", _banned),
        (modeling_llama.LlamaMLP, "forward", _in_disguise),
        (modeling_llama, "repeat_kv", modeling_gemma.repeat_kv),
        (modeling_llama, "rotate_half", functools.partial(lambda x: x)),
        (nn.Linear, "forward", _twice(nn.Linear.forward)),
        (masking_utils, "create_causal_mask", masking_utils.create_bidirectional_mask),
        (modeling_llama, "create_causal_mask", masking_utils.create_bidirectional_mask),
    ],
    ids=["layer", "vocabulary", "wraps", "same", "partial", "linear", "unused", "mask"],
)
def test_code_that_was_replaced_counts_where_it_computes_something_else(
    place: Any, name: str, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, usual = copy.deepcopy(_built("llama")), _usual("llama")
    monkeypatch.setattr(place, name, new)
    if torch.equal(_logits(copy.deepcopy(model)), usual):  # nobody calls it
        checkpoint_in_memory(model, None, False)
    else:
        assert "code for what this LlamaForCausalLM computes" in _answers_as_edited(model, usual).why


def test_code_that_was_replaced_by_the_same_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x))
    assert _answers_as_edited(copy.deepcopy(_built("llama")), None).runtime == "native"


def test_logits_that_are_not_finite_are_compared() -> None:
    ones = torch.ones(2, 3)
    for value in (float("inf"), float("-inf"), float("nan")):
        other = ones.clone()
        other[1, 2] = value
        assert not difference(ones, other) <= 1e9
        assert not difference(other, ones) <= 1e9
        assert not difference(-other, other) <= 1e9 or value != value
        assert difference(other, other.clone()) == 0


def _scores(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    return modeling_llama.eager_attention_forward(module, q, k, v, mask, scaling=3 * scaling)


def _named_attention(model: Any) -> None:
    model.config._attn_implementation = "flex_attention_mine"


def _one_layers_attention(model: Any) -> None:
    model.config._attn_implementation = "eager"
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(model.config)
    attention.config._attn_implementation = "flex_attention_mine"


def _known_attention(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    AttentionInterface._global_mapping["sdpa"] = _scores


@pytest.mark.parametrize("edit", [_named_attention, _one_layers_attention, _known_attention])
def test_an_attention_that_somebody_registered_counts(
    edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**AttentionInterface._global_mapping, "flex_attention_mine": _scores}
    masks = {**AttentionMaskInterface._global_mapping, "flex_attention_mine": masking_utils.eager_mask}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", own)
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", masks)
    engine = _answers_as_edited(_edited("llama", edit), _usual("llama"))
    assert engine.runtime == "torch"


def _bias_as_buffer(model: Any) -> None:
    linear = model.model.layers[1].mlp.down_proj
    del linear._parameters["bias"]
    linear.register_buffer("bias", torch.arange(linear.out_features) / 4.0)


def _persistent_frequencies(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * torch.tensor([1.0, *[0.0] * (len(rotary.inv_freq) - 1)]))


@pytest.mark.parametrize("edit", [_bias_as_buffer, _persistent_frequencies])
def test_buffers_that_no_checkpoint_of_it_has_count(edit: Callable[[Any], None]) -> None:
    engine = _answers_as_edited(_edited("llama", edit), _usual("llama"))
    assert engine.runtime == "torch"


def _asked(**more: bool) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        model.set_attn_implementation("eager")
        model(IDS, **more)

    return edit


def _trained(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    with torch.enable_grad():
        model(IDS, labels=IDS).loss.backward()
    model.eval()


def _compiled(model: Any) -> None:
    model.compile(backend="eager")
    model(IDS)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("case", "use"),
    [
        ("llama", _asked(output_hidden_states=True)),
        ("gpt2", _asked(output_attentions=True)),
        ("mixtral", _asked(output_router_logits=True)),
        ("llama", _trained),
        ("gpt2", _trained),
        pytest.param("llama", _compiled, marks=pytest.mark.slow),
    ],
    ids=["hidden states", "attentions", "routers", "trained", "trained-gpt2", "compiled"],
)
def test_what_transformers_leaves_behind_is_no_edit(case: str, use: Callable[[Any], None]) -> None:
    engine = _answers_as_edited(_edited(case, use), None)
    assert engine.runtime == "native", engine.why


def test_a_hook_beside_those_of_transformers_counts() -> None:
    model = _edited("llama", _asked(output_hidden_states=True))
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: output * 2)
    assert _answers_as_edited(model, _usual("llama")).runtime == "torch"


@pytest.mark.slow  # the compiler's import alone takes several seconds
@pytest.mark.parametrize("runtime", ["native", "torch"])
@pytest.mark.parametrize("how", ["wrapped", "in place", "forward"])
def test_a_compiled_model_answers(how: str, runtime: str) -> None:
    model = copy.deepcopy(_built("llama"))
    if runtime == "torch":
        model.model.layers[1].input_layernorm.variance_epsilon = 0.3
    expected = _logits(copy.deepcopy(model))
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    engine = anyaccel.init_inference(model, dtype="fp32")
    for _ in range(2):
        torch.testing.assert_close(_logits(engine), expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_fails_is_not_answered_for() -> None:
    model = _edited("llama", _set(f"{_ATTN}.head_dim", 5))
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "torch"
    with pytest.raises(RuntimeError):
        engine(IDS)


_ONE_EACH = [name for name in FAMILIES if name in family_cases.CASES]


# Its buffers (the embedding's scale, rotary frequencies) are rounded in half precision, which changes its answers by
# more than the probe allows: it runs as its own code then.
_ROUNDED = ("gemma4_text", "gemma4_unified_text")
# A third of the families for each change, and all that compute positions in a way of their own.
_UNEDITED = [
    pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
    for number, name in enumerate(_ONE_EACH)
    if name not in _ROUNDED
]


@pytest.mark.parametrize("case", [*_UNEDITED, "llama-dynamic", "phi3-longrope", "olmo3-yarn"])
def test_models_that_nobody_edited_pass(case: str, tmp_path: Any) -> None:
    """Also those that have been used, trained, converted or loaded."""
    model = copy.deepcopy(_built(case))
    checkpoint_in_memory(model, None, False)
    short, long = IDS[:, :3], torch.cat([IDS, IDS], 1)
    for ids in (long, short, long):
        _logits(model, ids)
    model.generate(short, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(short))
    model.train()
    checkpoint_in_memory(model, None, False)
    assert model.training
    for dtype in (torch.bfloat16, torch.float16):
        checkpoint_in_memory(copy.deepcopy(model).to(dtype), None, False)
        checkpoint_in_memory(copy.deepcopy(model).to(dtype).float(), None, False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype="bfloat16", attn_implementation="eager")
    checkpoint_in_memory(loaded, None, False)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    for case in ("llama-longrope", "qwen2_moe"):
        model = copy.deepcopy(_built(case))
        state = model.state_dict(keep_vars=True)
        before = {name: (id(each), each.data_ptr(), each.clone()) for name, each in state.items()}
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        check_computes_the_same(model, model.config.to_dict())
        for name, (number, address, value) in before.items():
            now = model.state_dict(keep_vars=True)[name]
            assert (id(now), now.data_ptr()) == (number, address) and torch.equal(now, value)
        assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
        assert len(model.model.layers) == 2


def test_a_window_of_one_token_is_right_with_a_cache_too() -> None:
    """transformers' cache of such a window shows all tokens; the whole text at once is what counts."""
    config = transformers.MistralConfig(**family_cases.common(sliding_window=1))
    torch.manual_seed(3)
    model = transformers.MistralForCausalLM(config).eval()
    expected = _logits(model)
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "native"
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-4, atol=1e-4)
    found, cache = [], None
    for first, last in ((0, 9), (9, 10), (10, 12), (12, 24)):
        output = engine(IDS[:, first:last], past_key_values=cache)
        cache = output.past_key_values
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)


def test_asking_for_the_native_runtime_names_the_edit() -> None:
    model = _edited("llama", _set(f"{_ATTN}.scaling", 0.9))
    with pytest.raises(Unsupported, match=r"code for what this LlamaForCausalLM computes: the results"):
        anyaccel.init_inference(model, dtype="fp32", runtime="native")
    assert torch.equal(_logits(model), _logits(model))  # nothing was taken


def _tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _shared(path: str) -> Callable[[Any], None]:
    """The second layer has what the first one has there."""

    def edit(model: Any) -> None:
        above, _, name = path.rpartition(".")
        first, second = (layer.get_submodule(above) if above else layer for layer in model.model.layers)
        setattr(second, name, getattr(first, name))

    return edit


def _same_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def _large_llama() -> Any:
    """Of weights that the heap gives back to the system, so that reading them afterwards is not right by chance."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **family_cases.common(vocab_size=4000, hidden_size=192, intermediate_size=600, tie_word_embeddings=False)
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "edit",
    [_tied, _shared("mlp.up_proj.weight"), _shared("input_layernorm.weight"), _shared("mlp"), _same_layer],
    ids=["head", "weight", "norm", "mlp", "layer"],
)
def test_a_parameter_in_two_places_is_kept_until_both_are_packed(edit: Callable[[Any], None]) -> None:
    model = _large_llama()
    edit(model)
    expected = model(IDS, use_cache=False).logits.detach()
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "native"
    with torch.inference_mode():
        torch.testing.assert_close(engine(IDS, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
