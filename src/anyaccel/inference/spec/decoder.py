# SPDX-License-Identifier: Apache-2.0
"""What a decoder computes, as data: the native runtime is configured by it and families map their configs to it.

Torch-free. `_llm.DecoderModel` takes a DecoderSpec; `weights` below lists what weights it wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from anyaccel.inference.spec.packed_formats import ScaleKind

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai", "xielu"]

PAGE = 64  # tokens of a block of the key/value cache; kPageTokens in csrc/llm/attention/attention.h

_EXPERT = "experts.0."  # how `_llm` names what every expert of a layer has
_Wanted = list[tuple[str, int, int]]  # name, rows, columns


@dataclass(frozen=True)
class Norm:
    """A norm; weight and bias are absent when the model has none of that name ("1 + weight" is folded on loading)."""

    kind: NormKind
    eps: float
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary positions. Angles are position * inv_freq; cosine and sine are multiplied by `scale`.

    Attributes:
        inv_freq: half the rotated values of a head; fewer than head_dim / 2 rotate a part of it ("partial").
        interleaved: pairs are (2i, 2i + 1), not (i, i + half).
        first: the rotated values begin at this one of the head (MLA rotates the last ones).
        long_inv_freq, long_scale, long_from: longrope's factors for contexts above `long_from` tokens.
        dynamic_base, dynamic_factor, dynamic_from: dynamic NTK: above `dynamic_from` tokens the base grows with length.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    first: int = 0
    long_inv_freq: tuple[float, ...] = ()
    long_scale: float = 1.0
    long_from: int = 0
    dynamic_base: float = 0.0
    dynamic_factor: float = 1.0
    dynamic_from: int = 0


@dataclass(frozen=True)
class QkNorm:
    """A norm of queries and keys.

    Attributes:
        across: one norm over all heads together (OLMo 2), else each head alone.
        own_weights: each head has its own.
    """

    norm: Norm
    across: bool = False
    own_weights: bool = False
    after_rope: bool = False


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2). q_rank 0: queries have no latent."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    q_norm: Norm | None
    kv_norm: Norm


@dataclass(frozen=True)
class Indexer:
    """Which tokens latent attention sees (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025).

    A token scores those up to itself and sees the `top_k` with the highest scores, of equal ones the earlier; a context
    of no more tokens is seen whole. A score is the sum over `heads` of weight * relu(q k). Of each token the cache has
    one key k more, a norm of a linear of the layer's input; q is linear in the latent of queries, and the weights are
    linear in the input.

    Attributes:
        rope: index into DecoderSpec.ropes, of q and k; -1: none.
        own: the layer has an indexer. Otherwise it sees what the last layer before it that has one has chosen, and
            `top_k` is all that is read here (GLM-5).
    """

    top_k: int
    heads: int
    head_dim: int
    norm: Norm
    rope: int = -1
    own: bool = True


@dataclass(frozen=True)
class Attention:
    """One layer's attention; head counts are of the whole model, the runtime gets a rank's own (see `shard`).

    Attributes:
        scale: of the scores.
        rope: index into DecoderSpec.ropes; -1: none.
        window: a token sees itself and window - 1 before it; 0: all.
        alibi: slopes of the query heads; empty: none.
        sinks: a learned logit a head takes part in the softmax.
        clip: queries, keys and values are clamped to -clip .. clip; 0: not.
        kv_copies: ranks that have the same KV heads as this one (tensor parallelism with more ranks than KV heads).
        growth, growth_from, growth_first: queries are multiplied by
            1 + growth * log(1 + floor((position + growth_first) / growth_from)), growth 0: not (Llama 4's temperature).
        value_norm: of each head's values.
        kv_layer: the number of the earlier layer, with as large heads, whose keys and values it sees; -1: its own.
        gated: the result is multiplied by the sigmoid of a linear of the input (Qwen3-Next).
        bidirectional: a token sees those behind it too, with a window as many as before it; of all layers (encoders).
        fused_input: it reads two inputs side by side: those of a head that drafts, see HiddenInputs.fused, or a
            SideBlock's.
        out_norm: of the result of all heads together, before the last linear (BitNet).
        indexer: what chooses the tokens that are seen; of layers with `mla` all have one, or none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rope: int = -1
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi: tuple[float, ...] = ()
    sinks: bool = False
    clip: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm | None = None
    mla: Mla | None = None
    kv_copies: int = 1
    growth: float = 0.0
    growth_from: int = 0
    growth_first: int = 0
    value_norm: Norm | None = None
    kv_layer: int = -1
    gated: bool = False
    bidirectional: bool = False
    fused_input: bool = False
    out_norm: Norm | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2): out(c * conv(b * x)), where b, c and x are linear in the input.

    Attributes:
        kernel: tokens that the convolution sees, the present one among them; each channel is alone.
        bias: of the linears and of the convolution.
    """

    channels: int
    kernel: int
    bias: bool = False


@dataclass(frozen=True)
class LinearAttention:
    """Attention that has a matrix S [key_dim, value_dim] for each head in the place of keys and values.

    S = decay * S + k (x) w, then out = scale * q S + skip * v. What is written is w = strength * v, or, with `delta`,
    strength * (v - k decay S). A head's step is softplus(a + bias), its decay exp(-rate * step). This is Mamba-2's
    state space (B, C and x are its k, q and v), and the gated delta rule.

    Attributes:
        heads: of values and states; consecutive ones share a head of queries and keys.
        tiled: instead, head h has that of number h % key_heads.
        kernel: tokens that a causal convolution sees which q, k and v go through, each channel alone, SiLU behind it;
            0: there is none.
        delta: the delta rule.
        strength: "step": the step; "sigmoid": of an input of its own, times `strength_scale`.
        step_min, step_max: the step is clamped to them; step_max 0: no upper limit.
        l2_norm: queries and keys have length 1.
        skip: each head has a factor of its values.
        gate: the result is multiplied by the SiLU of a linear of the input, or by its sigmoid (`gate_activation`).
        norm, norm_width: of so many consecutive values of the result, of all heads on all ranks.
        norm_shared: all these have the same weights.
        norm_first: the gate comes behind the norm.
        key_copies: ranks that have the same heads of queries and keys as this one.
        slopes: of each head, whose decay is always exp(-slope), and its strength 1: there are no steps (lightning
            attention, MiniMax).
        silu: without a convolution, of q, k and v.
        decay_rank: each channel of a head's keys has a step and a decay of its own, of a linear through so many latents
            (Kimi delta attention).
        gate_rank: there, the gate's linear goes through so many latents; 0: through none.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scale: float = 1.0
    kernel: int = 0
    conv_bias: bool = False
    delta: bool = False
    strength: Literal["step", "sigmoid"] = "step"
    strength_scale: float = 1.0
    step_min: float = 0.0
    step_max: float = 0.0
    l2_norm: bool = False
    skip: bool = False
    gate: bool = True
    norm: Norm | None = None
    norm_width: int = 0
    norm_shared: bool = False
    norm_first: bool = False
    in_bias: bool = False
    out_bias: bool = False
    key_copies: int = 1
    tiled: bool = False
    slopes: tuple[float, ...] = ()
    silu: bool = False
    decay_rank: int = 0
    gate_rank: int = 0
    gate_activation: Literal["silu", "sigmoid"] = "silu"


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba's mixer (the first one): each channel has a state S of its own, of `state_dim` values.

    x and z are linear in the input, and x goes through a causal convolution with SiLU behind it. r, B and C are linear
    in x, the channels' step = softplus(up r + bias). S[n] = exp(-exp(rate[n]) step) S[n] + step x B[n], then
    out((sum C[n] S[n] + skip x) silu(z)).

    Attributes:
        kernel: tokens that the convolution sees.
        step_rank: values of r.
        norm: of r, of B and of C, each with weights of its own.
    """

    channels: int
    state_dim: int
    kernel: int
    step_rank: int
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    norm: Norm | None = None


@dataclass(frozen=True)
class GatedLru:
    """A real-gated linear recurrent unit behind a convolution (Griffin, De et al., 2024; RecurrentGemma).

    x and y are linear in the input, and x goes through a causal convolution. Each channel has a state S, and two gates
    between 0 and 1, which are linear in the x of its head: i of the input, r of the decay
    a = exp(-8 r softplus(rate)). S = a S + sqrt(1 - a^2) i x, without the root for a sequence's first token; then
    out(S act(y)).

    Attributes:
        head_dim: channels of a head.
        kernel: tokens that the convolution sees.
        activation: of y.
    """

    heads: int
    head_dim: int
    kernel: int
    activation: Activation


# What has a state of fixed size for each sequence, in the place of keys and values.
Recurrent = ShortConv | LinearAttention | SelectiveScan | GatedLru


@dataclass(frozen=True)
class Mlp:
    """gated: down(act(gate x) * up x), else down(act(up x)).

    Attributes:
        activation: "xielu" (Apertus) has four learned values of each layer, and no gates.
        norm: of the features, before `down` (BitNet).
        cutoff: the gates are max(0, gate x - c) first, where c is so many standard deviations above their mean (Gemma
            3n's activation sparsity); None: they are not cut.
    """

    features: int
    activation: Activation
    gated: bool
    bias: bool = False
    out_bias: bool = False
    norm: Norm | None = None
    cutoff: float | None = None

    @property
    def simple(self) -> bool:
        """Whether each feature is made of a row, or a pair of rows, and nothing else."""
        return self.norm is None and self.cutoff is None and self.activation != "xielu"


@dataclass(frozen=True)
class Moe:
    """Mixture of experts; every expert is an Mlp of `expert`.

    Attributes:
        scoring: of the router's logits before the choice. "sparsemixer" (Phi-3.5-MoE): experts are chosen one by one,
            each scored by a softmax over those which are left and not more than 2 * jitter below the best of these,
            relative to it.
        normalise: chosen scores are divided by their sum (with "softmax" scoring: Mixtral, Qwen3-MoE's norm_topk_prob).
        softmax_after: softmax over the chosen logits only (GPT-OSS).
        scale: the chosen scores are multiplied by it (DeepSeek routed_scaling_factor).
        groups, top_groups: experts are chosen from the best groups only; group_score "max" (V2) or "top2" (V3).
        router_bias: a bias on the router's logits. choice_bias: added for the choice only (V3 e_score_correction_bias).
        shared: an Mlp that every token goes through; shared_gate: times the sigmoid of a linear (Qwen2-MoE);
            shared_scale: times this.
        scale_input: an expert's input is multiplied by its score, not its result (Llama 4).
        router_norm, experts_norm: the router, and the experts, read norms of the residual of their own (Gemma 4); the
            shared MLP reads the layer's. logit_scale: of the router's logits.
        expert_scale: each expert's score is multiplied by a learned number.
        post_norm, shared_post_norm: of what experts and shared MLP give, before the two are added; both or none.
    """

    experts: int
    top_k: int
    expert: Mlp
    scoring: Literal["softmax", "sigmoid", "sparsemixer", "none"] = "softmax"
    normalise: bool = True
    softmax_after: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    router_bias: bool = False
    choice_bias: bool = False
    shared: Mlp | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    scale_input: bool = False
    jitter: float = 0.0
    router_norm: Norm | None = None
    experts_norm: Norm | None = None
    logit_scale: float = 1.0
    expert_scale: bool = False
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None


@dataclass(frozen=True)
class LayerInputs:
    """What every layer gets of a token beside the residual (Gemma 3n): `features` values a layer.

    They are scale * (norm(projection_scale * projection) + embed_scale * row), with a projection of the embedded token
    and the token's row of a second embedding of `vocab` rows, the first one for tokens that it has not.

    Attributes:
        layers: of the whole model.
    """

    layers: int
    features: int
    vocab: int
    embed_scale: float
    projection_scale: float
    scale: float
    norm: Norm


@dataclass(frozen=True)
class RelativeBias:
    """What is added to the scores by how far key and query are apart, the same in all layers (T5's; MPNet).

    Attributes:
        buckets: of distances, half of them of keys behind the query; each has a value for each head.
        max_distance: from here on all are in one bucket.
    """

    buckets: int
    max_distance: int
    heads: int


@dataclass(frozen=True)
class Distances:
    """What is added to the scores of an encoder by the distance of query and key (DeBERTa's disentangled attention).

    An embedding has a row for each distance, of which each layer makes keys and queries with its own weights. A score
    is that of query and key, of the query and the distance's key, and of the distance's query and the key, together.

    Attributes:
        span: the embedding has 2 * span rows; distance d has row d + span.
        max_distance: from here on all have one row.
        logarithmic: distances beyond span / 2 share rows, the more the farther they are.
        keys, queries: whether there are those of distances.
        norm: of the embedding.
    """

    span: int
    max_distance: int
    logarithmic: bool
    keys: bool
    queries: bool
    norm: Norm | None = None


@dataclass(frozen=True)
class HiddenInputs:
    """What a head that drafts for another model reads of a token: fuse(norm(embedding), norm(hidden states)).

    Such a head (multi-token prediction: DeepSeek-V3, 2024) reads each token with the model's hidden states of the token
    before it, and predicts the next one; behind its own drafts it reads its own hidden states. Embedding and head are
    the model's.

    Attributes:
        width: of the hidden states, of all taps.
        taps: where they are taken: a number of layers, or -1 for what the last norm gives.
        own_tap: the same of the head itself.
        hidden_first: they come before the embedding.
        reduced: a matrix makes a model's width of them first (EAGLE-3); the head's own have it already.
        fused: a matrix makes the residual of both; otherwise attention of the first layer reads both, and the residual
            is the hidden states (EAGLE-3).
        normed_residual: and that behind their norm.
        draft_vocab: rows of the head's own matrix of logits; 0: it takes the model's.
    """

    width: int
    taps: tuple[int, ...]
    own_tap: int = -1
    embed_norm: Norm | None = None
    hidden_norm: Norm | None = None
    hidden_first: bool = False
    reduced: bool = False
    fused: bool = True
    normed_residual: bool = False
    draft_vocab: int = 0


@dataclass(frozen=True)
class InputGate:
    """What a layer does with its part of LayerInputs: h += norm(mlp(h)), where the part takes the place of `up x`."""

    mlp: Mlp
    norm: Norm


@dataclass(frozen=True)
class Laurel:
    """A low-rank way beside attention (learned augmented residual layers, Menghani et al., 2024; Gemma 3n).

    h = scale * (h + post(attention(x)) + x + norm(up(down(x)))), with x = attn_norm(h) and `rank` values between.
    """

    rank: int
    norm: Norm
    scale: float = 1.0


@dataclass(frozen=True)
class Streams:
    """Several residuals of a token, of which a layer computes the first (AltUp, Baykal et al., 2023; Gemma 3n).

    The first stream is the embedding, each other one a linear of it, with the same root mean square (`streams_in`).
    Before a layer each stream i gets the sum of P[i, k] m times stream k, over k, with
    m = tanh(router(norm(first stream)) / hidden). The layer makes h of the first one, and behind it each stream gets
    (1 + C[i] m') (h - first stream), with m' of h. input_gate reads the first one then, and adds to the others. At
    last, the residual is the mean of the first stream and linears of the others, with its root mean square
    (`streams_out`).

    Attributes:
        norm: of what the router reads.
        scaled: input_gate reads the first stream times a learned vector.
    """

    count: int
    norm: Norm
    scaled: bool = False


@dataclass(frozen=True)
class SideBlock:
    """That attention and MLP of a layer are for its recurrent mixer only, and no part of the residual (Zamba2).

    The mixer reads norm(h + side(mlp(mlp_norm(attention(attn_norm([h, e])))))), where e is the token's embedding.

    Attributes:
        layer: the first one with such attention and MLP, whose weights this layer's are, but for adapters.
    """

    norm: Norm
    layer: int


@dataclass(frozen=True)
class Layer:
    """h += r * post(mixer(norm(h))); h += r * post(mlp(norm(h))), r = residual_scale; absent norms are None.

    The mixer is attention or a recurrent one; with both (Falcon-H1) it is their sum. A layer may have no mixer, or no
    MLP; then that half is left out (Mamba, Nemotron-H).

    parallel: h += r * (attention(attn_norm(h)) + mlp(mlp_norm(h))); with mlp_norm None both read attn_norm's result.
    residual_from_norm: the residual is the norm's result (BLOOM's apply_residual_connection_post_layernorm).
    weight_factors: the weights are multiplied by these when they are packed, in the order that the family's names know.
    input_gate: behind the MLP. scaled: at last, h is multiplied by a learned number.
    """

    attention: Attention | None
    mlp: Mlp | Moe | None
    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    residual_from_norm: bool = False
    input_gate: InputGate | None = None
    scaled: bool = False
    recurrent: Recurrent | None = None
    weight_factors: tuple[float, ...] = ()
    laurel: Laurel | None = None
    streams: Streams | None = None
    side_block: SideBlock | None = None

    @property
    def softmax(self) -> Attention:
        """The attention of a layer that has no other mixer."""
        assert self.attention is not None and self.recurrent is None
        return self.attention

    @property
    def features(self) -> Mlp | Moe:
        """The MLP of a layer that has one."""
        assert self.mlp is not None
        return self.mlp


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder.

    Attributes:
        positions: rows of a learned position embedding; 0: none.
        position_offset: position p reads row p + offset (OPT: 2).
        embedding_scale: the embedding is multiplied by it, in float (Gemma's factor is rounded to bf16 by its own code:
            the family gives the rounded value).
        tied: the head is the embedding.
        head_bias: the head has one.
        logits_scale: logits are multiplied by it, before the soft cap.
        max_tokens: the longest context; 0: no limit of its own (ALiBi).
        rank, size: of tensor parallelism. `shard` divides a whole spec.
        vocab_first, vocab_count: the rows of embedding and head that this rank has.
        stage, stages: of pipeline parallelism; `stage_spec` divides a spec.
        first_layer: the number of the first of `layers`, which the names of weights have.
        token_types: rows of a learned embedding of the text that a token is of (BERT: the first or second); 0: none.
        relative_bias, distances: of encoders.
        hidden_inputs: of a head that drafts for another model.
        streams: residuals of a token, as many as each layer's Streams has; 1: there are none.
    """

    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    ropes: tuple[Rope, ...] = ()
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    positions: int = 0
    position_offset: int = 0
    tied: bool = False
    head_bias: bool = False
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    max_tokens: int = 0
    rank: int = 0
    size: int = 1
    vocab_first: int = 0
    vocab_count: int = 0
    stage: int = 0
    stages: int = 1
    first_layer: int = 0
    layer_inputs: LayerInputs | None = None
    token_types: int = 0
    relative_bias: RelativeBias | None = None
    distances: Distances | None = None
    hidden_inputs: HiddenInputs | None = None
    streams: int = 1

    @property
    def is_encoder(self) -> bool:
        """Whether it makes hidden states of whole sequences, and predicts no next token."""
        attention = self.layers[0].attention
        return attention is not None and attention.bidirectional

    @property
    def is_recurrent(self) -> bool:
        """Whether a sequence has a state beside its keys and values, or in their place."""
        return any(layer.recurrent is not None for layer in self.layers)


@dataclass(frozen=True)
class MatrixShape:
    """A packed matrix [rows, cols] of this rank, as `Shape` of csrc/llm/pack/matrix.h.

    Attributes:
        format, group, minimum: see `packed_formats`.
        scales: see `packed_formats.ScaleKind`.
    """

    name: str
    rows: int
    cols: int
    format: str = "bf16"
    group: int = 0
    minimum: bool = False
    scales: ScaleKind = "halves"

    def entry(self) -> tuple[str, int, int, str, int, bool, str]:
        """The shape as `_llm.DecoderModel` takes it."""
        return (self.name, self.rows, self.cols, self.format, self.group, self.minimum, self.scales)


@dataclass(frozen=True)
class VectorShape:
    """A float vector of this rank."""

    name: str
    count: int


def weights(spec: DecoderSpec) -> tuple[list[MatrixShape], list[VectorShape]]:
    """Every weight that the runtime wants for `spec`, as `each_weight` gives them."""
    found = list(each_weight(spec))
    matrices = [shape for shape in found if isinstance(shape, MatrixShape)]
    return matrices, [shape for shape in found if isinstance(shape, VectorShape)]


def each_weight(spec: DecoderSpec) -> Iterator[MatrixShape | VectorShape]:
    """The weights with this rank's sizes, one after another; formats are the caller's to choose.

    A spec may come from a damaged config: who looks each weight up in the file as it comes stops at the first layer or
    expert that the file lacks, however many the config says there are.

    What they are is csrc/llm/decoder/weights.cpp's to say, and what their rows are.
    """
    from anyaccel import _llm

    for name, rows, cols in _llm.outer_weights(replace(spec, layers=(), ropes=())):
        yield _shape(name, rows, cols)
    known: dict[int, tuple[_Wanted, _Wanted]] = {}  # by id(): layers that are alike are mostly one object
    for index, layer in enumerate(spec.layers, spec.first_layer):
        if id(layer) not in known:
            wanted = _llm.layer_weights(layer, spec.hidden)
            of_experts = [each for each in wanted if each[0].startswith(_EXPERT)]
            known[id(layer)] = [each for each in wanted if each not in of_experts], of_experts
        of_layer, of_experts = known[id(layer)]
        for name, rows, cols in of_layer:
            yield _shape(f"layers.{index}.{name}", rows, cols)
        for expert in range(layer.mlp.experts if isinstance(layer.mlp, Moe) else 0):
            for name, rows, cols in of_experts:
                yield _shape(f"layers.{index}.experts.{expert}.{name.removeprefix(_EXPERT)}", rows, cols)


def _shape(name: str, rows: int, cols: int) -> MatrixShape | VectorShape:
    return MatrixShape(name, rows, cols) if cols else VectorShape(name, rows)
