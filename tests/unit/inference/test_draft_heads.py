# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction: they draft what their definition says, and change no answer."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import anyaccel
import family_cases
import fuzz_models
import native_models
from anyaccel import _llm
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import generate_tokens
from anyaccel.inference.families.registry import ARCHITECTURES
from anyaccel.inference.native.draft import borrow
from anyaccel.inference.native.runtime import NativeModel, RankPlace, load_native
from anyaccel.inference.options import ModelOptions

VOCAB = 131
FEW = dict.fromkeys((7, 19, 54), 10000.0)  # the only tokens that answers and drafts take
MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.8, "seed": 3},
    {"do_sample": True, "temperature": 0.6, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
]
FIRST = "model.layers.{first}."
NEXTN = {
    "fuse": FIRST + "eh_proj",
    "embed_norm": FIRST + "enorm",
    "hidden_norm": FIRST + "hnorm",
    "norm": FIRST + "shared_head.norm",
    "layer": FIRST,
}
MTP = {
    "fuse": "mtp.fc",
    "embed_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0.",
}
MIMO = {
    "fuse": "model.mtp_layers.0.input_proj",
    "embed_norm": "model.mtp_layers.0.token_layernorm",
    "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
    "norm": "model.mtp_layers.0.final_layernorm",
    "layer": "model.mtp_layers.0.",
}
CASES = {
    "deepseek_v3": NEXTN,
    "deepseek_v32": NEXTN,
    "glm4_moe": NEXTN,
    "glm4_moe_lite": NEXTN,
    "qwen3_next": MTP,
    "qwen3_5_text": MTP,
    "qwen3_5_moe_text": MTP,
    "qwen2": MIMO,
}


class Head:
    """The definition (DeepSeek-V3, 2024, section 2.2), of transformers' own layers and norms.

    Position i has the model's hidden state behind its last norm, and the embedding of token i + 1; what comes of it
    behind the head's norm predicts token i + 2, and is the hidden state of the next position.
    """

    def __init__(self, model: Any, other: Any, names: dict[str, str]) -> None:
        self.model, self.layer = model, other.model.layers[-1]
        first = str(len(model.model.layers))
        self.names = {key: name.replace("{first}", first) for key, name in names.items()}
        generator = torch.Generator().manual_seed(5)
        size = model.config.hidden_size
        norm = type(model.model.norm)
        self.norms = {}
        for name in ("embed_norm", "hidden_norm", "norm"):
            self.norms[name] = norm(size, model.config.rms_norm_eps)
            with torch.no_grad():
                self.norms[name].weight.add_(0.2 * torch.randn(size, generator=generator))
        self.fuse = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {self.names["layer"] + name: value for name, value in self.layer.state_dict().items()}
        experts = self.names["layer"] + "mlp.experts."
        if f"{experts}down_proj" in found:  # checkpoints have them one by one
            gate_up, down = found.pop(f"{experts}gate_up_proj"), found.pop(f"{experts}down_proj")
            for expert in range(len(down)):
                gate, up = gate_up[expert].chunk(2)
                for name, value in (("gate", gate), ("up", up), ("down", down[expert])):
                    found[f"{experts}{expert}.{name}_proj.weight"] = value
        found |= {f"{self.names[name]}.weight": norm.weight.detach() for name, norm in self.norms.items()}
        return found | {f"{self.names['fuse']}.weight": self.fuse}

    def run(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        body = self.model.model
        embedded = self.norms["embed_norm"](body.embed_tokens(torch.tensor(tokens)))
        both = [embedded, self.norms["hidden_norm"](hidden)]
        x = torch.cat(both[::-1] if self.names["fuse"] == MIMO["fuse"] else both, -1) @ self.fuse.T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        x = self.layer(
            x[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=body.rotary_emb(x[None], positions),
        )
        x = x[0] if isinstance(x, tuple) else x
        return self.norms["norm"](x[0])

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        kept = list[torch.Tensor]()
        body = self.model.model
        with body.norm.register_forward_hook(lambda norm, given, made: kept.extend((given[0][0], made[0]))):
            body(torch.tensor([tokens[:-1]]))
        hidden = kept[0 if self.names["fuse"] == MIMO["fuse"] else 1]  # MiMo's is before the norm
        text, found = tokens[1:], list[int]()
        for _ in range(count):
            last = self.run(hidden, text)[-1]
            found.append(best(self.model.lm_head(last)))
            text, hidden = [*text, found[-1]], torch.cat([hidden, last[None]])
        return found


def best(logits: torch.Tensor) -> int:
    return max(FEW, key=lambda token: float(logits[token]))


def save(folder: Path, case: str, head: bool = True, **more: Any) -> tuple[Any, Head]:
    model = family_cases.build(case, positions=1024)
    model.save_pretrained(folder)
    drafts = Head(model, family_cases.build(case, seed=7, positions=1024), CASES[case])
    if head:
        stored = load_file(folder / "model.safetensors")
        stored |= {name: value.contiguous() for name, value in drafts.tensors().items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if case == "qwen2":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None} | more))
    return model, drafts


def load(folder: Path, draft: Path | None = None, **options: Any) -> NativeModel:
    given = ModelOptions(dtype="fp32", threads=1, **options)
    native = load_native(folder, given)
    head = load_native(draft or folder, given, draft_head=len(native.whole_spec.layers))
    borrow(native, head, draft or folder)
    native.model.set_draft(head.model)
    native.draft = head
    return native


def request(model: Any, prompt: list[int], draft: int, **options: Any) -> Any:
    given = {"ignore_end": True, "max_new_tokens": 30, "logprobs": 2, "bias": FEW}
    drafts = {"draft_tokens": draft, "draft_model": True, "draft_always": True} if draft else {}
    return _llm.Request(model, prompt, given | drafts | options)


def finish(model: Any, *requests: Any) -> None:
    while left := [one for one in requests if not one.finished]:
        model.step(left)


def prompt_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(count)]


Made = tuple[Path, NativeModel, Head]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def make(case: str) -> Made:
        if case not in known:
            folder = tmp_path_factory.mktemp(case)
            _, head = save(folder, case)
            known[case] = folder, load(folder), head
        return known[case]

    return make


class Eagle:
    """An EAGLE-3 head (Li et al., 2025): one layer, whose attention reads the embedding beside the hidden states.

    Of the model it has these behind three of its layers, made as wide as one by `fc`; behind its own drafts, its own.
    """

    LAYERS, KNOWN = 6, sorted({*FEW, *range(3, VOCAB, 2)})  # of the model; the tokens of the head

    def __init__(self, folder: Path, **config: Any) -> None:
        import transformers

        known = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        known |= {"vocab_size": VOCAB, "max_position_embeddings": 1024, "tie_word_embeddings": False}
        torch.manual_seed(1)
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**known, num_hidden_layers=self.LAYERS, attn_implementation="eager")
        ).eval()
        with torch.no_grad():
            for value in self.model.parameters():
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5 if value.dim() > 1 else value + 0.1)
        self.model.save_pretrained(folder / "model")
        self.config, self.taps = config, config.pop("taps", (2, self.LAYERS // 2, self.LAYERS - 3))
        prefix = config.pop("prefix", "midlayer.")
        shapes = {
            "self_attn.q_proj": (48, 96),
            "self_attn.k_proj": (24, 96),
            "self_attn.v_proj": (24, 96),
            "self_attn.o_proj": (48, 48),
            "mlp.gate_proj": (64, 48),
            "mlp.up_proj": (64, 48),
            "mlp.down_proj": (48, 64),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.w = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        self.w |= {name: 1 + 0.2 * torch.randn(48) for name in norms}
        tensors = {f"{prefix}{name}.weight": value for name, value in self.w.items()}
        others = {"fc": torch.randn(48, 144) / 12, "norm": 1 + 0.2 * torch.randn(48)}
        others["lm_head"] = torch.randn(len(self.KNOWN), 48) / 7
        self.w |= others
        tensors |= {f"{name}.weight": value for name, value in others.items()}
        tensors["d2t"] = torch.tensor([token - row for row, token in enumerate(self.KNOWN)])
        tensors["t2d"] = torch.tensor([token in self.KNOWN for token in range(VOCAB)])
        head = folder / "head"
        head.mkdir()
        save_file(tensors, head / "model.safetensors", {"format": "pt"})
        inner = {**known, "model_type": "llama", "intermediate_size": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
        outer = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(self.KNOWN)}
        if "speculators_model_type" in config:
            inner = {"transformer_layer_config": inner}
        (head / "config.json").write_text(json.dumps({**inner, **outer, **config}))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.w[name]

    def run(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        count, normed = len(tokens), self.norm("hidden_norm", hidden)
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat([self.norm("input_layernorm", embedded), normed], -1)
        q, k, v = (
            (both @ self.w[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, 12)).transpose(0, 1) for name in "qkv"
        )
        cosine, sine = self.model.model.rotary_emb(both, torch.arange(count)[None])
        q, k = apply_rotary_pos_emb(q[None], k[None], cosine, sine)
        k, v = k[0].repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        x = torch.nn.functional.scaled_dot_product_attention(q, k[None], v[None], is_causal=True)[0]
        residual = normed if self.config.get("norm_before_residual") else hidden
        h = residual + x.transpose(0, 1).flatten(1) @ self.w["self_attn.o_proj"].T
        x = self.norm("post_attention_layernorm", h)
        x = torch.nn.functional.silu(x @ self.w["mlp.gate_proj"].T) * (x @ self.w["mlp.up_proj"].T)
        return h + x @ self.w["mlp.down_proj"].T

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        layers = self.model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([layers[tap][0] for tap in self.taps], -1) @ self.w["fc"].T
        text, found = tokens[1:], list[int]()
        for _ in range(count):
            last = self.run(hidden, text)[-1]
            logits = torch.full((VOCAB,), float("-inf"))
            logits[self.KNOWN] = self.norm("norm", last) @ self.w["lm_head"].T
            found.append(best(logits))
            text, hidden = [*text, found[-1]], torch.cat([hidden, last[None]])
        return found


def check_drafts(native: NativeModel, head: Head | Eagle) -> None:
    """How many of its drafts are right, over answers of which each pass is followed."""
    most, new, right_ones = 3, 24, 0
    for seed in range(3):
        prompt = prompt_of(seed, 6 + 11 * seed)
        plain = request(native.model, prompt, 0, max_new_tokens=new)
        finish(native.model, plain)
        tokens, at = [*prompt, *plain.tokens], len(prompt) + 1
        drafted = accepted = 0
        while at < len(tokens):  # as many as the page and the answer have room for
            count = min(most, len(tokens) - at - 1, 63 - (at - 1) % 64)
            drafts = head.drafts(tokens[:at], count)
            right = next((i for i, token in enumerate(drafts) if token != tokens[at + i]), count)
            drafted, accepted, at = drafted + count, accepted + right, at + right + 1
        one = request(native.model, prompt, most, max_new_tokens=new)
        finish(native.model, one)
        assert one.tokens == plain.tokens
        assert one.drafts == (drafted, accepted)
        right_ones += accepted
    assert right_ones > 0


@pytest.mark.parametrize("case", CASES)
def test_it_drafts_what_the_definition_says(case: str, made: Callable[[str], Made]) -> None:
    _, native, head = made(case)
    check_drafts(native, head)


EAGLES: dict[str, dict[str, Any]] = {
    "usual": {},
    "taps": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "taps": (1, 2, 5)},
    "speculators": {
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "prefix": "layers.0.",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "taps": (1, 3, 4),
    },
}


@pytest.mark.parametrize("kind", EAGLES)
def test_eagle3(kind: str, tmp_path: Path) -> None:
    head = Eagle(tmp_path, **EAGLES[kind])
    native = load(tmp_path / "model", tmp_path / "head")
    check_drafts(native, head)
    for mode in MODES:
        for prompt in (prompt_of(1, 40), prompt_of(2, 300)):
            one, plain = (request(native.model, prompt, draft, **mode) for draft in (5, 0))
            finish(native.model, one)
            finish(native.model, plain)
            assert (one.tokens, one.take_scores()) == (plain.tokens, plain.take_scores())
            assert one.drafts[0] > 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode) or "greedy")
def test_an_answer_is_the_same_with_and_without(mode: dict[str, Any], made: Callable[[str], Made]) -> None:
    """Alone and in batches of texts of different lengths, that of one longer than the hidden states which are kept."""
    for case in ("deepseek_v3", "qwen3_next"):
        model = made(case)[1].model
        prompts = [prompt_of(seed, count) for seed, count in enumerate((5, 33, 600))]
        plain = [request(model, prompt, 0, **mode) for prompt in prompts]
        alone = [request(model, prompt, 4, **mode) for prompt in prompts]
        for one in (*plain, *alone):
            finish(model, one)
        assert [(one.tokens, one.take_scores()) for one in alone] == [(one.tokens, one.take_scores()) for one in plain]
        together = [request(model, prompt, 2, **mode) for prompt in prompts]
        finish(model, *together)
        for some in (alone, together):
            assert [one.tokens for one in some] == [one.tokens for one in plain]
            assert 0 < sum(one.drafts[1] for one in some) < sum(one.drafts[0] for one in some)


def test_eagle3_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_models.always_drafting(monkeypatch)
    Eagle(tmp_path)
    options: dict[str, Any] = {"dtype": "fp32", "threads": 1}
    plain = anyaccel.init_inference(tmp_path / "model", **options)
    drafting = anyaccel.init_inference(tmp_path / "model", draft=tmp_path / "head", **options)
    result, prompt = anyaccel.inference.Generation(), prompt_of(3, 12)
    found = list(generate_tokens(drafting, prompt, max_new_tokens=40, result=result))
    assert found == list(generate_tokens(plain, prompt, max_new_tokens=40)) and result.drafted > 0
    family_cases.build("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"hidden states behind layers \(2, 1, -1\) of a model with 2"):
        anyaccel.init_inference(tmp_path / "other", draft=tmp_path / "head", **options)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 9}))
    with pytest.raises(UsageError, match="it is not a head of this model"):
        anyaccel.init_inference(tmp_path / "model", draft=tmp_path / "head", **options)
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UsageError, match="no EAGLE-3 head of 2 layers; draft with another model"):
        anyaccel.init_inference(tmp_path / "model", draft=tmp_path / "head", **options)


def test_turns_prefixes_and_what_is_forgotten(made: Callable[[str], Made]) -> None:
    model = made("glm4_moe")[1].model
    prompt, more = prompt_of(1, 70), prompt_of(2, 9)

    def turns(draft: int) -> list[Any]:
        one = request(model, prompt, draft)
        finish(model, one)
        found = [one.tokens]
        one.extend(more, 20)
        finish(model, one)
        given = {"ignore_end": True, "max_new_tokens": 20, "bias": FEW}
        drafts = {"draft_tokens": draft, "draft_model": True, "draft_always": True} if draft else {}
        second = _llm.Request(model, [*prompt, *found[0], *more[:4]], given | drafts, one)
        finish(model, second)
        third = request(model, prompt, draft)
        for _ in range(9):
            model.step([third])
        third.shrink(64)
        finish(model, third)
        return [*found, one.tokens, second.tokens, third.tokens]

    assert turns(3) == turns(0)


def test_from_files(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    native_models.always_drafting(monkeypatch)
    folder = made("qwen3_5_text")[0]
    options: dict[str, Any] = {"dtype": "fp32", "threads": 1}
    plain, drafting = (anyaccel.init_inference(folder, **options, **more) for more in ({}, {"draft": "mtp"}))
    assert drafting.native is not None and drafting.native.draft is not None
    prompt = prompt_of(3, 12)
    result = anyaccel.inference.Generation()
    found = list(generate_tokens(drafting, prompt, max_new_tokens=40, result=result))
    assert found == list(generate_tokens(plain, prompt, max_new_tokens=40))
    assert result.drafted > 0
    again = anyaccel.init_inference(folder, draft="mtp", **options)  # from the cache of packed weights
    assert again.native is not None and again.native.draft is not None and again.native.draft.cached
    assert list(generate_tokens(again, prompt, max_new_tokens=40)) == found


def test_from_gguf(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As llama.cpp's converter names them: the layer comes behind the others, what it has beside them is `nextn`."""
    folder, native, head = made("glm4_moe")
    tensors, layers = load_file(folder / "model.safetensors"), len(head.model.model.layers)
    config, file = json.loads((folder / "config.json").read_text()), fuzz_models.Gguf("glm4moe")
    file.add(
        embedding_length=config["hidden_size"],
        block_count=layers + 1,
        nextn_predict_layers=1,
        context_length=1024,
        feed_forward_length=config["intermediate_size"],
        attention__head_count=config["num_attention_heads"],
        attention__head_count_kv=config["num_key_value_heads"],
        attention__key_length=config["head_dim"],
        attention__layer_norm_rms_epsilon=config["rms_norm_eps"],
        rope__freq_base=float(config["rope_parameters"]["rope_theta"]),
        rope__dimension_count=int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        expert_count=config["n_routed_experts"],
        expert_used_count=config["num_experts_per_tok"],
        expert_feed_forward_length=config["moe_intermediate_size"],
        expert_shared_count=config["n_shared_experts"],
        expert_weights_scale=config["routed_scaling_factor"],
        expert_weights_norm=config["norm_topk_prob"],
        expert_gating_func=2,
        expert_group_count=config["n_group"],
        expert_group_used_count=config["topk_group"],
        leading_dense_block_count=config["first_k_dense_replace"],
    )

    def add(name: str, value: torch.Tensor) -> None:
        file.tensors[name] = (0, list(reversed(value.shape)), value.float().contiguous().numpy().tobytes())

    known = ARCHITECTURES["glm4moe"]
    for module, stored in known.modules.items():
        if f"{module}.weight" in tensors:
            add(f"{stored}.weight", tensors[f"{module}.weight"])
    for layer in range(layers + 1):
        at = f"model.layers.{layer}."
        for module, stored in known.layer.items():
            if "=" in module and at + module[1:] in tensors:
                add(f"blk.{layer}.{stored}", tensors[at + module[1:]])
            for suffix in ("weight", "bias"):
                each = [at + module.replace("{expert}", str(expert)) for expert in range(config["n_routed_experts"])]
                found = [tensors[f"{name}.{suffix}"] for name in each if f"{name}.{suffix}" in tensors]
                if found:
                    value = torch.stack(found) if "{expert}" in module else found[0]
                    add(f"blk.{layer}.{stored}.{suffix}", value)
    of_head = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}
    for module, stored in of_head.items():
        add(f"blk.{layers}.nextn.{stored}.weight", tensors[f"model.layers.{layers}.{module}.weight"])
    add(f"blk.{layers}.nextn.embed_tokens.weight", tensors["model.embed_tokens.weight"])  # a copy, which is left out
    path = tmp_path / "model.gguf"
    path.write_bytes(file.content())
    other = load(path)
    for seed in range(3):
        one, same = (request(model, prompt_of(seed, 20), 3) for model in (native.model, other.model))
        finish(native.model, one)
        finish(other.model, same)
        assert same.tokens == one.tokens and same.drafts == one.drafts and one.drafts[1] > 0


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next", "eagle3"])
def test_ranks_draft_together(case: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    if case == "eagle3":
        Eagle(tmp_path)
        folder, draft = tmp_path / "model", tmp_path / "head"
        alone = load(folder, draft)
    else:
        folder, alone, _ = made(case)
        draft = folder

    def run(model: Any, draft: int) -> list[Any]:
        ones = [request(model, prompt_of(seed, 9), draft, do_sample=seed == 1, seed=seed) for seed in range(2)]
        finish(model, *ones)
        return [(one.tokens, one.drafts) for one in ones]

    def ranks(folder: Path, **more: int) -> list[Any]:
        options = ModelOptions(dtype="fp32", threads=1, tp=2)
        loaded = [load_native(folder, options, RankPlace(rank), **more) for rank in range(2)]
        names = [native.model.create_segment(20.0) for native in loaded]
        list(pool.map(lambda native: native.model.connect(names, [os.getpid()] * 2), loaded))
        for native in loaded:
            native.model.unlink()
        return loaded

    with ThreadPoolExecutor(2) as pool:
        natives, heads = ranks(folder), ranks(draft, draft_head=len(alone.whole_spec.layers))
        for native, head in zip(natives, heads, strict=True):
            borrow(native, head, draft)
            native.model.set_draft(head.model)
        models = [native.model for native in natives]
        plain = list(pool.map(lambda model: run(model, 0), models))
        found = list(pool.map(lambda model: run(model, 3), models))
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in plain[0]]
    assert [drafts for _, drafts in found[0]] == [drafts for _, drafts in run(alone.model, 3)]
    assert sum(drafts[1] for _, drafts in found[0]) > 0


def test_what_has_no_such_layer(tmp_path: Path, made: Callable[[str], Made], caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "threads": 1, "draft": "mtp"}
    save(tmp_path / "without", "deepseek_v3", head=False)
    with pytest.raises(ModelError, match=r"no weights for multi-token prediction \(model.layers.3.eh_proj.weight"):
        anyaccel.init_inference(tmp_path / "without", **options)
    family_cases.build("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(UsageError, match="no multi-token prediction of model_type 'llama'; draft with another model"):
        anyaccel.init_inference(tmp_path / "llama", **options)
    with pytest.raises(UsageError, match="not a model in memory"):
        anyaccel.init_inference(family_cases.build("llama"), **options)
    with pytest.raises(UsageError, match="is for one stage, not pp=2"):
        from anyaccel.inference.native.runtime import ALONE, LOGGED
        from anyaccel.inference.opening import _draft_head

        native = made("deepseek_v3")[1]
        _draft_head(native, made("deepseek_v3")[0], ModelOptions(pp=2, draft="mtp"), ALONE, LOGGED)
    caplog.clear()
    load_native(made("deepseek_v3")[0], ModelOptions(dtype="fp32", threads=1))
    assert "not part of the model" not in caplog.text


def test_a_head_belongs_to_its_model(made: Callable[[str], Made]) -> None:
    native, other = made("deepseek_v3")[1], made("glm4_moe")[1]
    assert native.draft is not None and other.draft is not None
    head: Any = native.draft.model
    with pytest.raises(UsageError, match="only a head that drafts takes other weights"):
        native.model.borrow(other.model)  # type: ignore[attr-defined]
    one = _llm.Request(head, [1, 2, 3], {"max_new_tokens": 2})
    with pytest.raises(UsageError, match="computes with its model only"):
        head.step([one])
    sequence = head.create()
    ids = torch.tensor([1, 2])
    with pytest.raises(UsageError, match="computes with its model only"):
        head.forward([sequence], [2], ids.data_ptr(), torch.zeros(2, VOCAB).data_ptr(), [1])
    with pytest.raises(UsageError, match="a head that drafts has its model's tokens"):
        native.model.set_draft(head, lambda tokens: tokens, lambda tokens, before, said: said)
