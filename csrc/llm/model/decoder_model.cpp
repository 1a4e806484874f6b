// SPDX-License-Identifier: Apache-2.0
#include "llm/model/decoder_model.h"

#include <algorithm>
#include <tuple>

#include "common/hash.h"
#include "llm/errors.h"
#include "llm/model/step.h"

namespace anyaccel::llm {
namespace {

DecoderSpec checked(DecoderSpec spec) {
  check(spec);
  return spec;
}

std::vector<AttentionShape> cache_shapes(const DecoderSpec& spec) {
  std::vector<AttentionShape> shapes;
  std::vector<int> places;  // of each layer's attention among them
  for (const LayerSpec& layer : spec.layers) {
    if (spec.is_encoder() && !shapes.empty()) break;  // each layer's are written over those of the layer before
    places.push_back(layer.attention ? static_cast<int>(shapes.size()) : -1);
    if (!layer.attention) continue;
    const AttentionSpec& a = *layer.attention;
    const int source = a.own_keys() ? -1 : places[static_cast<size_t>(a.kv_layer - spec.first_layer)];
    shapes.push_back(cache_shape(a));
    shapes.back().same_as = source;
  }
  for (const LayerSpec& layer : spec.layers)  // behind them all, keys of the indexers
    if (layer.attention && layer.attention->indexer && layer.attention->indexer->own)
      shapes.push_back(cache_shape(*layer.attention->indexer));
  return shapes;
}

constexpr char kBetweenNames = '\n';

// The hosts of this stage's ranks, numbered anew as they come.
std::vector<int> hosts_of_stage(const DecoderSpec& spec, const std::vector<int>& hosts) {
  if (hosts.empty() || spec.stages == 1) return hosts;
  if (hosts.size() != static_cast<size_t>(spec.size * spec.stages))
    throw UsageError("hosts: needs one number a rank, of " + std::to_string(spec.size * spec.stages));
  std::vector<int> known, found;
  for (int rank = 0; rank < spec.size; ++rank) {
    const int host = hosts[static_cast<size_t>(spec.stage * spec.size + rank)];
    auto at = std::find(known.begin(), known.end(), host);
    if (at == known.end()) at = known.insert(at, host);
    found.push_back(static_cast<int>(at - known.begin()));
  }
  return found;
}

// A hash of everything that must be the same on all ranks.
uint64_t signature(const DecoderSpec& spec, int64_t most_tokens, size_t slot_floats) {
  Fnv1a hash;
  for (const auto value : {spec.vocab, spec.hidden, static_cast<int64_t>(spec.layers.size()), spec.max_tokens,
                           static_cast<int64_t>(spec.size), most_tokens, static_cast<int64_t>(slot_floats)})
    hash.mix(value);
  return hash.value();
}

}  // namespace

DecoderModel::DecoderModel(DecoderSpec spec, const std::vector<MatrixEntry>& matrices,
                           const std::vector<VectorEntry>& vectors, int threads, CacheFormat cache_format,
                           size_t cache_limit_bytes, size_t memory)
    : Model(checked(std::move(spec))),
      team_(threads),
      weights_(spec_, matrices, vectors, memory),
      cache_(cache_shapes(spec_), cache_format, cache_limit_bytes > 0 ? cache_limit_bytes : SIZE_MAX / 2,
             StateLayout(spec_).floats),
      forward_(spec_, weights_, cache_, team_, profile_) {}

DecoderModel::~DecoderModel() = default;

// --- weights

void DecoderModel::set_rows(const std::string& name, int64_t first, int64_t count, const Source& source,
                            const int64_t* order) {
  const auto held = lock();
  weights_.set_rows(team_, name, first, count, source, order);
}

void DecoderModel::set_quantised_rows(const std::string& name, int64_t first, int64_t count, const uint8_t* q,
                                      const float* scales, const float* minima) {
  const auto held = lock();
  weights_.set_quantised_rows(team_, name, first, count, q, scales, minima);
}

void DecoderModel::set_vector(const std::string& name, int64_t first, int64_t count, const void* data, SourceType type,
                              int64_t stride, float plus) {
  const auto held = lock();
  weights_.set_vector(name, first, count, data, type, stride, plus);
}

void DecoderModel::stream_to(int fd, int64_t offset) {
  const auto held = lock();
  weights_.stream_to(fd, offset);
}

std::vector<uint64_t> DecoderModel::write(int fd, int64_t offset, const FileProgress& progress) {
  auto held = lock();
  int threads = team_.size();
  if (finished_) {  // they do not change any more: steps go on meanwhile, beside one thread that writes
    held.unlock();
    threads = 1;
  }
  return weights_.write(fd, offset, threads, progress);
}

bool DecoderModel::read(int fd, int64_t offset, const std::vector<uint64_t>& checksums, const FileProgress& progress) {
  const auto held = lock();
  if (finished_) throw UsageError("weights are read before finish()");
  return weights_.read(fd, offset, checksums, team_.size(), progress);
}

std::optional<ExpertCache::Stats> DecoderModel::expert_stats() {
  const auto held = lock();
  if (weights_.experts == nullptr) return std::nullopt;
  return weights_.experts->stats();
}

void DecoderModel::finish() {
  const auto held = lock();
  if (finished_) return;
  weights_.finish(spec_, team_);
  forward_.add_latent_heads();
  forward_.add_distances();
  finished_ = true;
}

void DecoderModel::borrow(DecoderModel& model, const std::vector<int64_t>& tokens) {
  if (&model == this || !spec_.hidden_inputs) throw UsageError("borrow: only a head that drafts takes other weights");
  const auto theirs = model.lock();
  const auto held = lock();
  const auto ends = [](const DecoderSpec& spec) {
    return std::tuple(spec.vocab, spec.hidden, spec.vocab_first, spec.own_vocab(), spec.stages);
  };
  if (!model.finished_ || ends(model.spec_) != ends(spec_))
    throw UsageError("borrow: the model is not complete, or has another vocabulary, other widths or ranks");
  if (static_cast<int64_t>(tokens.size()) != spec_.hidden_inputs->draft_vocab)
    throw UsageError("borrow: " + std::to_string(tokens.size()) + " tokens for the " +
                     std::to_string(spec_.hidden_inputs->draft_vocab) + " rows of the head");
  check_tokens(tokens.data(), static_cast<int64_t>(tokens.size()));
  weights_.borrow(model.weights_, std::vector<int32_t>(tokens.begin(), tokens.end()));
  forward_.add_head();
}

// --- tensor parallelism

std::string DecoderModel::create_segment(double timeout_s, bool anonymous, const std::vector<int>& hosts,
                                         const std::vector<std::string>& addresses, const std::string& wire_dtype,
                                         const std::string& transport, int socket) {
  const auto held = lock();
  if (spec_.size == 1 && spec_.stages == 1) throw UsageError("create_segment: the model has one rank");
  if (ranks_ != nullptr || stages_ != nullptr) throw UsageError("create_segment: called before");
  transport_ = transport;
  const size_t floats = forward_.slot_floats();
  if (static_cast<size_t>(spec_.own_vocab()) > floats)
    throw UsageError("rank " + std::to_string(spec_.rank) + " has " + std::to_string(spec_.own_vocab()) + " of " +
                     std::to_string(spec_.vocab) + " rows of the vocabulary, more than its share");
  const auto pages = static_cast<int64_t>(cache_.limit_bytes() / cache_.page_bytes());
  const auto states = static_cast<int64_t>(cache_.state_pages());
  const auto kind = anonymous ? comm::ShmSegment::Kind::memfd : comm::ShmSegment::Kind::posix;
  std::string name;
  if (spec_.stages > 1) {
    stages_ = std::make_unique<Stages>(spec_, forward_.most_tokens(), pages, states, timeout_s, kind, hosts, addresses);
    stages_->set_interrupt_check(interrupt_check_);
    name = stages_->name();
  }
  if (spec_.size > 1) {
    const ParallelRanks::Header header{
        signature(spec_, forward_.most_tokens(), floats), spec_.vocab_first, spec_.own_vocab(), pages, states, socket};
    ranks_ = std::make_unique<ParallelRanks>(spec_.rank, spec_.size, floats, timeout_s, header, kind,
                                             hosts_of_stage(spec_, hosts), addresses, spec_.stage * spec_.size,
                                             comm::read_wire_format(wire_dtype), transport);
    ranks_->set_interrupt_check(interrupt_check_);
    name = ranks_->name() + (stages_ == nullptr ? "" : kBetweenNames + name);
  }
  return name;
}

void DecoderModel::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  const auto held = lock();
  if (ranks_ == nullptr && stages_ == nullptr) throw UsageError("connect: create_segment() comes first");
  const auto count = static_cast<size_t>(spec_.size * spec_.stages);
  if (names.size() != count || pids.size() != count)
    throw UsageError("connect: needs one name and one pid a rank, of " + std::to_string(count));
  comm::start_transport(transport_);
  int64_t pages = INT64_MAX, states = 0;
  if (ranks_ != nullptr) {
    const auto begin = static_cast<ptrdiff_t>(spec_.stage * spec_.size), end = begin + spec_.size;
    std::vector<std::string> own(names.begin() + begin, names.begin() + end);
    for (std::string& name : own) name = name.substr(0, name.find(kBetweenNames));
    ranks_->connect(own, {pids.begin() + begin, pids.begin() + end});
    int64_t next = 0;
    for (int rank = 0; rank < spec_.size; ++rank) {
      const ParallelRanks::Header& header = ranks_->header(rank);
      if (header.vocab_first != next || header.vocab_count < 0 || header.vocab_count > spec_.vocab - next)
        throw UsageError("the ranks' rows of the vocabulary are not one after another");
      next += header.vocab_count;
      pages = std::min(pages, header.cache_pages);
      states = std::max(states, header.state_pages);
    }
    if (next != spec_.vocab)
      throw UsageError("the ranks have " + std::to_string(next) + " of " + std::to_string(spec_.vocab) +
                       " rows of the vocabulary");
  }
  if (stages_ != nullptr) {
    std::vector<std::string> own = names;
    for (std::string& name : own) name = name.substr(name.find(kBetweenNames) + 1);  // npos + 1 is 0
    stages_->connect(own, pids);
    pages = stages_->cache_pages();
    states = stages_->state_pages();
  }
  cache_.set_state_pages(static_cast<size_t>(states));
  cache_.set_limit_pages(static_cast<size_t>(pages));  // so that all ranks refuse the same
  forward_.set_ranks(ranks_.get(), stages_.get());
}

void DecoderModel::unlink() {
  const auto held = lock();
  if (ranks_ != nullptr) ranks_->unlink();
  if (stages_ != nullptr) stages_->unlink();
}

void DecoderModel::check_ready() const {
  if (!finished_) throw UsageError("the model's weights are not complete: finish() comes first");
  if (spec_.hidden_inputs && weights_.embed.empty())
    throw UsageError("a head that drafts takes the embedding of its model: borrow() comes first");
  if (weights_.experts != nullptr && !weights_.experts->is_open())
    throw UsageError("the model's experts are in a file: read() comes first");
  if ((spec_.size > 1 && (ranks_ == nullptr || !ranks_->connected())) ||
      (spec_.stages > 1 && (stages_ == nullptr || !stages_->connected())))
    throw UsageError("rank " + std::to_string(spec_.stage * spec_.size + spec_.rank) + " of " +
                     std::to_string(spec_.size * spec_.stages) +
                     " is not connected to the others: create_segment() and connect() come first");
}

void DecoderModel::encode(const std::vector<int64_t>& counts, const int64_t* tokens, const int64_t* types,
                          float* hidden) {
  if (!spec_.is_encoder()) throw UsageError("encode: this model's tokens see those before them only");
  const auto held = lock();
  check_ready();
  int64_t at = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const std::string which = "text " + std::to_string(i);
    if (counts[i] < 1) throw UsageError("encode: " + which + " has no tokens");
    if (spec_.max_tokens > 0 && counts[i] > spec_.max_tokens)
      throw UsageError("encode: " + which + " has " + std::to_string(counts[i]) + " tokens, this model takes " +
                       std::to_string(spec_.max_tokens));
    check_tokens(tokens + at, counts[i]);
    for (int64_t t = at; types != nullptr && t < at + counts[i]; ++t)
      if (types[t] < 0 || types[t] >= std::max<int64_t>(spec_.token_types, 1))
        throw UsageError("encode: " + which + " has a token of type " + std::to_string(types[t]) +
                         ", this model knows " + std::to_string(spec_.token_types));
    at += counts[i];
  }
  // Runs of whole sequences: a long one may be more than what a run usually has.
  std::vector<int> sequences;
  const auto destroy = [&] {
    for (int sequence : sequences) cache_.destroy(sequence);
    sequences.clear();
  };
  at = 0;
  for (size_t next = 0; next < counts.size();) {
    encoded_.clear();
    int64_t total = 0;
    try {
      for (; next < counts.size() && (total == 0 || total + counts[next] <= forward_.most_tokens()); ++next) {
        const int64_t count = counts[next];
        sequences.push_back(cache_.create());
        cache_.extend(sequences.back(), count);
        encoded_.queries.push_back({.sequence = sequences.back(),
                                    .position = 0,
                                    .tokens = static_cast<int>(count),
                                    .row = static_cast<int>(total)});
        encoded_.contexts.push_back(count);
        total += count;
      }
      for (int64_t t = 0; t < total; ++t) {
        encoded_.tokens.push_back(static_cast<int32_t>(tokens[at + t]));
        if (types != nullptr) encoded_.types.push_back(static_cast<int32_t>(types[at + t]));
        encoded_.hidden_wanted.push_back(static_cast<int32_t>(t));
      }
      encoded_.hidden = hidden + at * spec_.hidden;
      forward_.run(encoded_);
      if (interrupt_check_) interrupt_check_();
    } catch (...) {
      destroy();
      throw;
    }
    destroy();
    at += total;
  }
}

void DecoderModel::check_room(const std::vector<Work>& work) {
  if (spec_.is_encoder())
    throw UsageError("this model is an encoder, which predicts no next token: encode() is for it");
  size_t needed = 0;
  for (const Work& one : work) needed += cache_.extend_bytes(one.sequence, one.count);
  const size_t left = cache_.limit_bytes() - std::min(cache_.limit_bytes(), cache_.used_bytes());
  if (needed > left) throw OutOfCache(needed, left, cache_.limit_bytes());
}

void DecoderModel::on_threads(const std::function<void(int, int)>& function) {
  team_.run([&](int thread) { function(thread, team_.size()); });
}

}  // namespace anyaccel::llm
