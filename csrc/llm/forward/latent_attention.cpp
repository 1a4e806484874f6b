// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (DeepSeek-V2, 2024). The cache has a token's latent and the rotated part of its keys,
// once for all heads.
//
// Few tokens: queries are brought to the latents (the product with a head's keys' weights, transposed), attention sees
// latents as keys and values, and its results are brought to the heads' values. Each byte of the cache is read once for
// all heads.
// A long query: keys and values of all heads are made of the latents of its context, which takes a third of the
// multiplications. Each thread makes those of its own heads.
//
// With an indexer, a token whose context is longer than `top_k` sees what it has chosen: few tokens each see a copy of
// their own, made of the cache; of a long query, whose tokens choose differently, the others are hidden.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "llm/forward/step_thread.h"

namespace anyaccel::llm {

void StepThread::project_latent(const AttentionSpec& spec, const LayerWeights& weights) noexcept {
  const MlaSpec& mla = *spec.mla;
  const int64_t stride = padded_stride(forward_.widths_.latent);
  float* q_latent = shared_.latent.get();
  const bool latent_queries = mla.q_rank > 0;
  if (latent_queries)
    multiply_into(weights.q_a, input(weights.q_a.w.shape(), x_, hidden_stride_, tokens_), q_latent, stride);
  else
    multiply_into(weights.q_b, input(weights.q_b.w.shape(), x_, hidden_stride_, tokens_), shared_.qkv.get(),
                  qkv_stride_);
  multiply_into(weights.kv_a, input(weights.kv_a.w.shape(), x_, hidden_stride_, tokens_), shared_.second_latent.get(),
                stride);
  if (!latent_queries) return;
  const bool chooses = spec.indexer && spec.indexer->own;
  if (chooses) {
    const Input& in = input(weights.index_k.w.shape(), x_, hidden_stride_, tokens_);
    multiply_into(weights.index_k, in, shared_.index_key.get(), padded_stride(forward_.widths_.index_key));
    const Input& of_weights = input(weights.index_weights.w.shape(), x_, hidden_stride_, tokens_);
    multiply_into(weights.index_weights, of_weights, shared_.index_weights.get(),
                  padded_stride(forward_.widths_.index_weights));
  }
  barrier(Work::qkv);
  // In small steps every thread norms all latents for itself.
  float* normed = small_ ? own_.latent.get() : q_latent;
  for (int64_t t = mine_.begin; t < mine_.end; ++t)
    norm(weights.q_a_norm, q_latent + t * stride, mla.q_rank, normed + t * stride);
  fresh();
  multiply_into(weights.q_b, input(weights.q_b.w.shape(), normed, stride, tokens_), shared_.qkv.get(), qkv_stride_);
  if (!chooses) return;
  const Input& in = input(weights.index_q.w.shape(), normed, stride, tokens_);
  multiply_into(weights.index_q, in, shared_.index_q.get(), padded_stride(forward_.widths_.index_q));
}

// Turns queries, and makes the cache's keys: normed latents with the part of a key that all heads share, turned.
void StepThread::rotate_latent(const AttentionSpec& spec, const LayerWeights& weights) noexcept {
  const MlaSpec& mla = *spec.mla;
  const int64_t latent_stride = padded_stride(forward_.widths_.latent),
                keys_stride = padded_stride(forward_.widths_.keys);
  const RopeSpec* rope_spec = spec.rope < 0 ? nullptr : &spec_.ropes[static_cast<size_t>(spec.rope)];
  const int half = rope_spec == nullptr ? 0 : static_cast<int>(rope_spec->inv_freq.size());
  const auto rotation = [&](int64_t t) -> const Rotation& {
    return forward_.rotations_[static_cast<size_t>(spec.rope)][static_cast<size_t>(t)];
  };
  const Range tokens = part_of(tokens_, thread_, threads_);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* latent = shared_.second_latent.get() + t * latent_stride;
    float* key = shared_.keys.get() + t * keys_stride;
    norm(weights.kv_a_norm, latent, mla.kv_rank, key);
    float* rotated = key + mla.kv_rank;
    std::memcpy(rotated, latent + mla.kv_rank, static_cast<size_t>(mla.rope_dim) * sizeof(float));
    if (rope_spec != nullptr)
      rope(rotated + std::max(rope_spec->first - mla.nope_dim, 0), 1, mla.rope_dim, rotation(t).cosine,
           rotation(t).sine, half, rope_spec->interleaved);
  }
  const Range items = part_of(tokens_ * spec.heads, thread_, threads_);
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t t = item / spec.heads, head = item % spec.heads;
    float* q = shared_.qkv.get() + t * qkv_stride_ + head * spec.head_dim;
    if (rope_spec != nullptr)
      rope(q + rope_spec->first, 1, spec.head_dim, rotation(t).cosine, rotation(t).sine, half, rope_spec->interleaved);
    if (spec.growth != 0) scale(q, growth_at(spec, forward_.positions_[static_cast<size_t>(t)]), spec.head_dim);
  }
}

void StepThread::attend_queries(const AttentionStep& step) noexcept {
  attend(step, forward_.scratch_, thread_, threads_);
  barrier(Work::attend);
  if (!needs_combine(step, threads_)) return;
  combine(step, forward_.scratch_, thread_, threads_);
  barrier(Work::attend);
}

void StepThread::rotate_index(const IndexerSpec& spec, const LayerWeights& weights) noexcept {
  const int64_t q_stride = padded_stride(forward_.widths_.index_q),
                key_stride = padded_stride(forward_.widths_.index_key);
  const Range tokens = part_of(tokens_, thread_, threads_);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    float* key = shared_.index_key.get() + t * key_stride;
    norm(weights.index_norm, key, spec.head_dim, key);
    if (spec.rope < 0) continue;
    const RopeSpec& of = spec_.ropes[static_cast<size_t>(spec.rope)];
    const Rotation& rotation = forward_.rotations_[static_cast<size_t>(spec.rope)][static_cast<size_t>(t)];
    const int half = static_cast<int>(of.inv_freq.size());
    rope(key + of.first, 1, spec.head_dim, rotation.cosine, rotation.sine, half, of.interleaved);
    rope(shared_.index_q.get() + t * q_stride + of.first, spec.heads, spec.head_dim, rotation.cosine, rotation.sine,
         half, of.interleaved);
  }
}

void StepThread::append_index(size_t index, AttentionStep step) noexcept {
  step.layer = forward_.index_layers_[index];
  step.k = step.v = shared_.index_key.get();
  step.k_stride = step.v_stride = padded_stride(forward_.widths_.index_key);
  append(step, thread_, threads_);
}

void StepThread::choose_tokens(size_t index) noexcept {
  Chosen& chosen = forward_.chosen_;
  const auto choosers = static_cast<int64_t>(chosen.choosers().size());
  for (int64_t first = 0; first < choosers; first += chosen.together()) {
    const int64_t count = std::min(chosen.together(), choosers - first);
    chosen.score(forward_.cache_, forward_.index_layers_[index], first, count, shared_.index_q.get(),
                 padded_stride(forward_.widths_.index_q), shared_.index_weights.get(),
                 padded_stride(forward_.widths_.index_weights), thread_, threads_);
    barrier(Work::attend);
    chosen.choose(first, count, thread_, threads_);
    barrier(Work::attend);
  }
}

void StepThread::attend_latents(const AttentionSpec& spec, const LayerWeights& weights, const AttentionStep& step,
                                const LatentRun& run) noexcept {
  const MlaSpec& mla = *spec.mla;
  const int64_t width = int64_t{mla.kv_rank} + mla.rope_dim;
  const int64_t q_stride = padded_stride(forward_.widths_.absorbed),
                out_stride = padded_stride(forward_.widths_.latent_out);
  float* absorbed = shared_.absorbed.get();
  float* latent_out = shared_.latent_out.get();
  const float* q = shared_.qkv.get() + run.row * qkv_stride_;
  multiply_heads(spec.heads, run.tokens, q, qkv_stride_, spec.head_dim, absorbed, q_stride, width,
                 [&](size_t head) -> const Matrix& { return weights.latent_heads[head].absorb; });
  const Range items = part_of(run.tokens * spec.heads, thread_, threads_);
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t t = item / spec.heads, head = item % spec.heads;
    std::memcpy(absorbed + t * q_stride + head * width + mla.kv_rank,
                q + t * qkv_stride_ + head * spec.head_dim + mla.nope_dim,
                static_cast<size_t>(mla.rope_dim) * sizeof(float));
  }
  barrier(Work::heads);
  AttentionStep own = step;
  own.queries = &run.queries;
  own.k = nullptr;  // it is in the cache
  own.q = absorbed;
  own.q_stride = q_stride;
  own.out = latent_out;
  own.out_stride = out_stride;
  if (!run.queries.empty()) attend_queries(own);
  for (const std::vector<Query>& queries : run.choosing) {
    const auto count = static_cast<int64_t>(queries.size());
    forward_.chosen_.copy(*step.cache, step.layer, queries.data(), count, run.row, thread_, threads_);
    barrier(Work::attend);
    own.queries = &queries;
    attend_queries(own);
  }
  multiply_heads(spec.heads, run.tokens, latent_out, out_stride, mla.kv_rank, step.out + run.row * step.out_stride,
                 step.out_stride, spec.value_dim,
                 [&](size_t head) -> const Matrix& { return weights.latent_heads[head].values; });
}

void StepThread::attend_expanded(const AttentionSpec& spec, const LayerWeights& weights, const AttentionStep& step,
                                 const Query& query) noexcept {
  const MlaSpec& mla = *spec.mla;
  const int64_t tile_stride = padded_stride(int64_t{mla.kv_rank} + mla.rope_dim);
  const int64_t stride = padded_stride(int64_t{spec.head_dim} + spec.value_dim), length = query.position + query.tokens;
  float* tile = shared_.latent_tile.get();
  float* rows = own_.expanded_rows.get();
  ExpandedKeys& expanded = forward_.expanded_[static_cast<size_t>(thread_)];
  Input& in = forward_.latent_inputs_.at(forward_.latent_inputs_.index(weights.latent_heads[0].keys.shape()));
  const int each = forward_.expanded_heads_;
  for (int first_head = 0; first_head < spec.heads; first_head += each * threads_) {
    const int begin = std::min(first_head + thread_ * each, spec.heads), end = std::min(begin + each, spec.heads);
    for (int64_t first = 0; first < length; first += kLatentTile) {
      const int64_t count = std::min(kLatentTile, length - first);
      const Range own = part_of(count, thread_, threads_);
      read_keys(*step.cache, step.layer, query.sequence, first + own.begin, own.end - own.begin,
                tile + own.begin * tile_stride, tile_stride);
      barrier(Work::append);
      in.prepare(weights.latent_heads[0].keys.shape(), tile, tile_stride, nullptr, static_cast<int>(count), thread_,
                 threads_, true);
      barrier(Work::append);
      for (int head = begin; head < end; ++head) {
        const LatentHead& of = weights.latent_heads[static_cast<size_t>(head)];
        multiply(of.keys, in, Output{rows, stride}, 0, 1);
        multiply(of.values, in, Output{rows + spec.head_dim, stride}, 0, 1);
        for (int64_t t = 0; t < count; ++t)
          std::memcpy(rows + t * stride + mla.nope_dim, tile + t * tile_stride + mla.kv_rank,
                      static_cast<size_t>(mla.rope_dim) * sizeof(float));
        expanded.append(head - begin, first, static_cast<int>(count), rows, rows + spec.head_dim, stride);
      }
      barrier(Work::append);  // the tile and the input are read by all
    }
    for (int head = begin; head < end; ++head) {
      AttentionOptions options = step.options;
      if (options.sinks != nullptr) options.sinks += head;
      if (spec.indexer && length > spec.indexer->top_k) {
        options.seen = forward_.chosen_.seen(query.row);
        options.seen_stride = forward_.chosen_.stride();
      }
      expanded.attend(head - begin, options, query,
                      shared_.qkv.get() + query.row * qkv_stride_ + static_cast<int64_t>(head) * spec.head_dim,
                      qkv_stride_, step.out + query.row * step.out_stride + static_cast<int64_t>(head) * spec.value_dim,
                      step.out_stride);
    }
  }
}

void StepThread::attend_latent(size_t index, AttentionStep& step) noexcept {
  const AttentionSpec& spec = *spec_.layers[index].attention;
  const LayerWeights& weights = weights_.layers[index];
  const bool chooses = spec.indexer && spec.indexer->own;
  rotate_latent(spec, weights);
  if (chooses) rotate_index(*spec.indexer, weights);
  barrier(Work::heads);
  step.queries = &forward_.latent_queries_;
  step.k = step.v = shared_.keys.get();
  step.k_stride = step.v_stride = padded_stride(forward_.widths_.keys);
  append(step, thread_, threads_);
  if (chooses) append_index(index, step);
  barrier(Work::append);
  if (chooses) choose_tokens(index);
  for (const LatentRun& run : forward_.latent_runs_) {
    attend_latents(spec, weights, step, run);
    barrier(Work::attend);
  }
  for (const Query& query : forward_.long_queries_) attend_expanded(spec, weights, step, query);
  if (!forward_.long_queries_.empty()) barrier(Work::attend);
}

}  // namespace anyaccel::llm
