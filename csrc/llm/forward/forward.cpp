// SPDX-License-Identifier: Apache-2.0
#include "llm/forward/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/errors.h"
#include "common/hash.h"
#include "llm/attention/cache.h"
#include "llm/errors.h"
#include "llm/forward/step_thread.h"

namespace anyaccel::llm {
namespace {

// Activations of a run, all threads together: the more tokens, the less often weights are read; but they should not
// be large beside the weights, nor far beyond the last cache.
constexpr int64_t kRunFloats = int64_t{32} << 20;
constexpr int64_t kMostTokens = 1024;
// Floats that one exchange among ranks can hold: containers often have no more than 64 MiB of shared memory.
constexpr int64_t kSlotFloats = int64_t{1} << 20;

uint64_t signature(const StepTokens& step) {
  Fnv1a hash;
  for (const Query& query : step.queries) {
    hash.mix(query.position);
    hash.mix(query.tokens);
  }
  for (int32_t token : step.tokens) hash.mix(token);
  for (int32_t row : step.wanted) hash.mix(row);
  return hash.value();
}

int64_t tokens_of_a_run(const DecoderSpec& spec, const Widths& widths) {
  int64_t tokens = kMostTokens;
  if (spec.size > 1 || spec.stages > 1)  // by what is the same on every rank: all must divide a call into the same runs
    tokens = std::min(tokens, kSlotFloats / (2 * padded_stride(spec.hidden)));
  else
    tokens = std::min(tokens, kRunFloats / widths.token_floats());
  return std::clamp<int64_t>(tokens / 64 * 64, 64, kMostTokens);
}

void add_shape(std::vector<Shape>& shapes, const Matrix& w) {
  if (w.empty()) return;
  const Shape& shape = w.shape();
  const auto known = std::find_if(shapes.begin(), shapes.end(),
                                  [&](const Shape& s) { return Inputs::same(s, shape) && s.cols == shape.cols; });
  if (known == shapes.end()) shapes.push_back(shape);
}

}  // namespace

Forward::Forward(const DecoderSpec& spec, const Weights& weights, KvCache& cache, Team& team, Profile& profile)
    : spec_(spec),
      weights_(weights),
      cache_(cache),
      team_(team),
      profile_(profile),
      widths_(spec),
      most_tokens_(tokens_of_a_run(spec, widths_)),
      states_(spec),
      items_(team.size()) {
  add_shape(shapes_, weights.head.w);
  add_shape(shapes_, weights.layer_projection.w);
  for (const LinearWeights& each : weights.streams_in) add_shape(shapes_, each.w);
  for (const LinearWeights& each : weights.streams_out) add_shape(shapes_, each.w);
  add_shape(shapes_, weights.reduce.w);
  add_shape(shapes_, weights.fuse.w);
  for (const LayerWeights& layer : weights.layers) {
    for (const LinearWeights* linear :
         {&layer.qkv,         &layer.v,           &layer.o,           &layer.q_a,           &layer.q_b,
          &layer.kv_a,        &layer.index_q,     &layer.index_k,     &layer.index_weights, &layer.router,
          &layer.shared_gate, &layer.input_gate,  &layer.input_down,  &layer.mix_in,        &layer.mix_steps,
          &layer.mix_select,  &layer.mix_step_up, &layer.mix_gate_up, &layer.mix_out,       &layer.laurel_down,
          &layer.laurel_up,   &layer.side})
      add_shape(shapes_, linear->w);
    for (const LinearWeights& each : layer.head_gates) add_shape(shapes_, each.w);
    const auto add_mlp = [&](const MlpWeights& mlp) {
      add_shape(shapes_, mlp.gate.w);
      add_shape(shapes_, mlp.down.w);
    };
    add_mlp(layer.mlp);
    add_mlp(layer.shared);
    for (const MlpWeights& expert : layer.experts) add_mlp(expert);
  }
  next_experts_.resize(spec.layers.size());
  for (size_t i = spec.layers.size(); i-- > 1;) next_experts_[i - 1] = spec.layers[i].moe ? i : next_experts_[i];
  for (const LayerSpec& layer : spec.layers)
    if (weights.experts != nullptr && layer.moe)
      likely_logits_.resize(std::max(likely_logits_.size(), static_cast<size_t>(padded_stride(layer.moe->experts))));
  for (const RopeSpec& rope : spec.ropes) ropes_.emplace_back(rope);
  rotations_.resize(spec.ropes.size());
  int with_attention = 0;
  for (const LayerSpec& layer : spec.layers) cache_layers_.push_back(layer.attention ? with_attention++ : -1);
  for (const LayerSpec& layer : spec.layers) {
    const bool chooses = layer.attention && layer.attention->indexer;
    index_layers_.push_back(chooses && layer.attention->indexer->own ? with_attention++ : -1);
    if (chooses) top_k_ = layer.attention->indexer->top_k;
  }
  if (spec.is_encoder()) std::fill(cache_layers_.begin(), cache_layers_.end(), 0);  // nothing is seen by later steps
}

void Forward::add_latent_heads() {
  std::vector<Shape> kinds;
  for (const LayerWeights& layer : weights_.layers)
    for (const LatentHead& head : layer.latent_heads) {
      add_shape(shapes_, head.absorb);
      add_shape(shapes_, head.values);
      add_shape(kinds, head.keys);
    }
  latent_inputs_.reserve(kinds, kLatentTile);
}

void Forward::add_distances() {
  if (!spec_.distances) return;
  if (cache_.format() != CacheFormat::f32 && cache_.format() != CacheFormat::bf16)
    throw UsageError("kv_cache of int8 or int4: this model's scores by distance need keys in bf16 or fp32");
  const DistancesSpec& spec = *spec_.distances;
  const DistanceRows distances{spec.span, spec.max_distance, spec.logarithmic};
  distance_rows_ = distances.rows();
  const int64_t count = distances.count(), stride = padded_stride(spec_.hidden);
  std::vector<float> rows(static_cast<size_t>(count * stride));
  for (int64_t row = 0; row < count; ++row) {
    float* const to = &rows[static_cast<size_t>(row * stride)];
    weights_.distances.row(row, to);
    norm(weights_.distances_norm, to, spec_.hidden, to);
  }
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const AttentionSpec& a = *spec_.layers[i].attention;
    const LinearWeights& qkv = weights_.layers[i].qkv;
    const int64_t width = padded_stride(qkv.w.shape().rows);
    std::vector<float> both(static_cast<size_t>(count * width));
    Input input;
    input.reserve(qkv.w.shape(), count);
    team_.run([&](int thread) {
      input.prepare(qkv.w.shape(), rows.data(), stride, nullptr, static_cast<int>(count), thread, team_.size());
      team_.barrier(thread);
      multiply(qkv.w, input, Output{both.data(), width, qkv.bias}, thread, team_.size());
    });
    DistanceTerms& terms = distance_terms_.emplace_back(count, a.heads, a.head_dim, cache_.format());
    for (int64_t row = 0; row < count; ++row) {
      const float* const query = &both[static_cast<size_t>(row * width)];
      if (spec.keys) terms.set_key(row, query + static_cast<int64_t>(a.heads) * a.head_dim);
      if (spec.queries) terms.set_query(row, query, a.scale);
    }
  }
}

void Forward::add_head() { add_shape(shapes_, weights_.head.w); }

size_t Forward::slot_floats() const {
  const int64_t of_tokens = 2 * most_tokens_ * padded_stride(spec_.hidden);
  const int64_t of_vocabulary = (spec_.vocab / spec_.size + 256) * 2;
  return static_cast<size_t>(std::max(of_tokens, of_vocabulary));
}

void Forward::prepare(const StepTokens& step) {
  const auto tokens = static_cast<int64_t>(step.tokens.size());
  const int64_t room = tokens <= kGemvTokens && !step.prompt
                           ? tokens
                           : std::max(tokens, std::min((tokens + 127) / 128 * 128, most_tokens_));
  workspace_.reserve(widths_, spec_, shapes_, room, team_.size());
  positions_.resize(static_cast<size_t>(tokens));
  for (RopeTable& rope : ropes_) rope.reset();
  for (auto& rotations : rotations_) rotations.resize(static_cast<size_t>(tokens));
  for (size_t i = 0; i < step.queries.size(); ++i) {
    const Query& query = step.queries[i];
    for (int t = 0; t < query.tokens; ++t) positions_[static_cast<size_t>(query.row + t)] = query.position + t;
    for (size_t rope = 0; rope < ropes_.size(); ++rope)
      ropes_[rope].rotations(query.position, query.tokens, step.contexts[i],
                             &rotations_[rope][static_cast<size_t>(query.row)]);
  }
  if (states_.floats > 0) find_spans(step);
  if (spec_.relative_bias)
    for (const Query& query : step.queries) spread_bias(query.tokens);
  if (widths_.absorbed > 0) prepare_latent(step);
  AttentionShape last{};
  for (const LayerSpec& layer : spec_.layers) {
    if (!layer.attention) continue;
    const AttentionSpec& a = *layer.attention;
    const AttentionShape shape = cache_shape(a);
    if (!(shape == last)) scratch_.reserve(shape, step.queries, team_.size());
    last = shape;
  }
}

void Forward::prepare_latent(const StepTokens& step) {
  latent_queries_ = step.queries;
  latent_runs_.clear();
  long_queries_.clear();
  int64_t longest = 0;
  for (Query& query : latent_queries_) {
    query.shared = true;  // append() writes all
    if (!divides_context(query)) {
      long_queries_.push_back(query);
      longest = std::max(longest, query.position + query.tokens);
      continue;
    }
    const bool follows = !latent_runs_.empty() && latent_runs_.back().row + latent_runs_.back().tokens == query.row &&
                         latent_runs_.back().tokens + query.tokens <= kLatentTokens;
    if (!follows) latent_runs_.push_back({query.row, 0, {}});
    LatentRun& run = latent_runs_.back();
    run.queries.push_back(query);
    run.queries.back().row = static_cast<int>(query.row - run.row);
    run.tokens += query.tokens;
  }
  if (top_k_ > 0) prepare_chosen(step);
  if (longest == 0) return;
  constexpr size_t kMostBytes = size_t{256} << 20;  // of expanded keys, all threads together
  expanded_.resize(static_cast<size_t>(team_.size()));
  for (const LayerSpec& layer : spec_.layers) {
    if (!layer.attention || !layer.attention->mla) continue;
    const AttentionSpec& a = *layer.attention;
    const CacheFormat format = cache_.format();
    const size_t head_bytes = ExpandedKeys::token_bytes(a.head_dim, a.value_dim, format) * static_cast<size_t>(longest);
    const auto fitting = static_cast<int>(kMostBytes / head_bytes) / team_.size();
    expanded_heads_ = std::clamp(fitting, 1, (a.heads + team_.size() - 1) / team_.size());
    for (ExpandedKeys& expanded : expanded_)
      expanded.reserve(a.head_dim, a.value_dim, format, expanded_heads_, longest);
    break;  // all layers have the same heads: check()
  }
}

// Of few tokens, those that choose what they see are queries of their own, whose context is copies of that.
void Forward::prepare_chosen(const StepTokens& step) {
  size_t page_bytes = 0;
  for (size_t i = 0; i < spec_.layers.size(); ++i)
    if (spec_.layers[i].attention && spec_.layers[i].attention->mla)
      page_bytes = std::max(page_bytes, cache_.impl().layouts[static_cast<size_t>(cache_layers_[i])].bytes);
  chosen_.reserve(step.queries, top_k_, page_bytes);
  for (LatentRun& run : latent_runs_) {
    std::vector<Query> whole;
    for (Query query : run.queries) {
      const int tokens = query.tokens;
      query.tokens = static_cast<int>(std::clamp<int64_t>(top_k_ - query.position, 0, tokens));
      if (query.tokens > 0) whole.push_back(query);
      for (int t = query.tokens; t < tokens; ++t) {
        if (run.choosing.empty() || static_cast<int64_t>(run.choosing.back().size()) == chosen_.copies())
          run.choosing.emplace_back();
        std::vector<Query>& group = run.choosing.back();
        group.push_back({.sequence = query.sequence,
                         .position = top_k_ - 1,
                         .tokens = 1,
                         .row = query.row + t,
                         .pages = chosen_.pages(static_cast<int64_t>(group.size()))});
      }
    }
    run.queries.swap(whole);
  }
}

// The buckets of distances are those of T5 (Raffel et al., 2020) for tokens that see both ways: half of them are of
// keys behind the query; in each half the first ones have one distance, the others grow with its logarithm.
void Forward::spread_bias(int64_t length) {
  if (length <= distances_length_) return;
  length = std::max(length, std::min<int64_t>(2 * distances_length_, std::max<int64_t>(spec_.max_tokens, 512)));
  const RelativeBiasSpec& spec = *spec_.relative_bias;
  const int heads = spec.heads;
  const int half = spec.buckets / 2, exact = half / 2;
  const int64_t width = 2 * length + kPageTokens;  // whole blocks of keys are read
  std::vector<float> values(static_cast<size_t>(width * heads));
  for (int64_t i = 0; i < 2 * length; ++i) {
    const int64_t distance = i - length, far = std::abs(distance);
    int64_t bucket = far;
    if (far >= exact) {
      const float grown = std::log(static_cast<float>(far) / static_cast<float>(exact)) /
                          static_cast<float>(std::log(static_cast<double>(spec.max_distance) / exact)) *
                          static_cast<float>(half - exact);
      bucket = std::min<int64_t>(exact + static_cast<int64_t>(grown), half - 1);
    }
    if (distance > 0) bucket += half;
    for (int head = 0; head < heads; ++head)
      values[static_cast<size_t>(head * width + i)] = weights_.relative_bias[bucket * heads + head];
  }
  distances_.swap(values);
  distances_length_ = length;
}

// Queries of tokens that pass apart are one span: a recurrent mixer takes one token after the other anyway.
void Forward::find_spans(const StepTokens& step) {
  spans_.clear();
  int last = -1;
  for (const Query& query : step.queries) {
    if (query.sequence == last)
      spans_.back().tokens += query.tokens;
    else
      spans_.push_back({query.row, query.tokens, cache_.state(query.sequence), query.position == 0});
    last = query.sequence;
  }
}

void Forward::run(const StepTokens& step) {
  if (stages_ == nullptr) return run_all(step);
  // The other ranks of this stage, and the other stages, wait for this one.
  const auto give_up = [this](const char* why) {
    if (ranks_ != nullptr) ranks_->fail(why);
    stages_->fail(why);
  };
  try {
    run_all(step);
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  } catch (...) {
    give_up("it was interrupted");
    throw;
  }
}

void Forward::run_all(const StepTokens& step) {
  profile_.start();
  prepare(step);
  profile_.mark(Work::prepare);
  const uint64_t what = stages_ == nullptr ? 0 : signature(step);
  const auto tokens = static_cast<int64_t>(step.tokens.size());
  if (stages_ != nullptr && !stages_->is_first()) {
    stages_->take(what, tokens);
    profile_.mark(Work::ranks);
  }
  team_.run([&](int thread) {
    StepThread step_thread(*this, step, thread);
    step_thread.run();
    if (thread > 0) return;  // the barriers of the run come after all threads have read them
    turn_ = step_thread.turn();
    calls_ = step_thread.calls();
  });
  if (weights_.experts != nullptr && !failure_) failure_ = weights_.experts->take_failure();
  if (failure_) {
    const std::exception_ptr failure = failure_;
    failure_ = nullptr;
    std::rethrow_exception(failure);
  }
  if (stages_ != nullptr && !stages_->is_last()) {
    stages_->pass_on(what, tokens);
    profile_.mark(Work::ranks);
  }
}

void Forward::share_rows(const StepTokens& step) {
  stages_->share(step.logits, step.wanted.size() * static_cast<size_t>(step.logits_stride) * sizeof(float));
  stages_->share(step.hidden, step.hidden_wanted.size() * static_cast<size_t>(spec_.hidden) * sizeof(float));
}

uint64_t Forward::shared(uint64_t value) {
  if (ranks_ != nullptr) {
    const unsigned turn = turn_++;
    ranks_->signature(spec_.rank, turn) = value;
    ranks_->exchange(turn, {});
    value = ranks_->signature(0, turn);
  }
  if (stages_ != nullptr) stages_->share(&value, sizeof value, true);
  return value;
}

StepThread::StepThread(Forward& forward, const StepTokens& step, int thread)
    : forward_(forward),
      spec_(forward.spec_),
      weights_(forward.weights_),
      step_(step),
      shared_(forward.workspace_),
      own_(shared_.own[static_cast<size_t>(thread)]),
      thread_(thread),
      threads_(forward.team_.size()),
      tokens_(static_cast<int64_t>(step.tokens.size())),
      small_(tokens_ <= kGemvTokens && !step.prompt),
      mine_(small_ ? Range{0, tokens_} : part_of(tokens_, thread, threads_)),
      hidden_stride_(padded_stride(spec_.hidden)),
      features_stride_(padded_stride(forward.widths_.features)),
      qkv_stride_(padded_stride(forward.widths_.qkv)),
      residual_(small_ ? own_.residual.get() : shared_.residual.get()),
      x_(small_ ? own_.x.get() : shared_.x.get()),
      calls_(forward.calls_),
      turn_(forward.turn_) {}

void StepThread::run() noexcept {
  if (spec_.is_first_stage())
    embed();
  else
    take_residual();
  if (spec_.streams > 1) open_streams();
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    if (spec_.streams > 1) predict_streams(i);
    layer(i);
    finish_layer(i);
    give_features(static_cast<int>(i) + 1);
  }
  if (spec_.streams > 1) close_streams();
  if (!spec_.is_last_stage()) return pass_residual();
  give_features(-1);
  if (!step_.wanted.empty() || !step_.hidden_wanted.empty()) head();
}

// The residual gets what is pending, as the next norm would have added it: what follows has the same bits.
void StepThread::give_features(int tap) noexcept {
  if (step_.features_wanted.empty() || std::find(step_.taps.begin(), step_.taps.end(), tap) == step_.taps.end()) return;
  advance(Norm{}, false);
  if (small_ && thread_ > 0) return;  // every thread has them all
  const auto width = static_cast<int64_t>(step_.taps.size()) * spec_.hidden;
  const Norm& last = tap < 0 ? weights_.final_norm : Norm{};
  for (size_t i = 0; i < step_.features_wanted.size(); ++i) {
    const int64_t t = step_.features_wanted[i];
    if (t < mine_.begin || t >= mine_.end) continue;
    for (size_t place = 0; place < step_.taps.size(); ++place) {
      if (step_.taps[place] != tap) continue;
      float* out = step_.features + static_cast<int64_t>(i) * width + static_cast<int64_t>(place) * spec_.hidden;
      norm(last, residual_ + t * hidden_stride_, spec_.hidden, out);
    }
  }
  mark(Work::norm);
}

void StepThread::take_residual() noexcept {
  const float* from = forward_.stages_->in();
  for (int64_t t = mine_.begin; t < mine_.end; ++t)
    std::memcpy(residual_ + t * hidden_stride_, from + t * spec_.hidden,
                static_cast<size_t>(spec_.hidden) * sizeof(float));
  mark(Work::embed);
}

void StepThread::pass_residual() noexcept {
  if (small_ && thread_ > 0) return;  // every thread has them all
  float* to = forward_.stages_->out();
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    advance(t, Norm{}, x_ + t * hidden_stride_);
    std::memcpy(to + t * spec_.hidden, residual_ + t * hidden_stride_,
                static_cast<size_t>(spec_.hidden) * sizeof(float));
  }
  mark(Work::norm);
}

void StepThread::embed() noexcept {
  const int64_t first = spec_.vocab_first, count = spec_.own_vocab();
  const bool divided = forward_.ranks_ != nullptr;
  float* to = divided ? delta(0) : residual_;
  if (!divided || !small_ || thread_ == 0) {
    for (int64_t t = mine_.begin; t < mine_.end; ++t) {
      const int64_t row = step_.tokens[static_cast<size_t>(t)] - first;
      if (row >= 0 && row < count) weights_.embed.row(row, to + t * hidden_stride_);
    }
  }
  if (divided) {
    const ParallelRanks& ranks = *forward_.ranks_;
    if (thread_ == 0) forward_.ranks_->signature(spec_.rank, turn_) = signature(step_);
    exchange(Work::embed, {tokens_ * hidden_stride_, 0});
    if (thread_ == 0) check_signatures();
    const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
    for (int64_t t = mine_.begin; t < mine_.end; ++t) {
      const int owner = ranks.owner_of_token(step_.tokens[static_cast<size_t>(t)]);
      std::memcpy(residual_ + t * hidden_stride_, ranks.slot(owner, pending_turn_) + t * hidden_stride_, bytes);
    }
  }
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* row = residual_ + t * hidden_stride_;
    if (spec_.embedding_scale != 1.0f) scale(row, spec_.embedding_scale, spec_.hidden);
    if (spec_.positions > 0) {
      float* position = own_.row.get();
      weights_.positions.row(forward_.positions_[static_cast<size_t>(t)] + spec_.position_offset, position);
      add(row, position, 1.0f, spec_.hidden);
    }
    if (spec_.token_types > 0) {
      float* type = own_.row.get();
      weights_.token_types.row(step_.types.empty() ? 0 : step_.types[static_cast<size_t>(t)], type);
      add(row, type, 1.0f, spec_.hidden);
    }
    norm(weights_.embed_norm, row, spec_.hidden, row);
    if (forward_.widths_.side_blocks)
      std::memcpy(embedded() + t * hidden_stride_, row, static_cast<size_t>(spec_.hidden) * sizeof(float));
  }
  mark(Work::embed);
  if (spec_.layer_inputs) embed_for_layers(*spec_.layer_inputs);
  if (spec_.hidden_inputs) fuse(*spec_.hidden_inputs);
}

// The residual of a head that drafts: see HiddenInputs in spec/decoder.py. Ranks have all of it.
void StepThread::fuse(const HiddenInputsSpec& spec) noexcept {
  const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
  const int64_t stride = padded_stride(forward_.widths_.fused), width = spec.width, beside = spec.beside(spec_.hidden);
  float* both = small_ ? own_.fused.get() : shared_.fused.get();
  float* out = shared_.delta[0].get();
  if (spec.reduced) {
    fresh();
    const Input& in = input(weights_.reduce.w.shape(), step_.inputs.data(), width, tokens_);
    multiply_into(weights_.reduce, in, out, hidden_stride_);
    barrier(Work::embed);
  }
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* residual = residual_ + t * hidden_stride_;
    float* row = both + t * stride;
    const float* hidden = step_.inputs.data() + t * width;
    if (spec.reduced && !step_.own_inputs[static_cast<size_t>(t)]) hidden = out + t * hidden_stride_;
    float* normed = row + (spec.hidden_first ? 0 : spec_.hidden);
    norm(weights_.fuse_embed_norm, residual, spec_.hidden, row + (spec.hidden_first ? beside : 0));
    norm(weights_.fuse_hidden_norm, hidden, beside, normed);
    if (!spec.fused) std::memcpy(residual, spec.normed_residual ? normed : hidden, bytes);
  }
  fresh();
  if (spec.fused) {
    const Input& in = input(weights_.fuse.w.shape(), both, stride, tokens_);
    if (spec.reduced) barrier(Work::embed);  // all have read what the first product gave
    multiply_into(weights_.fuse, in, out, hidden_stride_);
    barrier(Work::embed);
    for (int64_t t = mine_.begin; t < mine_.end; ++t)
      std::memcpy(residual_ + t * hidden_stride_, out + t * hidden_stride_, bytes);
    fresh();
  }
  barrier(Work::embed);
}

// What all layers get of the tokens beside the residual: see LayerInputs in spec/decoder.py.
void StepThread::embed_for_layers(const LayerInputsSpec& spec) noexcept {
  const int64_t width = forward_.widths_.layer_inputs, stride = padded_stride(width);
  float* out = shared_.layer_inputs.get();
  const Matrix& projection = weights_.layer_projection.w;
  fresh();
  multiply_into(weights_.layer_projection, input(projection.shape(), residual_, hidden_stride_, tokens_), out, stride);
  barrier(Work::embed);
  const Range own = part_of(tokens_, thread_, threads_);
  float* table = own_.row.get();
  for (int64_t t = own.begin; t < own.end; ++t) {
    float* row = out + t * stride;
    const int64_t token = step_.tokens[static_cast<size_t>(t)];
    weights_.layer_embed.row(token < spec.vocab ? token : 0, table);
    scale(row, spec.projection_scale, width);
    norm_heads(weights_.layer_projection_norm, row, spec.layers, spec.features, false);
    add(row, table, spec.embed_scale, width);
    scale(row, spec.scale, width);
  }
  barrier(Work::embed);
}

// The end of a layer, whose residual has all deltas then: see InputGate and Layer.scaled in spec/decoder.py.
void StepThread::finish_layer(size_t index) noexcept {
  const LayerSpec& spec = spec_.layers[index];
  const LayerWeights& weights = weights_.layers[index];
  if (!spec.input_gate && !spec.scaled && !spec.streams) return;
  advance(Norm{}, false);
  if (spec.streams) correct_streams(index);
  if (spec.input_gate) {
    const int64_t features = spec.input_gate->mlp.features, stride = padded_stride(forward_.widths_.layer_inputs);
    float* gate = shared_.gate.get();
    const Shape& shape = weights.input_gate.w.shape();
    multiply_into(weights.input_gate, input(shape, x_, hidden_stride_, tokens_), gate, features_stride_);
    if (!small_) barrier(Work::gate_up);
    const Range tokens = small_ ? Range{0, tokens_} : mine_;
    const Range part = small_ ? rows_of(shape) : Range{0, features};
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      float* at = gate + t * features_stride_ + part.begin;
      const float* of_token =
          shared_.layer_inputs.get() + t * stride + static_cast<int64_t>(index) * features + part.begin;
      activate(spec.input_gate->mlp.activation, at, of_token, part.end - part.begin, at);
    }
    if (small_) barrier(Work::activate);
    // Ranks have all of it: nothing is exchanged.
    float* out = shared_.delta[0].get();
    fresh();
    const Input& in = input(weights.input_down.w.shape(), gate, features_stride_, tokens_);
    multiply_into(weights.input_down, in, out, hidden_stride_);
    barrier(Work::down);
    for (int64_t t = mine_.begin; t < mine_.end; ++t) {
      float* row = own_.row.get();
      norm(weights.input_norm, out + t * hidden_stride_, spec_.hidden, row);
      if (spec.streams)
        for (int which = 1; which < spec_.streams; ++which) add(stream_of(t, which), row, 1.0f, spec_.hidden);
      else
        add(residual_ + t * hidden_stride_, row, 1.0f, spec_.hidden);
    }
  }
  if (spec.scaled)
    for (int64_t t = mine_.begin; t < mine_.end; ++t)
      scale(residual_ + t * hidden_stride_, *weights.layer_scale, spec_.hidden);
  mark(Work::norm);
}

void StepThread::put_sums(const float* x, int64_t count, double share, float* out) noexcept {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(x[i]);
    squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  out[0] = static_cast<float>(sum * share);
  out[1] = static_cast<float>(squares * share);
  out[2] = static_cast<float>(static_cast<double>(count) * share);
}

void StepThread::norm_of_ranks(const Norm& n, int64_t place, const float* x, int64_t count, float* out) const noexcept {
  double sum = 0, squares = 0, total = 0;
  for (int rank = 0; rank < forward_.ranks_->size(); ++rank) {
    const float* from = forward_.ranks_->slot(rank, pending_turn_) + place * kSums;
    sum += static_cast<double>(from[0]);
    squares += static_cast<double>(from[1]);
    total += static_cast<double>(from[2]);
  }
  const double mean = n.kind == NormKind::layer ? sum / total : 0.0;
  const double factor = 1.0 / std::sqrt(squares / total - mean * mean + static_cast<double>(n.eps));
  for (int64_t i = 0; i < count; ++i) {
    const auto normed = static_cast<float>((static_cast<double>(x[i]) - mean) * factor);
    out[i] = normed * (n.weight == nullptr ? 1.0f : n.weight[i]) + (n.bias == nullptr ? 0.0f : n.bias[i]);
  }
}

const float* StepThread::norm_rows(const Norm& n, float* x, int64_t stride, int64_t count) noexcept {
  float* out = small_ ? own_.normed.get() : x;
  if (forward_.ranks_ != nullptr) {
    float* sums = forward_.ranks_->slot(spec_.rank, turn_);
    const Range part = part_of(tokens_, thread_, threads_);
    for (int64_t t = part.begin; t < part.end; ++t) put_sums(x + t * stride, count, 1.0, sums + t * kSums);
    exchange(Work::norm, {kSums * tokens_, 0});
  }
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    if (forward_.ranks_ != nullptr)
      norm_of_ranks(n, t, x + t * stride, count, out + t * stride);
    else
      norm(n, x + t * stride, count, out + t * stride);
  }
  mark(Work::norm);
  return out;
}

// Ranks that were asked for different things would wait for each other in vain, or compute nonsense.
void StepThread::check_signatures() noexcept {
  const ParallelRanks& ranks = *forward_.ranks_;
  for (int rank = 0; rank < ranks.size() && !forward_.failure_; ++rank) {
    if (ranks.signature(rank, pending_turn_) == ranks.signature(spec_.rank, pending_turn_)) continue;
    forward_.failure_ = std::make_exception_ptr(comm::CommError(
        comm::CommError::Kind::broken, "ranks disagree: rank " + std::to_string(rank) +
                                           " processes other tokens than rank " + std::to_string(spec_.rank)));
  }
}

void StepThread::layer(size_t index) noexcept {
  const LayerSpec& spec = spec_.layers[index];
  const LayerWeights& weights = weights_.layers[index];
  const float scale = spec.residual_scale;
  if (spec.side_block) return side_block(index);
  if (spec.parallel) {
    advance(weights.attn_norm, spec.residual_from_norm);
    attention(index);  // computes the MLP too, which reads the same input
    exchange(Work::down, {2 * tokens_ * hidden_stride_, 0});
    pend(2, Norm{}, scale);
    return;
  }
  if (spec.attention || spec.is_recurrent()) {
    advance(weights.attn_norm, spec.residual_from_norm);
    const int64_t laurel_stride = padded_stride(forward_.widths_.laurel);
    if (spec.laurel) {
      const Input& in = input(weights.laurel_down.w.shape(), x_, hidden_stride_, tokens_);
      multiply_into(weights.laurel_down, in, shared_.laurel.get(), laurel_stride);
    }
    const int deltas = mix(index);
    if (spec.laurel) {
      fresh();
      const Input& in = input(weights.laurel_up.w.shape(), shared_.laurel.get(), laurel_stride, tokens_);
      multiply_into(weights.laurel_up, in, shared_.side.get(), hidden_stride_);
    }
    exchange(Work::out, {deltas * tokens_ * hidden_stride_, 0});
    pend(deltas, weights.attn_post_norm, scale);
    if (spec.laurel) add_laurel(spec, weights);
  }
  if (!spec.has_mlp()) return;
  advance(weights.mlp_norm, spec.residual_from_norm);
  if (spec.moe)
    experts(index, delta(0));
  else
    mlp(weights.mlp, 0, false);
  if (spec.moe && spec.moe->post_norm) {
    exchange(Work::down, {2 * tokens_ * hidden_stride_, 0});
    add_normed(weights, scale);
    return;
  }
  exchange(Work::down, {tokens_ * hidden_stride_, 0});
  pend(1, weights.mlp_post_norm, scale);
}

// See SideBlock in spec/decoder.py.
void StepThread::side_block(size_t index) noexcept {
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.fused), n = spec_.hidden;
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  float* const both = small_ ? own_.fused.get() : shared_.fused.get();
  advance(Norm{}, false);
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* const row = both + t * stride;
    std::memcpy(row, residual_ + t * hidden_stride_, bytes);
    std::memcpy(row + n, embedded() + t * hidden_stride_, bytes);
    norm(weights.attn_norm, row, 2 * n, row);
  }
  // What ranks have made of x, each a part of it, together.
  const auto take = [&](Work kind, const Norm& of) {
    exchange(kind, {tokens_ * hidden_stride_, 0});
    pend(1, of, 1.0f);
    for (int64_t t = mine_.begin; t < mine_.end; ++t) std::memcpy(x_ + t * hidden_stride_, normed_pending(t), bytes);
    pending_ = 0;
    fresh();
  };
  attention(index);
  take(Work::out, weights.mlp_norm);
  mlp(weights.mlp, 0, false);
  take(Work::down, Norm{});
  float* const side = shared_.side.get();
  multiply_into(weights.side, input(weights.side.w.shape(), x_, hidden_stride_, tokens_), side, hidden_stride_);
  barrier(Work::down);
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* const row = side + t * hidden_stride_;
    float* const x = x_ + t * hidden_stride_;
    std::memcpy(x, residual_ + t * hidden_stride_, bytes);
    add(x, row, 1.0f, n);
    norm(weights.side_norm, x, n, x);
  }
  fresh();
  recurrent(index, 0);
  exchange(Work::out, {tokens_ * hidden_stride_, 0});
  pend(1, Norm{}, 1.0f);
}

void StepThread::add_normed(const LayerWeights& weights, float scale) noexcept {
  const int64_t n = spec_.hidden;
  const int ranks = forward_.ranks_ == nullptr ? 1 : forward_.ranks_->size();
  float* sum = own_.row.get();
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* both = x_ + t * hidden_stride_;  // which the next norm writes anew
    for (const int which : {0, 1}) {
      for (int rank = 0; rank < ranks; ++rank) {
        const float* from = forward_.ranks_ == nullptr
                                ? shared_.delta[which].get() + t * hidden_stride_
                                : forward_.ranks_->slot(rank, pending_turn_) + (which * tokens_ + t) * hidden_stride_;
        if (rank == 0)
          std::memcpy(sum, from, static_cast<size_t>(n) * sizeof(float));
        else
          add(sum, from, 1.0f, n);
      }
      norm(which == 0 ? weights.experts_post_norm : weights.shared_post_norm, sum, n, sum);
      if (which == 0)
        std::memcpy(both, sum, static_cast<size_t>(n) * sizeof(float));
      else
        add(both, sum, 1.0f, n);
    }
    norm(weights.mlp_post_norm, both, n, both);
    add(residual_ + t * hidden_stride_, both, scale, n);
  }
  mark(Work::norm);
}

// The recurrent one first: ranks may exchange something within it, and attention's delta is in the slot of the next
// exchange.
int StepThread::mix(size_t index) noexcept {
  const LayerSpec& spec = spec_.layers[index];
  const int deltas = spec.attention && spec.is_recurrent() ? 2 : 1;
  recurrent(index, deltas - 1);
  if (deltas == 2) {
    mark(Work::out);
    fresh();
  }
  if (spec.attention) attention(index);
  return deltas;
}

void StepThread::recurrent(size_t index, int which) noexcept {
  const LayerSpec& spec = spec_.layers[index];
  if (spec.short_conv) short_conv(index, which);
  if (spec.linear_attention) linear_attention(index, which);
  if (spec.scan) selective_scan(index, which);
  if (spec.lru) gated_lru(index, which);
}

const Input& StepThread::input(const Shape& shape, const float* x, int64_t stride, int64_t tokens, const int32_t* rows,
                               bool of_head) noexcept {
  Inputs& inputs = small_ ? own_.inputs : shared_.inputs;
  const size_t index = inputs.index(shape);
  Input& input = inputs.at(index);
  if (stamps_[index] == stamp_) return input;
  stamps_[index] = stamp_;
  if (small_) {
    input.prepare(shape, x, stride, rows, static_cast<int>(tokens), 0, 1);
    mark(Work::norm);
    return input;
  }
  barrier(Work::norm);  // all of x is written, and no thread reads the input that is overwritten any more
  input.prepare(shape, x, stride, rows, static_cast<int>(tokens), thread_, threads_, step_.prompt && !of_head);
  barrier(Work::norm);
  return input;
}

void StepThread::multiply_into(const LinearWeights& linear, const Input& input, float* out, int64_t stride) noexcept {
  // In small steps threads may come to experts in different orders, and some use their own rows at once.
  const Sharing sharing{small_ ? nullptr : &forward_.items_, calls_++};
  multiply(linear.w, input, Output{out, stride, linear.bias}, thread_, threads_, sharing);
}

Range StepThread::rows_of(const Shape& shape) const noexcept {
  const Blocks blocks = blocks_of(shape, thread_, threads_);
  return {std::min(blocks.begin * kBlockRows, shape.rows), std::min(blocks.end * kBlockRows, shape.rows)};
}

}  // namespace anyaccel::llm
