// SPDX-License-Identifier: Apache-2.0
#include "llm/forward.h"

#include <algorithm>
#include <cstring>

#include "comm/errors.h"
#include "common/hash.h"
#include "llm/worker.h"

namespace anyaccel::llm {
namespace {

// Activations of a run, all threads together: the more tokens, the less often weights are read; but they should not
// be large beside the weights, nor far beyond the last cache.
constexpr int64_t kRunFloats = int64_t{16} << 20;
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
  if (spec.size > 1)  // by what is the same on every rank: all must divide a call into the same runs
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
      most_tokens_(tokens_of_a_run(spec, widths_)) {
  add_shape(shapes_, weights.head.w);
  for (const LayerWeights& layer : weights.layers) {
    for (const LinearWeights* linear :
         {&layer.qkv, &layer.o, &layer.q_a, &layer.q_b, &layer.kv_a, &layer.kv_b, &layer.router, &layer.shared_gate})
      add_shape(shapes_, linear->w);
    const auto add_mlp = [&](const MlpWeights& mlp) {
      add_shape(shapes_, mlp.gate.w);
      add_shape(shapes_, mlp.down.w);
    };
    add_mlp(layer.mlp);
    add_mlp(layer.shared);
    for (const MlpWeights& expert : layer.experts) add_mlp(expert);
  }
  for (const RopeSpec& rope : spec.ropes) ropes_.emplace_back(rope);
  rotations_.resize(spec.ropes.size());
}

size_t Forward::slot_floats() const {
  const int64_t of_tokens = 2 * most_tokens_ * padded_stride(spec_.hidden);
  const int64_t of_vocabulary = (spec_.vocab / spec_.size + 256) * 2;
  return static_cast<size_t>(std::max(of_tokens, of_vocabulary));
}

void Forward::run(const StepTokens& step) {
  profile_.start();
  const auto tokens = static_cast<int64_t>(step.tokens.size());
  const int64_t room =
      tokens <= kGemvTokens && !step.prompt ? tokens : std::min((tokens + 127) / 128 * 128, most_tokens_);
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
  AttentionShape last{};
  for (const LayerSpec& layer : spec_.layers) {
    const AttentionSpec& a = layer.attention;
    const AttentionShape shape{a.heads, a.kv_heads, a.head_dim, a.value_dim};
    if (!(shape == last)) scratch_.reserve(shape, step.queries, team_.size());
    last = shape;
  }
  profile_.mark(Work::prepare);
  team_.run([&](int thread) {
    Worker worker(*this, step, thread);
    worker.run();
    if (thread == 0) turn_ = worker.turn();  // the barriers of the run come after all threads have read it
  });
  if (failure_) {
    const std::exception_ptr failure = failure_;
    failure_ = nullptr;
    std::rethrow_exception(failure);
  }
}

uint64_t Forward::shared(uint64_t value) {
  if (ranks_ == nullptr) return value;
  const unsigned turn = turn_++;
  ranks_->signature(spec_.rank, turn) = value;
  ranks_->exchange(turn, {});
  return ranks_->signature(0, turn);
}

Worker::Worker(Forward& forward, const StepTokens& step, int thread)
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
      turn_(forward.turn_) {}

void Worker::run() noexcept {
  embed();
  for (size_t i = 0; i < spec_.layers.size(); ++i) layer(i);
  if (!step_.wanted.empty() || !step_.hidden_wanted.empty()) head();
}

void Worker::embed() noexcept {
  const int64_t first = spec_.vocab_first, count = spec_.own_vocab();
  const bool divided = forward_.ranks_ != nullptr;
  float* to = divided ? delta(0) : residual_;
  if (!divided || !small_ || thread_ == 0) {
    for (int64_t t = mine_.begin; t < mine_.end; ++t) {
      const int64_t row = step_.tokens[static_cast<size_t>(t)] - first;
      float* out = to + t * hidden_stride_;
      if (row >= 0 && row < count)
        weights_.embed.row(row, out);
      else
        std::memset(out, 0, static_cast<size_t>(spec_.hidden) * sizeof(float));
    }
  }
  if (divided) {
    if (thread_ == 0) forward_.ranks_->signature(spec_.rank, turn_) = signature(step_);
    exchange(Work::embed, {tokens_ * hidden_stride_, 0});
    if (thread_ == 0) check_signatures();
    const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
    for (int64_t t = mine_.begin; t < mine_.end; ++t) std::memset(residual_ + t * hidden_stride_, 0, bytes);
    pend(1, Norm{}, 1.0f);
    for (int64_t t = mine_.begin; t < mine_.end; ++t) advance(t, Norm{}, x_ + t * hidden_stride_);
    pending_ = 0;
  }
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* row = residual_ + t * hidden_stride_;
    if (spec_.embedding_scale != 1.0f) scale(row, spec_.embedding_scale, spec_.hidden);
    if (spec_.positions > 0) {
      float* position = own_.row.get();
      weights_.positions.row(forward_.positions_[static_cast<size_t>(t)] + spec_.position_offset, position);
      add(row, position, 1.0f, spec_.hidden);
    }
    norm(weights_.embed_norm, row, spec_.hidden, row);
  }
  mark(Work::embed);
}

// Ranks that were asked for different things would wait for each other in vain, or compute nonsense.
void Worker::check_signatures() noexcept {
  const ParallelRanks& ranks = *forward_.ranks_;
  for (int rank = 0; rank < ranks.size() && !forward_.failure_; ++rank) {
    if (ranks.signature(rank, pending_turn_) == ranks.signature(spec_.rank, pending_turn_)) continue;
    forward_.failure_ = std::make_exception_ptr(comm::CommError(
        comm::CommError::Kind::broken, "ranks disagree: rank " + std::to_string(rank) +
                                           " processes other tokens than rank " + std::to_string(spec_.rank)));
  }
}

void Worker::layer(size_t index) noexcept {
  const LayerSpec& spec = spec_.layers[index];
  const LayerWeights& weights = weights_.layers[index];
  const float scale = spec.residual_scale;
  advance(weights.attn_norm, spec.residual_from_norm);
  if (spec.parallel) {
    attention(index);  // computes the MLP too, which reads the same input
    exchange(Work::down, {2 * tokens_ * hidden_stride_, 0});
    pend(2, Norm{}, scale);
    return;
  }
  attention(index);
  exchange(Work::out, {tokens_ * hidden_stride_, 0});
  pend(1, weights.attn_post_norm, scale);
  advance(weights.mlp_norm, spec.residual_from_norm);
  if (spec.moe)
    experts(index);
  else
    mlp(weights.mlp, delta(0), false);
  exchange(Work::down, {tokens_ * hidden_stride_, 0});
  pend(1, weights.mlp_post_norm, scale);
}

float* Worker::delta(int which) noexcept {
  if (forward_.ranks_ == nullptr) return shared_.delta[which].get();
  return forward_.ranks_->slot(spec_.rank, turn_) + which * tokens_ * hidden_stride_;
}

void Worker::pend(int count, const Norm& post, float scale) noexcept {
  pending_ = count;
  pending_post_ = post;
  pending_scale_ = scale;
}

void Worker::exchange(Work kind, const ParallelRanks::Parts& parts) noexcept {
  barrier(kind);
  if (forward_.ranks_ == nullptr) return;
  // After an error the step goes on without waiting, so that all threads come to its end, and throws there.
  if (thread_ == 0 && !forward_.failure_) {
    try {
      forward_.ranks_->exchange(turn_, parts);
    } catch (...) {
      forward_.failure_ = std::current_exception();
    }
  }
  barrier(Work::ranks);
  pending_turn_ = turn_++;
}

// Other cores have written some of it, so that each line is a miss; asked for together, the misses overlap.
void Worker::fetch_pending(int64_t t) const noexcept {
  const auto fetch = [&](const float* row) {
    for (int64_t i = 0; i < spec_.hidden; i += 16) __builtin_prefetch(row + i);
  };
  fetch(residual_ + t * hidden_stride_);
  if (forward_.ranks_ != nullptr) return;
  for (int i = 0; i < pending_; ++i) fetch(shared_.delta[i].get() + t * hidden_stride_);
}

void Worker::advance(int64_t t, const Norm& norm_, float* out) noexcept {
  const int64_t n = spec_.hidden;
  float* row = residual_ + t * hidden_stride_;
  if (pending_ == 0) return norm(norm_, row, n, out);
  const int ranks = forward_.ranks_ == nullptr ? 1 : forward_.ranks_->size();
  const int sources = ranks * pending_;
  const auto source = [&](int i) -> const float* {
    const int which = i % pending_;
    if (forward_.ranks_ == nullptr) return shared_.delta[which].get() + t * hidden_stride_;
    return forward_.ranks_->slot(i / pending_, pending_turn_) + (which * tokens_ + t) * hidden_stride_;
  };
  if (pending_post_.kind != NormKind::none) {
    float* sum = own_.row.get();
    std::memcpy(sum, source(0), static_cast<size_t>(n) * sizeof(float));
    for (int i = 1; i < sources; ++i) add(sum, source(i), 1.0f, n);
    norm(pending_post_, sum, n, sum);
    add_norm(row, sum, pending_scale_, norm_, n, out);
    return;
  }
  for (int i = 0; i + 1 < sources; ++i) add(row, source(i), pending_scale_, n);
  add_norm(row, source(sources - 1), pending_scale_, norm_, n, out);
}

void Worker::advance(const Norm& norm_, bool residual_from_norm) noexcept {
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* out = x_ + t * hidden_stride_;
    if (!small_ && t + 1 < mine_.end) fetch_pending(t + 1);
    advance(t, norm_, out);
    if (residual_from_norm)
      std::memcpy(residual_ + t * hidden_stride_, out, static_cast<size_t>(spec_.hidden) * sizeof(float));
  }
  pending_ = 0;
  fresh();
  mark(Work::norm);
}

const Input& Worker::input(const Shape& shape, const float* x, int64_t stride, int64_t tokens, const int32_t* rows,
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

void Worker::multiply_into(const LinearWeights& linear, const Input& input, float* out, int64_t stride) noexcept {
  multiply(linear.w, input, Output{out, stride, linear.bias}, thread_, threads_);
}

Range Worker::rows_of(const Shape& shape) const noexcept {
  const Blocks blocks = blocks_of(shape, thread_, threads_);
  return {std::min(blocks.begin * kBlockRows, shape.rows), std::min(blocks.end * kBlockRows, shape.rows)};
}

// --- the head

void Worker::head() noexcept {
  const auto count = static_cast<int64_t>(step_.wanted.size());
  for (size_t i = 0; i < step_.hidden_wanted.size(); ++i) {
    const int64_t t = step_.hidden_wanted[i];
    if (t < mine_.begin || t >= mine_.end || (small_ && thread_ > 0)) continue;  // small: every thread has them all
    advance(t, weights_.final_norm, step_.hidden + static_cast<int64_t>(i) * spec_.hidden);
  }
  // Row i of x is the i-th wanted token; those before it are not needed any more, since i <= wanted[i].
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = step_.wanted[static_cast<size_t>(i)];
    if (t >= mine_.begin && t < mine_.end) advance(t, weights_.final_norm, x_ + i * hidden_stride_);
  }
  pending_ = 0;
  fresh();
  mark(Work::norm);
  const Matrix& w = weights_.head.w;
  int64_t at_once = step_.exact ? kGemvTokens : std::max<int64_t>(count, 1);
  if (forward_.ranks_ != nullptr) {
    ParallelRanks& ranks = *forward_.ranks_;
    int64_t widest = 1;
    for (int rank = 0; rank < ranks.size(); ++rank) widest = std::max(widest, ranks.header(rank).vocab_count);
    const auto room = static_cast<int64_t>(ranks.slot_floats());
    at_once = std::min(at_once, std::max<int64_t>(room / widest, 1));
  }
  for (int64_t first = 0; first < count; first += at_once) logits_of(w, x_, first, std::min(at_once, count - first));
}

void Worker::finish_logits(float* logits, int64_t stride, int64_t tokens, int64_t begin, int64_t end) noexcept {
  if (spec_.logits_softcap <= 0 || begin >= end) return;
  for (int64_t t = 0; t < tokens; ++t) softcap(logits + t * stride + begin, spec_.logits_softcap, end - begin);
}

// Logits of the wanted tokens first, first + 1, ...
void Worker::logits_of(const Matrix& w, const float* x, int64_t first, int64_t count) noexcept {
  const bool divided = forward_.ranks_ != nullptr;
  const int64_t rows = w.shape().rows;
  const int64_t stride = divided ? rows : step_.logits_stride;
  float* out = divided ? forward_.ranks_->slot(spec_.rank, turn_) : step_.logits + first * stride;
  if (first > 0) fresh();
  const Input& in = input(w.shape(), x + first * hidden_stride_, hidden_stride_, count, nullptr, true);
  multiply(w, in, Output{out, stride, weights_.head.bias, false, spec_.logits_scale}, thread_, threads_);
  if (small_) {
    const Range own = rows_of(w.shape());
    finish_logits(out, stride, count, own.begin, own.end);
  } else {
    barrier(Work::head);
    const Range own = part_of(count, thread_, threads_);
    finish_logits(out + own.begin * stride, stride, own.end - own.begin, 0, rows);
  }
  if (!divided) {
    mark(Work::head);
    return;  // all threads meet at the end of the run, before anybody reads the logits
  }
  exchange(Work::head, {0, count});
  for (int rank = 0; rank < forward_.ranks_->size(); ++rank) {
    const ParallelRanks::Header& header = forward_.ranks_->header(rank);
    const float* part = forward_.ranks_->slot(rank, pending_turn_);
    const Range own = part_of(header.vocab_count, thread_, threads_);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(step_.logits + (first + i) * step_.logits_stride + header.vocab_first + own.begin,
                  part + i * header.vocab_count + own.begin, static_cast<size_t>(own.end - own.begin) * sizeof(float));
  }
  mark(Work::ranks);
}

}  // namespace anyaccel::llm
