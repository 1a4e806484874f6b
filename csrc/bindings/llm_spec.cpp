// SPDX-License-Identifier: Apache-2.0
// Reads Python's description of a decoder, field by field.
#include "bindings/llm_spec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>

#include "llm/errors.h"

namespace anyaccel::bindings {
namespace {

namespace nb = nanobind;
using llm::UsageError;

template <class T>
T cast(const nb::handle& value, const char* name) {
  try {
    return nb::cast<T>(value);
  } catch (const nb::cast_error&) {
    throw UsageError(std::string("decoder spec or options: '") + name +
                     "' has a value of a wrong type: " + nb::cast<std::string>(nb::repr(value)));
  }
}

nb::object at(const nb::handle& from, const char* name) {
  PyObject* found = PyObject_GetAttrString(from.ptr(), name);
  if (found == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) nb::raise_python_error();
    PyErr_Clear();
    throw UsageError(std::string("decoder spec: '") + name + "' is missing");
  }
  return nb::steal(found);
}

template <class T>
void get(const nb::handle& from, const char* name, T& out) {
  out = cast<T>(at(from, name), name);
}
// Reads a float from a Python float or int.
template <>
void get(const nb::handle& from, const char* name, float& out) {
  out = static_cast<float>(cast<double>(at(from, name), name));
}

template <class T>
void numbers(const nb::handle& from, const char* name, std::vector<T>& out) {
  out.clear();
  for (const nb::handle value : at(from, name)) out.push_back(static_cast<T>(cast<double>(value, name)));
}

template <class T>
T one_of(const std::string& value, const char* what, std::initializer_list<std::pair<const char*, T>> names) {
  std::string known;
  for (const auto& [name, meaning] : names) {
    if (value == name) return meaning;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw UsageError(std::string(what) + " '" + value + "' is unknown; known are " + known);
}

template <class T>
void choice(const nb::handle& from, const char* name, T& out, std::initializer_list<std::pair<const char*, T>> names) {
  out = one_of(cast<std::string>(at(from, name), name), name, names);
}

template <class T, class Read>
void optional(const nb::handle& from, const char* name, std::optional<T>& out, Read read) {
  const nb::object value = at(from, name);
  if (value.is_none()) return;
  out = read(value);
}

llm::NormSpec read_norm(const nb::handle& from) {
  llm::NormSpec norm;
  choice<llm::NormKind>(from, "kind", norm.kind, {{"rms", llm::NormKind::rms}, {"layer", llm::NormKind::layer}});
  get(from, "eps", norm.eps);
  get(from, "weight", norm.weight);
  get(from, "bias", norm.bias);
  return norm;
}

llm::RopeSpec read_rope(const nb::handle& from) {
  llm::RopeSpec rope;
  numbers(from, "inv_freq", rope.inv_freq);
  get(from, "scale", rope.scale);
  get(from, "interleaved", rope.interleaved);
  get(from, "first", rope.first);
  numbers(from, "long_inv_freq", rope.long_inv_freq);
  get(from, "long_scale", rope.long_scale);
  get(from, "long_from", rope.long_from);
  get(from, "dynamic_base", rope.dynamic_base);
  get(from, "dynamic_factor", rope.dynamic_factor);
  get(from, "dynamic_from", rope.dynamic_from);
  return rope;
}

llm::QkNormSpec read_qk_norm(const nb::handle& from) {
  llm::QkNormSpec spec;
  spec.norm = read_norm(at(from, "norm"));
  get(from, "across", spec.across);
  get(from, "own_weights", spec.own_weights);
  get(from, "after_rope", spec.after_rope);
  return spec;
}

llm::MlaSpec read_mla(const nb::handle& from) {
  llm::MlaSpec spec;
  get(from, "q_rank", spec.q_rank);
  get(from, "kv_rank", spec.kv_rank);
  get(from, "nope_dim", spec.nope_dim);
  get(from, "rope_dim", spec.rope_dim);
  optional(from, "q_norm", spec.q_norm, read_norm);
  spec.kv_norm = read_norm(at(from, "kv_norm"));
  return spec;
}

llm::IndexerSpec read_indexer(const nb::handle& from) {
  llm::IndexerSpec spec;
  get(from, "top_k", spec.top_k);
  get(from, "heads", spec.heads);
  get(from, "head_dim", spec.head_dim);
  spec.norm = read_norm(at(from, "norm"));
  get(from, "rope", spec.rope);
  get(from, "own", spec.own);
  return spec;
}

llm::AttentionSpec read_attention(const nb::handle& from) {
  llm::AttentionSpec spec;
  get(from, "heads", spec.heads);
  get(from, "kv_heads", spec.kv_heads);
  get(from, "head_dim", spec.head_dim);
  get(from, "value_dim", spec.value_dim);
  get(from, "scale", spec.scale);
  get(from, "rope", spec.rope);
  get(from, "window", spec.window);
  get(from, "chunk", spec.chunk);
  get(from, "softcap", spec.softcap);
  numbers(from, "alibi", spec.alibi);
  get(from, "sinks", spec.sinks);
  get(from, "clip", spec.clip);
  get(from, "qkv_bias", spec.qkv_bias);
  get(from, "out_bias", spec.out_bias);
  optional(from, "qk_norm", spec.qk_norm, read_qk_norm);
  optional(from, "mla", spec.mla, read_mla);
  get(from, "kv_copies", spec.kv_copies);
  get(from, "growth", spec.growth);
  get(from, "growth_from", spec.growth_from);
  get(from, "growth_first", spec.growth_first);
  optional(from, "value_norm", spec.value_norm, read_norm);
  get(from, "kv_layer", spec.kv_layer);
  get(from, "gated", spec.gated);
  get(from, "bidirectional", spec.bidirectional);
  get(from, "fused_input", spec.fused_input);
  optional(from, "out_norm", spec.out_norm, read_norm);
  optional(from, "indexer", spec.indexer, read_indexer);
  return spec;
}

llm::RelativeBiasSpec read_relative_bias(const nb::handle& from) {
  llm::RelativeBiasSpec spec;
  get(from, "buckets", spec.buckets);
  get(from, "max_distance", spec.max_distance);
  get(from, "heads", spec.heads);
  return spec;
}

llm::DistancesSpec read_distances(const nb::handle& from) {
  llm::DistancesSpec spec;
  get(from, "span", spec.span);
  get(from, "max_distance", spec.max_distance);
  get(from, "logarithmic", spec.logarithmic);
  get(from, "keys", spec.keys);
  get(from, "queries", spec.queries);
  optional(from, "norm", spec.norm, read_norm);
  return spec;
}

llm::ShortConvSpec read_short_conv(const nb::handle& from) {
  llm::ShortConvSpec spec;
  get(from, "channels", spec.channels);
  get(from, "kernel", spec.kernel);
  get(from, "bias", spec.bias);
  return spec;
}

llm::LinearAttentionSpec read_linear_attention(const nb::handle& from) {
  using Strength = llm::LinearAttentionSpec::Strength;
  using Gate = llm::LinearAttentionSpec::Gate;
  llm::LinearAttentionSpec spec;
  get(from, "heads", spec.heads);
  get(from, "key_heads", spec.key_heads);
  get(from, "key_dim", spec.key_dim);
  get(from, "value_dim", spec.value_dim);
  get(from, "scale", spec.scale);
  get(from, "kernel", spec.kernel);
  get(from, "conv_bias", spec.conv_bias);
  get(from, "delta", spec.delta);
  choice<Strength>(from, "strength", spec.strength, {{"step", Strength::step}, {"sigmoid", Strength::sigmoid}});
  get(from, "strength_scale", spec.strength_scale);
  get(from, "step_min", spec.step_min);
  get(from, "step_max", spec.step_max);
  get(from, "l2_norm", spec.l2_norm);
  get(from, "skip", spec.skip);
  get(from, "gate", spec.gate);
  optional(from, "norm", spec.norm, read_norm);
  get(from, "norm_width", spec.norm_width);
  get(from, "norm_shared", spec.norm_shared);
  get(from, "norm_first", spec.norm_first);
  get(from, "in_bias", spec.in_bias);
  get(from, "out_bias", spec.out_bias);
  get(from, "key_copies", spec.key_copies);
  get(from, "tiled", spec.tiled);
  numbers(from, "slopes", spec.slopes);
  get(from, "silu", spec.silu);
  get(from, "decay_rank", spec.decay_rank);
  get(from, "gate_rank", spec.gate_rank);
  choice<Gate>(from, "gate_activation", spec.gate_activation, {{"silu", Gate::silu}, {"sigmoid", Gate::sigmoid}});
  return spec;
}

llm::SelectiveScanSpec read_scan(const nb::handle& from) {
  llm::SelectiveScanSpec spec;
  get(from, "channels", spec.channels);
  get(from, "state_dim", spec.state_dim);
  get(from, "kernel", spec.kernel);
  get(from, "step_rank", spec.step_rank);
  get(from, "conv_bias", spec.conv_bias);
  get(from, "in_bias", spec.in_bias);
  get(from, "out_bias", spec.out_bias);
  optional(from, "norm", spec.norm, read_norm);
  return spec;
}

constexpr std::initializer_list<std::pair<const char*, llm::Activation>> kActivations = {
    {"silu", llm::Activation::silu},
    {"gelu", llm::Activation::gelu},
    {"gelu_tanh", llm::Activation::gelu_tanh},
    {"gelu_quick", llm::Activation::gelu_quick},
    {"relu", llm::Activation::relu},
    {"relu2", llm::Activation::relu2},
    {"swiglu_oai", llm::Activation::swiglu_oai},
    {"xielu", llm::Activation::xielu}};

llm::GatedLruSpec read_lru(const nb::handle& from) {
  llm::GatedLruSpec spec;
  get(from, "heads", spec.heads);
  get(from, "head_dim", spec.head_dim);
  get(from, "kernel", spec.kernel);
  choice(from, "activation", spec.activation, kActivations);
  return spec;
}

llm::MlpSpec read_mlp(const nb::handle& from) {
  llm::MlpSpec spec;
  get(from, "features", spec.features);
  choice(from, "activation", spec.activation, kActivations);
  get(from, "gated", spec.gated);
  get(from, "bias", spec.bias);
  get(from, "out_bias", spec.out_bias);
  optional(from, "norm", spec.norm, read_norm);
  const nb::object cutoff = at(from, "cutoff");
  if (!cutoff.is_none()) get(from, "cutoff", spec.cutoff.emplace());
  return spec;
}

llm::MoeSpec read_moe(const nb::handle& from) {
  using Moe = llm::MoeSpec;
  Moe spec;
  get(from, "experts", spec.experts);
  get(from, "top_k", spec.top_k);
  spec.expert = read_mlp(at(from, "expert"));
  choice<Moe::Scoring>(from, "scoring", spec.scoring,
                       {{"softmax", Moe::Scoring::softmax},
                        {"sigmoid", Moe::Scoring::sigmoid},
                        {"sparsemixer", Moe::Scoring::sparsemixer},
                        {"none", Moe::Scoring::none}});
  get(from, "normalise", spec.normalise);
  get(from, "softmax_after", spec.softmax_after);
  get(from, "scale", spec.scale);
  get(from, "groups", spec.groups);
  get(from, "top_groups", spec.top_groups);
  choice<Moe::GroupScore>(from, "group_score", spec.group_score,
                          {{"max", Moe::GroupScore::max}, {"top2", Moe::GroupScore::top2}});
  get(from, "router_bias", spec.router_bias);
  get(from, "choice_bias", spec.choice_bias);
  optional(from, "shared", spec.shared, read_mlp);
  get(from, "shared_gate", spec.shared_gate);
  get(from, "shared_scale", spec.shared_scale);
  get(from, "scale_input", spec.scale_input);
  get(from, "jitter", spec.jitter);
  optional(from, "router_norm", spec.router_norm, read_norm);
  optional(from, "experts_norm", spec.experts_norm, read_norm);
  get(from, "logit_scale", spec.logit_scale);
  get(from, "expert_scale", spec.expert_scale);
  optional(from, "post_norm", spec.post_norm, read_norm);
  optional(from, "shared_post_norm", spec.shared_post_norm, read_norm);
  return spec;
}

llm::LayerInputsSpec read_layer_inputs(const nb::handle& from) {
  llm::LayerInputsSpec spec;
  get(from, "layers", spec.layers);
  get(from, "features", spec.features);
  get(from, "vocab", spec.vocab);
  get(from, "embed_scale", spec.embed_scale);
  get(from, "projection_scale", spec.projection_scale);
  get(from, "scale", spec.scale);
  spec.norm = read_norm(at(from, "norm"));
  return spec;
}

llm::HiddenInputsSpec read_hidden_inputs(const nb::handle& from) {
  llm::HiddenInputsSpec spec;
  get(from, "width", spec.width);
  numbers(from, "taps", spec.taps);
  get(from, "own_tap", spec.own_tap);
  optional(from, "embed_norm", spec.embed_norm, read_norm);
  optional(from, "hidden_norm", spec.hidden_norm, read_norm);
  get(from, "hidden_first", spec.hidden_first);
  get(from, "reduced", spec.reduced);
  get(from, "fused", spec.fused);
  get(from, "normed_residual", spec.normed_residual);
  get(from, "draft_vocab", spec.draft_vocab);
  return spec;
}

llm::LaurelSpec read_laurel(const nb::handle& from) {
  llm::LaurelSpec spec;
  get(from, "rank", spec.rank);
  spec.norm = read_norm(at(from, "norm"));
  get(from, "scale", spec.scale);
  return spec;
}

llm::StreamsSpec read_streams(const nb::handle& from) {
  llm::StreamsSpec spec;
  get(from, "count", spec.count);
  spec.norm = read_norm(at(from, "norm"));
  get(from, "scaled", spec.scaled);
  return spec;
}

llm::SideBlockSpec read_side_block(const nb::handle& from) {
  llm::SideBlockSpec spec;
  spec.norm = read_norm(at(from, "norm"));
  get(from, "layer", spec.layer);
  return spec;
}

llm::InputGateSpec read_input_gate(const nb::handle& from) {
  llm::InputGateSpec spec;
  spec.mlp = read_mlp(at(from, "mlp"));
  spec.norm = read_norm(at(from, "norm"));
  return spec;
}

}  // namespace

llm::LayerSpec read_layer(const nb::handle& from) {
  llm::LayerSpec spec;
  optional(from, "attention", spec.attention, read_attention);
  const nb::object mlp = at(from, "mlp");
  if (nb::hasattr(mlp, "experts"))
    spec.moe = read_moe(mlp);
  else if (!mlp.is_none())
    spec.mlp = read_mlp(mlp);
  optional(from, "attn_norm", spec.attn_norm, read_norm);
  optional(from, "attn_post_norm", spec.attn_post_norm, read_norm);
  optional(from, "mlp_norm", spec.mlp_norm, read_norm);
  optional(from, "mlp_post_norm", spec.mlp_post_norm, read_norm);
  get(from, "parallel", spec.parallel);
  get(from, "residual_scale", spec.residual_scale);
  get(from, "residual_from_norm", spec.residual_from_norm);
  optional(from, "input_gate", spec.input_gate, read_input_gate);
  optional(from, "laurel", spec.laurel, read_laurel);
  optional(from, "streams", spec.streams, read_streams);
  optional(from, "side_block", spec.side_block, read_side_block);
  get(from, "scaled", spec.scaled);
  numbers(from, "weight_factors", spec.weight_factors);
  const nb::object recurrent = at(from, "recurrent");
  if (nb::hasattr(recurrent, "step_rank"))
    spec.scan = read_scan(recurrent);
  else if (nb::hasattr(recurrent, "activation"))
    spec.lru = read_lru(recurrent);
  else if (nb::hasattr(recurrent, "channels"))
    spec.short_conv = read_short_conv(recurrent);
  else if (!recurrent.is_none())
    spec.linear_attention = read_linear_attention(recurrent);
  return spec;
}

llm::DecoderSpec read_spec(const nb::handle& from) {
  llm::DecoderSpec spec;
  get(from, "vocab", spec.vocab);
  get(from, "hidden", spec.hidden);
  for (const nb::handle layer : at(from, "layers")) spec.layers.push_back(read_layer(layer));
  optional(from, "final_norm", spec.final_norm, read_norm);
  for (const nb::handle rope : at(from, "ropes")) spec.ropes.push_back(read_rope(rope));
  get(from, "embedding_scale", spec.embedding_scale);
  optional(from, "embedding_norm", spec.embedding_norm, read_norm);
  get(from, "positions", spec.positions);
  get(from, "position_offset", spec.position_offset);
  get(from, "tied", spec.tied);
  get(from, "head_bias", spec.head_bias);
  get(from, "logits_scale", spec.logits_scale);
  get(from, "logits_softcap", spec.logits_softcap);
  get(from, "max_tokens", spec.max_tokens);
  get(from, "rank", spec.rank);
  get(from, "size", spec.size);
  get(from, "vocab_first", spec.vocab_first);
  get(from, "vocab_count", spec.vocab_count);
  get(from, "stage", spec.stage);
  get(from, "stages", spec.stages);
  get(from, "first_layer", spec.first_layer);
  optional(from, "layer_inputs", spec.layer_inputs, read_layer_inputs);
  get(from, "token_types", spec.token_types);
  optional(from, "relative_bias", spec.relative_bias, read_relative_bias);
  optional(from, "distances", spec.distances, read_distances);
  optional(from, "hidden_inputs", spec.hidden_inputs, read_hidden_inputs);
  get(from, "streams", spec.streams);
  return spec;
}

llm::RequestOptions read_options(const nb::dict& from) {
  llm::RequestOptions options;
  llm::SamplingOptions& sampling = options.sampling;
  for (const auto& [key, value] : from) {
    const std::string field = cast<std::string>(key, "a name");
    const auto is = [&, &v = value]<class T>(const char* name, T& out) {
      if (field != name) return false;
      if constexpr (std::is_same_v<T, float>)
        out = static_cast<float>(cast<double>(v, name));
      else
        out = cast<T>(v, name);
      return true;
    };
    if (is("do_sample", sampling.do_sample) || is("temperature", sampling.temperature) || is("top_k", sampling.top_k) ||
        is("top_p", sampling.top_p) || is("min_p", sampling.min_p) || is("typical_p", sampling.typical_p) ||
        is("repetition_penalty", sampling.repetition_penalty) || is("presence_penalty", sampling.presence_penalty) ||
        is("frequency_penalty", sampling.frequency_penalty) || is("no_repeat_ngram", sampling.no_repeat_ngram) ||
        is("dry_multiplier", sampling.dry_multiplier) || is("dry_base", sampling.dry_base) ||
        is("dry_allowed_length", sampling.dry_allowed_length) || is("dry_last_n", sampling.dry_last_n) ||
        is("dry_breakers", sampling.dry_breakers) || is("xtc_probability", sampling.xtc_probability) ||
        is("xtc_threshold", sampling.xtc_threshold) || is("seed", options.seed) ||
        is("max_new_tokens", options.max_new_tokens) || is("min_new_tokens", options.min_new_tokens) ||
        is("end_tokens", options.end_tokens) || is("ignore_end", options.ignore_end) ||
        is("logprobs", options.logprobs) || is("prompt_logprobs", options.prompt_logprobs) ||
        is("draft_tokens", options.draft_tokens) || is("draft_model", options.draft_model) ||
        is("draft_always", options.draft_always) || is("draft_end", options.draft_end) ||
        is("keep_states", options.keep_states))
      continue;
    if (field == "goal") {
      using Goal = llm::RequestOptions::Goal;
      options.goal = one_of<Goal>(
          cast<std::string>(value, "goal"), "goal",
          {{"answer", Goal::answer}, {"scores", Goal::scores}, {"mean", Goal::mean}, {"last", Goal::last}});
      continue;
    }
    if (field == "bias") {
      for (const auto& [token, bias] : cast<nb::dict>(value, "bias"))
        sampling.bias.emplace_back(cast<int64_t>(token, "bias"), static_cast<float>(cast<double>(bias, "bias")));
      continue;
    }
    throw UsageError("there is no option '" + field + "' of a request");
  }
  return options;
}

llm::Format read_format(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < std::size(llm::kFormats); ++i) {
    if (name == llm::kFormats[i].name) return static_cast<llm::Format>(i);
    known += (i == 0 ? "" : ", ") + std::string(llm::kFormats[i].name);
  }
  throw UsageError("format '" + name + "' is unknown; known are " + known);
}

llm::ScaleKind read_scale_kind(const std::string& name) {
  using llm::ScaleKind;
  return one_of<ScaleKind>(
      name, "scales",
      {{"halves", ScaleKind::halves}, {"superblocks", ScaleKind::superblocks}, {"powers", ScaleKind::powers}});
}

llm::SourceType read_source_type(const std::string& name) {
  using llm::SourceType;
  return one_of<SourceType>(name, "type",
                            {{"f32", SourceType::f32},
                             {"f16", SourceType::f16},
                             {"bf16", SourceType::bf16},
                             {"f64", SourceType::f64},
                             {"q8_0", SourceType::q8_0},
                             {"q4_0", SourceType::q4_0},
                             {"q4_1", SourceType::q4_1},
                             {"q5_0", SourceType::q5_0},
                             {"q5_1", SourceType::q5_1},
                             {"iq4_nl", SourceType::iq4_nl},
                             {"mxfp4", SourceType::mxfp4},
                             {"q2_k", SourceType::q2_k},
                             {"q3_k", SourceType::q3_k},
                             {"q4_k", SourceType::q4_k},
                             {"q5_k", SourceType::q5_k},
                             {"q6_k", SourceType::q6_k},
                             {"iq4_xs", SourceType::iq4_xs}});
}

}  // namespace anyaccel::bindings
