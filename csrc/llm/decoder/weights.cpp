// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>

#include "llm/errors.h"
#include "simd/convert.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr size_t kAlign = 64;
size_t padded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

float load_value(const uint8_t* at, SourceType type) {
  switch (type) {
    case SourceType::f32: {
      float value;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    case SourceType::f64: {
      double value;
      std::memcpy(&value, at, sizeof value);
      return static_cast<float>(value);
    }
    case SourceType::f16:
    case SourceType::bf16: {
      uint16_t bits;
      std::memcpy(&bits, at, sizeof bits);
      return type == SourceType::f16 ? from_f16(bits) : from_bf16(bits);
    }
    default:
      throw UsageError("a vector comes from f32, f16, bf16 or f64");
  }
}

// The one list of a decoder's weights, in the order in which a step reads them; what is made of each is the heirs'.
class WeightWalk {
 public:
  explicit WeightWalk(int64_t hidden) : hidden_(hidden) {}
  virtual ~WeightWalk() = default;

  // What comes before the layers.
  void before(const DecoderSpec& spec, LinearWeights& embed, LinearWeights& positions, LinearWeights& token_types,
              const float*& relative_bias, LinearWeights& distances, Norm& distances_norm, Norm& embed_norm,
              LinearWeights& layer_embed, LinearWeights& layer_projection, Norm& layer_projection_norm) {
    if (spec.hidden_inputs) return;  // the embedding is another model's
    if (spec.is_first_stage() || (spec.tied && spec.is_last_stage())) matrix("embed", spec.own_vocab(), hidden_, embed);
    if (!spec.is_first_stage()) return;
    if (spec.positions > 0) matrix("positions", spec.positions, hidden_, positions);
    if (spec.token_types > 0) matrix("token_types", spec.token_types, hidden_, token_types);
    if (spec.relative_bias)
      relative_bias = vector("relative_bias", product(spec.relative_bias->buckets, spec.relative_bias->heads));
    if (spec.distances) {
      matrix("distances", product(2, spec.distances->span), hidden_, distances);
      norm("distances_norm", spec.distances->norm, hidden_, distances_norm);
    }
    norm("embed_norm", spec.embedding_norm, hidden_, embed_norm);
    if (!spec.layer_inputs) return;
    const LayerInputsSpec& inputs = *spec.layer_inputs;
    const int64_t width = product(inputs.layers, inputs.features);
    matrix("layer_embed", inputs.vocab, width, layer_embed);
    matrix("layer_projection", width, hidden_, layer_projection);
    norm("layer_projection_norm", inputs.norm, inputs.features, layer_projection_norm);
  }

  // Of all streams but the first.
  void streams(const DecoderSpec& spec, const char* name, std::vector<LinearWeights>& out) {
    if (spec.streams < 2) return;
    out.resize(static_cast<size_t>(spec.streams - 1));
    std::vector<LinearWeights*> parts;
    for (LinearWeights& each : out) parts.push_back(&each);
    linear(name, product(spec.streams - 1, hidden_), hidden_, false, parts);
  }

  // Columns of `fuse` are those of the embedding, then of the hidden states.
  void fuse(const HiddenInputsSpec& inputs, LinearWeights& reduce, LinearWeights& out, Norm& embed_norm,
            Norm& hidden_norm) {
    norm("fuse_embed_norm", inputs.embed_norm, hidden_, embed_norm);
    norm("fuse_hidden_norm", inputs.hidden_norm, inputs.beside(hidden_), hidden_norm);
    if (inputs.reduced) matrix("reduce", hidden_, inputs.width, reduce);
    if (inputs.fused) matrix("fuse", hidden_, hidden_ + inputs.beside(hidden_), out);
  }

  // What comes after them; a tied head is the embedding.
  void after(const DecoderSpec& spec, LinearWeights& head, Norm& final_norm) {
    if (!spec.is_last_stage()) return;
    norm("final_norm", spec.final_norm, hidden_, final_norm);
    if (spec.hidden_inputs) {
      if (spec.hidden_inputs->draft_vocab > 0) matrix("head", spec.hidden_inputs->draft_vocab, hidden_, head);
    } else if (!spec.tied) {
      matrix("head", spec.own_vocab(), hidden_, head);
    }
    if (spec.head_bias) head.bias = vector("head.bias", spec.own_vocab());
  }

  void layer(const std::string& at, const LayerSpec& spec, int experts, LayerWeights& out) {
    norm(at + "attn_norm", spec.attn_norm, spec.side_block ? product(2, hidden_) : hidden_, out.attn_norm);
    if (spec.attention) attention(at, *spec.attention, out);
    if (spec.short_conv) short_conv(at + "mixer.", *spec.short_conv, out);
    if (spec.linear_attention) linear_attention(at + "mixer.", *spec.linear_attention, out);
    if (spec.scan) selective_scan(at + "mixer.", *spec.scan, out);
    if (spec.lru) gated_lru(at + "mixer.", *spec.lru, out);
    norm(at + "attn_post_norm", spec.attn_post_norm, hidden_, out.attn_post_norm);
    norm(at + "mlp_norm", spec.mlp_norm, hidden_, out.mlp_norm);
    if (spec.mlp) mlp(at + "mlp", *spec.mlp, out.mlp);
    if (spec.moe) {
      const MoeSpec& moe = *spec.moe;
      norm(at + "router_norm", moe.router_norm, hidden_, out.router_norm);
      matrix(at + "router", moe.experts, hidden_, out.router, moe.router_bias);
      if (moe.expert_scale) out.expert_scale = vector(at + "router.expert_scale", moe.experts);
      if (moe.choice_bias) out.choice_bias = vector(at + "router.choice_bias", moe.experts);
      if (moe.shared) mlp(at + "shared", *moe.shared, out.shared);
      if (moe.shared_gate) matrix(at + "shared_gate", 1, hidden_, out.shared_gate);
      norm(at + "shared_post_norm", moe.shared_post_norm, hidden_, out.shared_post_norm);
      norm(at + "experts_norm", moe.experts_norm, hidden_, out.experts_norm);
      out.experts.resize(static_cast<size_t>(experts));
      for (int i = 0; i < experts; ++i) {
        begin_expert();
        mlp(at + "experts." + std::to_string(i), moe.expert, out.experts[static_cast<size_t>(i)]);
        end_expert();
      }
      norm(at + "experts_post_norm", moe.post_norm, hidden_, out.experts_post_norm);
    }
    norm(at + "mlp_post_norm", spec.mlp_post_norm, hidden_, out.mlp_post_norm);
    if (spec.input_gate) {
      matrix(at + "input_gate", spec.input_gate->mlp.features, hidden_, out.input_gate);
      matrix(at + "input_down", hidden_, spec.input_gate->mlp.features, out.input_down);
      norm(at + "input_norm", spec.input_gate->norm, hidden_, out.input_norm);
    }
    if (spec.scaled) out.layer_scale = vector(at + "layer_scale", 1);
    if (spec.side_block) {
      matrix(at + "side", hidden_, hidden_, out.side);
      norm(at + "side_norm", spec.side_block->norm, hidden_, out.side_norm);
    }
    if (spec.laurel) {
      matrix(at + "laurel_down", spec.laurel->rank, hidden_, out.laurel_down);
      matrix(at + "laurel_up", hidden_, spec.laurel->rank, out.laurel_up);
      norm(at + "laurel_norm", spec.laurel->norm, hidden_, out.laurel_norm);
    }
    if (spec.streams) {
      const int64_t count = spec.streams->count;
      norm(at + "stream_norm", spec.streams->norm, hidden_, out.stream_norm);
      out.stream_router = vector(at + "stream_router", product(count, hidden_));
      out.stream_predict = vector(at + "stream_predict", product(count, product(count, count)));
      out.stream_correct = vector(at + "stream_correct", product(count, count));
      if (spec.streams->scaled) out.stream_scale = vector(at + "stream_scale", hidden_);
    }
  }

 private:
  // `parts` matrices of equal size under one name, each in a LinearWeights of its own.
  virtual void matrices(const std::string& name, int64_t rows, int64_t cols,
                        const std::vector<LinearWeights*>& parts) = 0;
  virtual const float* vector(const std::string& name, int64_t count) = 0;
  // Whether a matrix is there that need not be.
  virtual bool lists(const std::string& name) const = 0;
  // Around an expert's weights.
  virtual void begin_expert() {}
  virtual void end_expert() {}

  void linear(const std::string& name, int64_t rows, int64_t cols, bool bias,
              const std::vector<LinearWeights*>& parts) {
    matrices(name, rows, cols, parts);
    if (!bias) return;
    const float* values = vector(name + ".bias", rows);
    const int64_t part_rows = rows / static_cast<int64_t>(parts.size());
    for (size_t i = 0; i < parts.size() && values != nullptr; ++i)
      parts[i]->bias = values + static_cast<int64_t>(i) * part_rows;
  }

  void matrix(const std::string& name, int64_t rows, int64_t cols, LinearWeights& out, bool bias = false) {
    linear(name, rows, cols, bias, {&out});
  }

  void norm(const std::string& name, const std::optional<NormSpec>& spec, int64_t count, Norm& out) {
    out = Norm{NormKind::none, 0, nullptr, nullptr};
    if (!spec) return;
    out.kind = spec->kind;
    out.eps = spec->eps;
    if (spec->weight) out.weight = vector(name + ".weight", count);
    if (spec->bias) out.bias = vector(name + ".bias", count);
  }

  void mlp(const std::string& name, const MlpSpec& spec, MlpWeights& out) {
    out.activation = spec.activation;
    if (spec.gated)
      linear(name + ".gate_up", product(2, spec.features), hidden_, spec.bias, {&out.gate, &out.up});
    else
      matrix(name + ".gate_up", spec.features, hidden_, out.gate, spec.bias);
    if (spec.activation == Activation::xielu) out.values = vector(name + ".act", sizeof(XieluValues) / sizeof(float));
    norm(name + ".norm", spec.norm, spec.features, out.norm);
    out.cutoff = spec.cutoff;
    matrix(name + ".down", hidden_, spec.features, out.down, spec.out_bias);
  }

  void convolution(const std::string& at, int64_t channels, int kernel, bool bias, LayerWeights& out) {
    out.conv_channels = channels;
    out.kernel = kernel;
    out.conv = vector(at + "conv.weight", product(channels, kernel));
    if (bias) out.conv_bias = vector(at + "conv.bias", channels);
  }

  // Rows of `in` are b, c and x.
  void short_conv(const std::string& at, const ShortConvSpec& conv, LayerWeights& out) {
    linear(at + "in", product(3, conv.channels), hidden_, conv.bias,
           {&out.mix_gates[0], &out.mix_gates[1], &out.mix_in});
    convolution(at, conv.channels, conv.kernel, conv.bias, out);
    matrix(at + "out", hidden_, conv.channels, out.mix_out, conv.bias);
  }

  // Rows of `in` are queries, keys, values and the gate; of `steps` the inputs of steps, then those of strengths.
  void linear_attention(const std::string& at, const LinearAttentionSpec& a, LayerWeights& out) {
    matrix(at + "in", in_rows(a), hidden_, out.mix_in, a.in_bias);
    if (a.slopes.empty()) matrix(at + "steps", step_rows(a), hidden_, out.mix_steps, a.in_bias);
    if (a.kernel > 0) convolution(at, conv_channels(a), a.kernel, a.conv_bias, out);
    if (a.slopes.empty()) {
      out.rate = vector(at + "rate", a.heads);
      out.step_bias = vector(at + "step_bias", a.decay_rank > 0 ? product(a.heads, a.key_dim) : a.heads);
    }
    if (a.decay_rank > 0) matrix(at + "step_up", product(a.heads, a.key_dim), a.decay_rank, out.mix_step_up);
    if (a.gate_rank > 0) matrix(at + "gate_up", result_width(a), a.gate_rank, out.mix_gate_up);
    if (a.skip) out.skip = vector(at + "skip", a.heads);
    norm(at + "norm", a.norm, a.norm_shared ? a.norm_width : result_width(a), out.mix_norm);
    matrix(at + "out", hidden_, result_width(a), out.mix_out, a.out_bias);
  }

  // Rows of `in` are x and the gate; of `select` the inputs of steps, b and c.
  void selective_scan(const std::string& at, const SelectiveScanSpec& scan, LayerWeights& out) {
    linear(at + "in", product(2, scan.channels), hidden_, scan.in_bias, {&out.mix_in, &out.mix_gates[0]});
    convolution(at, scan.channels, scan.kernel, scan.conv_bias, out);
    matrix(at + "select", select_rows(scan), scan.channels, out.mix_select);
    norm(at + "step_norm", scan.norm, scan.step_rank, out.step_norm);
    norm(at + "b_norm", scan.norm, scan.state_dim, out.b_norm);
    norm(at + "c_norm", scan.norm, scan.state_dim, out.c_norm);
    matrix(at + "step_up", scan.channels, scan.step_rank, out.mix_step_up, true);
    out.rate = vector(at + "rate", product(scan.channels, scan.state_dim));
    out.skip = vector(at + "skip", scan.channels);
    matrix(at + "out", hidden_, scan.channels, out.mix_out, scan.out_bias);
  }

  // Rows of `in` are x and the output's gate; of `gates` those of each head's inputs, then those of each one's decays.
  void gated_lru(const std::string& at, const GatedLruSpec& lru, LayerWeights& out) {
    const int64_t channels = channels_of(lru);
    linear(at + "in", product(2, channels), hidden_, true, {&out.mix_in, &out.mix_gates[0]});
    convolution(at, channels, lru.kernel, true, out);
    out.head_gates.resize(2 * static_cast<size_t>(lru.heads));
    std::vector<LinearWeights*> parts;
    for (LinearWeights& each : out.head_gates) parts.push_back(&each);
    linear(at + "gates", product(2, channels), lru.head_dim, true, parts);
    out.rate = vector(at + "rate", channels);
    matrix(at + "out", hidden_, channels, out.mix_out, true);
  }

  // Rows of `qkv` are queries, keys, values (and gates); of `q_b` and `kv_b` as in DeepSeek's own q_b_proj and
  // kv_b_proj, `kv_a` as in kv_a_proj_with_mqa (latent, then rotated part).
  void attention(const std::string& at, const AttentionSpec& a, LayerWeights& out) {
    if (a.mla) {
      const MlaSpec& m = *a.mla;
      if (m.q_rank > 0) {
        matrix(at + "q_a", m.q_rank, hidden_, out.q_a, a.qkv_bias);
        norm(at + "q_a_norm", m.q_norm, m.q_rank, out.q_a_norm);
      }
      matrix(at + "q_b", product(a.heads, a.head_dim), m.q_rank > 0 ? m.q_rank : hidden_, out.q_b);
      matrix(at + "kv_a", int64_t{m.kv_rank} + m.rope_dim, hidden_, out.kv_a, a.qkv_bias);
      norm(at + "kv_a_norm", m.kv_norm, m.kv_rank, out.kv_a_norm);
      matrix(at + "kv_b", product(a.heads, int64_t{m.nope_dim} + a.value_dim), m.kv_rank, out.kv_b);
      if (a.indexer && a.indexer->own) {
        const IndexerSpec& indexer = *a.indexer;
        matrix(at + "index_q", product(indexer.heads, indexer.head_dim), m.q_rank, out.index_q);
        matrix(at + "index_k", indexer.head_dim, hidden_, out.index_k);
        norm(at + "index_norm", indexer.norm, indexer.head_dim, out.index_norm);
        matrix(at + "index_weights", indexer.heads, hidden_, out.index_weights);
      }
    } else {
      query_keys_values(at, a, out);
    }
    if (a.qk_norm) {
      const bool each = a.qk_norm->across || a.qk_norm->own_weights;
      norm(at + "q_norm", a.qk_norm->norm, product(a.head_dim, each ? a.heads : 1), out.q_norm);
      if (a.own_keys()) norm(at + "k_norm", a.qk_norm->norm, product(a.head_dim, each ? a.kv_heads : 1), out.k_norm);
    }
    norm(at + "v_norm", a.value_norm, a.value_dim, out.v_norm);
    if (a.sinks) out.sinks = vector(at + "sinks", a.heads);
    norm(at + "out_norm", a.out_norm, product(a.heads, a.value_dim), out.out_norm);
    matrix(at + "o", hidden_, product(a.heads, a.value_dim), out.o, a.out_bias);
  }

  void query_keys_values(const std::string& at, const AttentionSpec& a, LayerWeights& out) {
    const int64_t values = product(a.kv_heads, a.value_dim), all = qkv_rows(a);
    const int64_t cols = a.fused_input ? product(2, hidden_) : hidden_;
    const bool own_values = a.own_keys() && !a.gated && lists(at + "v");
    matrix(at + "qkv", own_values ? all - values : all, cols, out.qkv);
    if (own_values) matrix(at + "v", values, cols, out.v);
    if (!a.qkv_bias) return;
    out.qkv.bias = vector(at + "qkv.bias", all);
    if (out.qkv.bias != nullptr) out.v.bias = out.qkv.bias + all - values;
  }

  int64_t hidden_;
};

class List : public WeightWalk {
 public:
  using WeightWalk::WeightWalk;
  std::vector<WantedWeight> found;

 private:
  void matrices(const std::string& name, int64_t rows, int64_t cols, const std::vector<LinearWeights*>&) override {
    found.push_back({name, rows, cols});
  }
  const float* vector(const std::string& name, int64_t count) override {
    found.push_back({name, count, 0});
    return nullptr;
  }
  bool lists(const std::string&) const override { return false; }
};

}  // namespace

std::vector<WantedWeight> outer_weights(const DecoderSpec& spec) {
  List list(spec.hidden);
  LinearWeights linear;
  Norm norm;
  const float* values = nullptr;
  list.before(spec, linear, linear, linear, values, linear, norm, norm, linear, linear, norm);
  std::vector<LinearWeights> streams;
  list.streams(spec, "streams_in", streams);
  if (spec.hidden_inputs) list.fuse(*spec.hidden_inputs, linear, linear, norm, norm);
  list.streams(spec, "streams_out", streams);
  list.after(spec, linear, norm);
  return list.found;
}

std::vector<WantedWeight> layer_weights(const LayerSpec& layer, int64_t hidden) {
  List list(hidden);
  LayerWeights out;
  list.layer("", layer, 1, out);
  return list.found;
}

// Checks the given lists against the walk. Runs twice: the first time it counts bytes, the second time it hands out
// memory, or for experts that stay in a file their places there.
class Weights::Builder final : WeightWalk {
 public:
  Builder(Weights& weights, const DecoderSpec& spec, const std::vector<MatrixEntry>& matrices,
          const std::vector<VectorEntry>& vectors)
      : WeightWalk(spec.hidden), weights_(weights), spec_(spec) {
    for (const MatrixEntry& entry : matrices)
      if (!matrices_.emplace(entry.name, &entry).second) fail("weight '" + entry.name + "' is listed twice");
    for (const VectorEntry& entry : vectors)
      if (matrices_.contains(entry.name) || !vectors_.emplace(entry.name, &entry).second)
        fail("weight '" + entry.name + "' is listed twice");
  }

  // The bytes of what every token needs, and of experts.
  std::pair<size_t, size_t> run(uint8_t* memory, bool experts_in_file = false) {
    memory_ = memory;
    experts_in_file_ = experts_in_file;
    front_bytes_ = padded(offset_, kExpertAlign);  // of the first run
    offset_ = expert_offset_ = 0;
    weights_.places_.clear();
    used_ = 0;
    LinearWeights embed, positions, token_types, distances, layer_embed;
    before(spec_, embed, positions, token_types, weights_.relative_bias, distances, weights_.distances_norm,
           weights_.embed_norm, layer_embed, weights_.layer_projection, weights_.layer_projection_norm);
    weights_.distances = distances.w;
    streams(spec_, "streams_in", weights_.streams_in);
    if (spec_.hidden_inputs)
      fuse(*spec_.hidden_inputs, weights_.reduce, weights_.fuse, weights_.fuse_embed_norm, weights_.fuse_hidden_norm);
    weights_.token_types = token_types.w;
    weights_.embed = embed.w;
    weights_.positions = positions.w;
    weights_.layer_embed = layer_embed.w;
    weights_.layers.resize(spec_.layers.size());
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      const LayerSpec& each = spec_.layers[i];
      const std::string at = "layers." + std::to_string(static_cast<size_t>(spec_.first_layer) + i) + ".";
      layer(at, each, each.moe ? each.moe->experts : 0, weights_.layers[i]);
    }
    streams(spec_, "streams_out", weights_.streams_out);
    if (spec_.tied && spec_.is_last_stage()) weights_.head.w = weights_.embed;
    after(spec_, weights_.head, weights_.final_norm);
    const size_t given = matrices_.size() + vectors_.size();
    if (used_ != given) unknown();
    return {offset_, expert_offset_};
  }
  // Of the experts of each layer that has some, where they begin among all of them; with their number.
  std::vector<size_t> first_experts() const {
    std::vector<size_t> first{0};
    for (const LayerSpec& layer : spec_.layers)
      first.push_back(first.back() + static_cast<size_t>(layer.moe ? layer.moe->experts : 0));
    return first;
  }

 private:
  [[noreturn]] static void fail(const std::string& what) { throw UsageError(what); }

  [[noreturn]] void unknown() {
    for (const auto& [name, entry] : matrices_)
      if (!wanted_.contains(name)) fail("weight '" + name + "' is not one of this decoder");
    for (const auto& [name, entry] : vectors_)
      if (!wanted_.contains(name)) fail("weight '" + name + "' is not one of this decoder");
    fail("a weight is not one of this decoder");
  }

  uint8_t* take(size_t bytes) { return take(bytes, offset_, 0); }

  // From a region that begins at `first`, of which `used` bytes are taken.
  uint8_t* take(size_t bytes, size_t& used, size_t first) {
    uint8_t* at = memory_ == nullptr ? nullptr : memory_ + first + used;
    if (bytes > SIZE_MAX / 4 - used) fail("the weights are larger than memory can be");
    used += padded(bytes, kAlign);
    return at;
  }

  void begin_expert() override {
    in_expert_ = true;
    if (memory_ != nullptr) weights_.places_.push_back({front_bytes_ + expert_offset_, 0, {}, 0});
  }

  void end_expert() override {
    in_expert_ = false;
    expert_offset_ = padded(expert_offset_, kExpertAlign);
    if (memory_ == nullptr) return;
    ExpertPlace& place = weights_.places_.back();
    place.bytes = front_bytes_ + expert_offset_ - place.offset;
  }

  void matrices(const std::string& name, int64_t rows, int64_t cols,
                const std::vector<LinearWeights*>& parts) override {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) fail("weight '" + name + "' is missing from the list of matrices");
    const MatrixEntry& entry = *found->second;
    if (entry.rows != rows || entry.cols != cols)
      fail("weight '" + name + "' is listed with " + std::to_string(entry.rows) + " x " + std::to_string(entry.cols) +
           ", this decoder needs " + std::to_string(rows) + " x " + std::to_string(cols));
    wanted_.emplace(name, true);
    ++used_;
    const int64_t part_rows = rows / static_cast<int64_t>(parts.size());
    const Shape shape{entry.format, part_rows, cols, entry.group, entry.minimum, entry.scales};
    try {
      check(shape);
    } catch (const std::invalid_argument& error) {
      fail("weight '" + name + "': " + error.what());
    }
    Slot slot;
    slot.rows = rows;
    slot.cols = cols;
    slot.missing = rows;
    if (in_expert_) slot.expert = static_cast<int64_t>(weights_.places_.size()) - 1;
    for (LinearWeights* part : parts) {
      const size_t before = front_bytes_ + expert_offset_;
      uint8_t* at = in_expert_ ? take(shape.bytes(), expert_offset_, front_bytes_) : take(shape.bytes());
      if (memory_ == nullptr) continue;
      if (in_expert_) {
        ExpertPlace& place = weights_.places_.back();
        const size_t offset = before - place.offset;
        place.parts[place.count++] = {&part->w, offset};
        // Where experts stay in a file they are made in one place, one after the other; ExpertCache knows where.
        if (experts_in_file_) at = memory_ + offset;
      }
      part->w = Matrix(shape, weights_.memory_, at);
      slot.parts.push_back(part->w);
    }
    if (memory_ != nullptr) {
      slot.set.resize(static_cast<size_t>(rows));
      weights_.slots_.emplace(name, std::move(slot));
    }
  }

  bool lists(const std::string& name) const override { return matrices_.contains(name); }

  const float* vector(const std::string& name, int64_t count) override {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) fail("weight '" + name + "' is missing from the list of vectors");
    if (found->second->count != count)
      fail("weight '" + name + "' is listed with " + std::to_string(found->second->count) +
           " values, this decoder needs " + std::to_string(count));
    wanted_.emplace(name, true);
    ++used_;
    auto* at = reinterpret_cast<float*>(take(static_cast<size_t>(count) * sizeof(float)));
    if (memory_ == nullptr) return nullptr;
    Slot slot;
    slot.vector = at;
    slot.rows = slot.missing = count;
    slot.set.resize(static_cast<size_t>(count));
    weights_.slots_.emplace(name, std::move(slot));
    return at;
  }

  Weights& weights_;
  const DecoderSpec& spec_;
  std::unordered_map<std::string, const MatrixEntry*> matrices_;
  std::unordered_map<std::string, const VectorEntry*> vectors_;
  std::unordered_map<std::string, bool> wanted_;
  uint8_t* memory_ = nullptr;
  bool experts_in_file_ = false, in_expert_ = false;
  size_t offset_ = 0, expert_offset_ = 0, front_bytes_ = 0;
  size_t used_ = 0;
};

Weights::Weights(const DecoderSpec& spec, const std::vector<MatrixEntry>& matrices,
                 const std::vector<VectorEntry>& vectors, size_t memory) {
  Builder builder(*this, spec, matrices, vectors);
  const auto [front, of_experts] = builder.run(nullptr);
  const size_t front_bytes = of_experts > 0 ? padded(front, kExpertAlign) : front;
  bytes_ = front_bytes + of_experts;
  const bool experts_in_file = memory > 0 && bytes_ > memory;
  memory_ = allocate_weights(experts_in_file ? front_bytes : bytes_);
  builder.run(static_cast<uint8_t*>(memory_.get()), experts_in_file);
  if (!experts_in_file) return;
  const std::vector<size_t> first = builder.first_experts();
  size_t most = 0;
  for (size_t i = 1; i < first.size(); ++i) most = std::max(most, first[i] - first[i - 1]);
  const size_t slot = std::max<size_t>(ExpertCache::slot_bytes(places_), 1);
  const size_t slots = memory > front_bytes ? (memory - front_bytes) / slot : 0;
  if (places_.empty())
    throw UsageError("the weights take " + std::to_string(bytes_) + " bytes, more than the " + std::to_string(memory) +
                     " that they may take, and every token needs all of them: only experts can stay in a file");
  if (slots < most)
    throw UsageError("the weights may take " + std::to_string(memory) + " bytes; what every token needs takes " +
                     std::to_string(front_bytes) + " of them, and the experts of one layer " +
                     std::to_string(most * slot) + ": allow " + std::to_string(front_bytes + most * slot) +
                     " bytes or more");
  experts = std::make_unique<ExpertCache>(places_, first, std::min(slots, places_.size()));
  for (auto& [name, each] : slots_) {
    if (each.expert < 0) continue;
    for (Matrix& part : each.parts) {
      const auto offset = static_cast<size_t>(part.block(0) - static_cast<uint8_t*>(memory_.get()));
      part = Matrix(part.shape(), experts->memory(), experts->first_slot() + offset);
    }
  }
}

std::vector<size_t> Weights::pieces() const {
  std::vector<size_t> found{bytes_ - expert_bytes()};
  for (const ExpertPlace& place : places_) found.push_back(place.bytes);
  return found;
}

void Weights::stream_to(int fd, int64_t offset) {
  if (experts == nullptr) throw UsageError("all weights are in memory: write() them");
  stream_ = fd;
  stream_offset_ = offset;
  streamed_.assign(places_.size(), 0);
}

// Sees to it that an expert is complete, and in the file, before the next one takes its place.
void Weights::begin_rows(const Slot& slot) {
  if (experts == nullptr || slot.expert < 0 || slot.expert == making_) return;
  if (stream_ < 0) throw UsageError("the experts stay in a file: stream_to() comes first");
  if (making_ >= 0)
    throw UsageError("expert " + std::to_string(making_) + " is not complete, and another one is begun");
  making_ = slot.expert;
  lacking_ = 0;
  const ExpertPlace& place = places_[static_cast<size_t>(making_)];
  for (int i = 0; i < place.count; ++i) lacking_ += place.parts[i].matrix->shape().rows;
}

void Weights::end_rows(const Slot& slot, int64_t marked) {
  if (experts == nullptr || slot.expert < 0) return;
  lacking_ -= marked;
  if (lacking_ > 0) return;
  const ExpertPlace& place = places_[static_cast<size_t>(making_)];
  streamed_[static_cast<size_t>(making_)] = write_weights(stream_, stream_offset_ + static_cast<int64_t>(place.offset),
                                                          experts->first_slot(), {place.bytes}, 1)
                                                .front();
  experts->clear_packed(static_cast<size_t>(making_));
  making_ = -1;
}

std::vector<uint64_t> Weights::write(int fd, int64_t offset, int threads, const FileProgress& progress) {
  if (experts == nullptr) return write_weights(fd, offset, memory_.get(), pieces(), threads, progress);
  if (stream_ != fd || stream_offset_ != offset || making_ >= 0)
    throw UsageError("the experts are not in this file: stream_to() comes before the first weight");
  std::vector<uint64_t> found = write_weights(fd, offset, memory_.get(), {pieces().front()}, threads, progress);
  found.insert(found.end(), streamed_.begin(), streamed_.end());
  return found;
}

bool Weights::read(int fd, int64_t offset, const std::vector<uint64_t>& checksums, int threads,
                   const FileProgress& progress) {
  std::vector<size_t> wanted = pieces();
  if (checksums.size() != wanted.size()) return false;
  if (experts != nullptr) wanted.resize(1);
  const std::vector<uint64_t> found = map_weights(fd, offset, memory_.get(), wanted, threads, progress);
  if (!std::equal(found.begin(), found.end(), checksums.begin())) return false;
  if (experts != nullptr) experts->open(fd, offset, {checksums.begin() + 1, checksums.end()});
  for (auto& [name, slot] : slots_) slot.missing = 0;
  return true;
}

Weights::Slot& Weights::find(const std::string& name, bool matrix, int64_t first, int64_t count) {
  if (finished_) throw UsageError("weights are set before finish()");
  const auto found = slots_.find(name);
  if (found == slots_.end() || found->second.parts.empty() == matrix)
    throw UsageError("this decoder has no " + std::string(matrix ? "matrix" : "vector") + " '" + name + "'");
  Slot& slot = found->second;
  if (first < 0 || count < 0 || first > slot.rows || count > slot.rows - first)
    throw UsageError("'" + name + "' has " + std::to_string(slot.rows) + (matrix ? " rows" : " values") + ", not " +
                     std::to_string(first) + " + " + std::to_string(count));
  return slot;
}

void Weights::mark(Slot& slot, int64_t first, int64_t count) {
  const int64_t missing = slot.missing;
  for (int64_t row = first; row < first + count; ++row) {
    if (slot.set[static_cast<size_t>(row)]) continue;
    slot.set[static_cast<size_t>(row)] = true;
    --slot.missing;
  }
  end_rows(slot, missing - slot.missing);
}

// Calls fn(part, its first row, begin, end) on all threads, each with rows of its own of what is given: whole blocks,
// since rows of one block are packed by one thread.
template <class Fn>
void Weights::for_rows(Team& team, Slot& slot, int64_t first, int64_t count, const Fn& fn) {
  const int64_t part_rows = slot.rows / static_cast<int64_t>(slot.parts.size());
  begin_rows(slot);
  std::mutex mutex;
  std::exception_ptr failure;
  team.run([&](int thread) {
    try {
      for (size_t part = 0; part < slot.parts.size(); ++part) {
        const int64_t start = static_cast<int64_t>(part) * part_rows;
        const int64_t low = std::max(first, start) - start, high = std::min(first + count, start + part_rows) - start;
        if (low >= high) continue;
        const int64_t block = low / kBlockRows;
        const Range blocks = part_of((high + kBlockRows - 1) / kBlockRows - block, thread, team.size());
        const int64_t begin = std::max(low, (block + blocks.begin) * kBlockRows);
        const int64_t end = std::min(high, (block + blocks.end) * kBlockRows);
        if (begin < end) fn(slot.parts[part], start, begin, end);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
  mark(slot, first, count);
}

void Weights::set_rows(Team& team, const std::string& name, int64_t first, int64_t count, const Source& source,
                       const int64_t* order) {
  for_rows(team, find(name, true, first, count), first, count,
           [&](Matrix& matrix, int64_t start, int64_t begin, int64_t end) {
             const int64_t skip = start + begin - first;
             Source from = source;
             if (order == nullptr) from.data = static_cast<const char*>(source.data) + skip * source.row_stride;
             matrix.set_rows(begin, end - begin, from, order == nullptr ? nullptr : order + skip);
           });
}

void Weights::set_quantised_rows(Team& team, const std::string& name, int64_t first, int64_t count, const uint8_t* q,
                                 const float* scales, const float* minima) {
  Slot& slot = find(name, true, first, count);
  const Shape& shape = slot.parts.front().shape();
  const int64_t groups = shape.group > 0 ? (shape.cols + shape.group - 1) / shape.group : 1;
  if (shape.minimum != (minima != nullptr))
    throw UsageError("'" + name + (shape.minimum ? "' needs minima" : "' has no minima"));
  for_rows(team, slot, first, count, [&](Matrix& matrix, int64_t start, int64_t begin, int64_t end) {
    const int64_t skip = start + begin - first;
    matrix.set_quantised_rows(begin, end - begin, q + skip * shape.cols, scales + skip * groups,
                              minima == nullptr ? nullptr : minima + skip * groups);
  });
}

void Weights::set_vector(const std::string& name, int64_t first, int64_t count, const void* values, SourceType type,
                         int64_t stride, float plus) {
  Slot& slot = find(name, false, first, count);
  const auto* at = static_cast<const uint8_t*>(values);
  for (int64_t i = 0; i < count; ++i) slot.vector[first + i] = load_value(at + i * stride, type) + plus;
  mark(slot, first, count);
}

void Weights::finish(const DecoderSpec& spec, Team& team) {
  size_t missing = 0;
  std::string first;
  for (const auto& [name, slot] : slots_) {
    if (slot.missing == 0) continue;
    if (missing++ == 0 || name < first) first = name;
  }
  if (missing > 0)
    throw ModelError(std::to_string(missing) + " weights were not set or not in full, '" + first + "' among them (" +
                     std::to_string(slots_[first].missing) + " of " + std::to_string(slots_[first].rows) +
                     " rows missing)");
  for (LayerWeights& layer : layers) {
    order_taps(layer);
    if (!layer.mix_select.w.empty()) order_rates(layer);
  }
  for (size_t i = 0; i < layers.size(); ++i)
    if (!layers[i].kv_b.w.empty()) divide_heads(*spec.layers[i].attention, layers[i], team);
  finished_ = true;
  slots_.clear();
}

void Weights::borrow(const Weights& model, const std::vector<int32_t>& tokens) {
  embed = model.embed;
  head_tokens = tokens;
  if (tokens.empty()) head = model.head;
}

// Heads whose rows begin with a block are views of it; others, of models that nobody runs, are copies.
void Weights::divide_heads(const AttentionSpec& spec, LayerWeights& layer, Team& team) {
  const Matrix& all = layer.kv_b.w;
  const int64_t nope = spec.mla->nope_dim, rank = spec.mla->kv_rank, both = nope + spec.value_dim;
  const bool views = nope % kBlockRows == 0 && spec.value_dim % kBlockRows == 0;
  // Rounded to 8 bits, the transpose of quantised rows loses little.
  const Format own = all.shape().format;
  const Shape transposed{is_quantised(own) ? Format::i8 : own, rank, nope, is_quantised(own) ? 32 : 0};
  layer.latent_heads.resize(static_cast<size_t>(spec.heads));
  std::mutex mutex;
  std::exception_ptr failure;
  team.run([&](int thread) {
    try {
      const Range heads = part_of(spec.heads, thread, team.size());
      std::vector<float> rows(static_cast<size_t>(both * rank));
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        LatentHead& to = layer.latent_heads[static_cast<size_t>(head)];
        for (int64_t r = 0; r < both; ++r) all.row(head * both + r, &rows[static_cast<size_t>(r * rank)]);
        const auto floats = static_cast<int64_t>(sizeof(float));
        if (nope > 0) {
          to.absorb = Matrix(transposed);
          to.absorb.set_rows(0, rank, {rows.data(), SourceType::f32, floats, rank * floats});
        }
        if (views) {
          to.keys = all.view(head * both, nope);
          to.values = all.view(head * both + nope, spec.value_dim);
          continue;
        }
        to.keys = Matrix({Format::f32, nope, rank});
        to.keys.set_rows(0, nope, {rows.data(), SourceType::f32, rank * floats, 0});
        to.values = Matrix({Format::f32, spec.value_dim, rank});
        to.values.set_rows(0, spec.value_dim,
                           {&rows[static_cast<size_t>(nope * rank)], SourceType::f32, rank * floats, 0});
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// Checkpoints have a channel's taps one after another; a step reads all channels' of one tap.
void Weights::order_taps(LayerWeights& layer) {
  if (layer.conv == nullptr) return;
  const auto channels = static_cast<size_t>(layer.conv_channels), kernel = static_cast<size_t>(layer.kernel);
  layer.taps.resize(kernel * channels);
  for (size_t channel = 0; channel < channels; ++channel)
    for (size_t tap = 0; tap < kernel; ++tap) layer.taps[tap * channels + channel] = layer.conv[channel * kernel + tap];
}

void Weights::order_rates(LayerWeights& layer) {
  const auto channels = static_cast<size_t>(layer.conv_channels);
  const auto states = static_cast<size_t>(layer.mix_select.w.shape().rows - layer.mix_step_up.w.shape().cols) / 2;
  layer.scan_rates.resize(states * channels);
  for (size_t channel = 0; channel < channels; ++channel)
    for (size_t n = 0; n < states; ++n)
      layer.scan_rates[n * channels + channel] = -std::exp(layer.rate[channel * states + n]);
}

Weights::Load Weights::load(const DecoderSpec& spec) const {
  Load all;
  const auto add = [&all](const LinearWeights& one, double times = 1) {
    if (one.w.empty()) return;
    const Shape& shape = one.w.shape();
    all.bytes += times * static_cast<double>(shape.bytes());
    all.products += times * static_cast<double>(shape.rows) * static_cast<double>(shape.cols);
  };
  const auto add_mlp = [&add](const MlpWeights& mlp, double times = 1) {
    for (const LinearWeights* one : {&mlp.gate, &mlp.up, &mlp.down}) add(*one, times);
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights& layer = layers[i];
    for (const LinearWeights* one : {&layer.qkv,
                                     &layer.v,
                                     &layer.o,
                                     &layer.q_a,
                                     &layer.q_b,
                                     &layer.kv_a,
                                     &layer.kv_b,
                                     &layer.index_q,
                                     &layer.index_k,
                                     &layer.index_weights,
                                     &layer.router,
                                     &layer.shared_gate,
                                     &layer.input_gate,
                                     &layer.input_down,
                                     &layer.mix_in,
                                     &layer.mix_gates[0],
                                     &layer.mix_gates[1],
                                     &layer.mix_steps,
                                     &layer.mix_select,
                                     &layer.mix_step_up,
                                     &layer.mix_gate_up,
                                     &layer.mix_out,
                                     &layer.laurel_down,
                                     &layer.laurel_up,
                                     &layer.side})
      add(*one);
    for (const LinearWeights& each : layer.head_gates) add(each);
    add_mlp(layer.mlp);
    add_mlp(layer.shared);
    const auto count = static_cast<double>(layer.experts.size());
    if (count == 0) continue;
    const double share = std::min(1.0, spec.layers[i].moe->top_k / count);
    for (const MlpWeights& expert : layer.experts) add_mlp(expert, share);
  }
  add(layer_projection);
  for (const LinearWeights& each : streams_in) add(each);
  for (const LinearWeights& each : streams_out) add(each);
  add(reduce);
  add(fuse);
  add(head);
  return all;
}

}  // namespace anyaccel::llm
