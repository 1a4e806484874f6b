// SPDX-License-Identifier: Apache-2.0
#include "llm/ranks/stages.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "common/hash.h"
#include "llm/errors.h"

namespace anyaccel::llm {
namespace {

// Of what is shared, so much goes at a time: large enough for a token's logits, small beside them all.
constexpr size_t kShareBytes = size_t{1} << 20;
// Of a text, so much goes with its length: a step's tokens mostly fit.
constexpr size_t kTextBytes = 960;

// The hosts of the ranks of all stages that have the same place in theirs.
std::vector<int> members(const DecoderSpec& spec, const std::vector<int>& hosts) {
  const int ranks = spec.size * spec.stages;
  if (!hosts.empty() && hosts.size() != static_cast<size_t>(ranks))
    throw UsageError("hosts: needs one number a rank, of " + std::to_string(ranks));
  std::vector<int> found(static_cast<size_t>(spec.stages));
  for (int stage = 0; stage < spec.stages && !hosts.empty(); ++stage)
    found[static_cast<size_t>(stage)] = hosts[static_cast<size_t>(stage * spec.size + spec.rank)];
  return found;
}

uint64_t signature(const DecoderSpec& spec, int64_t most_tokens) {
  Fnv1a hash;
  for (const auto value : {spec.vocab, spec.hidden, spec.max_tokens, static_cast<int64_t>(spec.size),
                           static_cast<int64_t>(spec.stages), most_tokens})
    hash.mix(value);
  return hash.value();
}

}  // namespace

Stages::Stages(const DecoderSpec& spec, int64_t most_tokens, int64_t cache_pages, int64_t state_pages, double timeout_s,
               comm::ShmSegment::Kind kind, const std::vector<int>& hosts, const std::vector<std::string>& addresses)
    : rank_(spec.rank),
      size_(spec.size),
      stage_(spec.stage),
      count_(spec.stages),
      hidden_(spec.hidden),
      first_layer_(spec.first_layer),
      layers_(static_cast<int64_t>(spec.layers.size())),
      model_(signature(spec, most_tokens)),
      links_(spec.stage, members(spec, hosts), addresses, timeout_s, kind),
      in_(kLineFloats + (is_first() ? 0 : most_tokens * spec.hidden)),
      out_(kLineFloats + (is_last() ? 0 : most_tokens * spec.hidden)),
      cache_pages_(cache_pages),
      state_pages_(state_pages) {
  std::ostringstream text;
  text << model_ << ' ' << first_layer_ << ' ' << layers_ << ' ' << cache_pages << ' ' << state_pages << ' '
       << links_.endpoint();
  name_ = text.str();
}

void Stages::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  if (names.size() != static_cast<size_t>(size_ * count_) || pids.size() != names.size())
    throw UsageError("connect: needs one name and one pid a rank, of " + std::to_string(size_ * count_));
  if (connected_) throw UsageError("connect: already connected");
  std::vector<std::string> endpoints;
  std::vector<int> own_pids, ranks;
  int64_t next = 0;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    std::istringstream stream(names[rank]);
    uint64_t model = 0;
    int64_t first = 0, layers = 0, pages = 0, states = 0;
    std::string endpoint;
    stream >> model >> first >> layers >> pages >> states >> std::ws;
    std::getline(stream, endpoint);
    if (!stream || endpoint.empty()) throw UsageError("connect: what is not what create_segment() returned");
    const auto at = static_cast<int>(rank);
    if (model != model_ || (at / size_ == stage_ && (first != first_layer_ || layers != layers_)))
      throw UsageError("rank " + std::to_string(rank) + " has another model than rank " +
                       std::to_string(stage_ * size_ + rank_));
    if (first != next)
      throw UsageError("the stages' layers are not one after another, at rank " + std::to_string(rank));
    if (at % size_ == size_ - 1) next = first + layers;
    cache_pages_ = std::min(cache_pages_, pages);
    state_pages_ = std::max(state_pages_, states);
    if (at % size_ != rank_) continue;
    endpoints.push_back(endpoint);
    own_pids.push_back(pids[rank]);
    ranks.push_back(at);
  }
  links_.connect(endpoints, own_pids, ranks);
  connected_ = true;
}

void Stages::take(uint64_t signature, int64_t tokens) {
  links_.receive(stage_ - 1, signature, in_.get(), static_cast<size_t>(tokens * hidden_) * sizeof(float));
}

void Stages::pass_on(uint64_t signature, int64_t tokens) {
  links_.send(stage_ + 1, signature, out_.get(), static_cast<size_t>(tokens * hidden_) * sizeof(float));
}

void Stages::share(void* data, size_t bytes, bool from_first) {
  const int from = from_first ? 0 : count_ - 1;
  for (size_t done = 0; done < bytes;) {
    const size_t part = std::min(bytes - done, kShareBytes);
    if (packet_.size() < comm::StageLinks::kLine + part) packet_.resize(comm::StageLinks::kLine + part);
    char* body = packet_.data() + comm::StageLinks::kLine;
    char* at = static_cast<char*>(data) + done;
    ++shares_;
    if (stage_ == from) {
      std::memcpy(body, at, part);
      for (int other = 0; other < count_; ++other)
        if (other != from) links_.send(other, shares_, packet_.data(), part);
    } else {
      links_.receive(from, shares_, packet_.data(), part);
      std::memcpy(at, body, part);
    }
    done += part;
  }
}

void Stages::share_text(std::string& text) {
  struct {
    uint64_t bytes;
    char begin[kTextBytes];
  } first{};
  if (is_last()) {
    first.bytes = text.size();
    std::memcpy(first.begin, text.data(), std::min(text.size(), kTextBytes));
  }
  share(&first, sizeof first);
  text.resize(first.bytes);
  if (!is_last()) std::memcpy(text.data(), first.begin, std::min(text.size(), kTextBytes));
  if (text.size() > kTextBytes) share(text.data() + kTextBytes, text.size() - kTextBytes);
}

}  // namespace anyaccel::llm
