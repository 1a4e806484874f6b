// SPDX-License-Identifier: Apache-2.0
#include "llm/parallel_ranks.h"

#include <new>

#include "llm/errors.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kHeaderBytes = 4096;  // a page, so that slots begin on one
constexpr char kSeparator = ' ';       // of the two names that a rank gives to its peers

size_t slot_bytes(size_t floats) { return (floats * sizeof(float) + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes; }

}  // namespace

ParallelRanks::ParallelRanks(int rank, int size, size_t slot_floats, double timeout_s, const Header& header,
                             comm::ShmSegment::Kind kind)
    : rank_(rank),
      size_(size),
      slot_floats_(slot_floats),
      group_(rank, size, size_t{64} * static_cast<size_t>(size), timeout_s, kind),
      own_(comm::ShmSegment::create(kHeaderBytes + 2 * slot_bytes(slot_floats), kind)),
      name_(group_.name() + kSeparator + own_.name()) {
  new (own_.data()) Header(header);
}

void ParallelRanks::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  if (names.size() != static_cast<size_t>(size_) || pids.size() != names.size())
    throw UsageError("connect: needs one name and one pid a rank, of " + std::to_string(size_));
  if (connected_) throw UsageError("connect: already connected");
  std::vector<std::string> groups, segments;
  for (const std::string& name : names) {
    const size_t at = name.find(kSeparator);
    if (at == std::string::npos) throw UsageError("connect: '" + name + "' is not what create_segment() returned");
    groups.push_back(name.substr(0, at));
    segments.push_back(name.substr(at + 1));
  }
  peers_.clear();
  bases_.clear();
  for (int r = 0; r < size_; ++r) {
    peers_.push_back(r == rank_ ? comm::ShmSegment()
                                : comm::ShmSegment::open(segments[static_cast<size_t>(r)],
                                                         kHeaderBytes + 2 * slot_bytes(slot_floats_)));
    bases_.push_back(static_cast<uint8_t*>(r == rank_ ? own_.data() : peers_.back().data()));
    if (header(r).model != static_cast<const Header*>(own_.data())->model)
      throw UsageError("rank " + std::to_string(r) + " has another model than rank " + std::to_string(rank_));
  }
  group_.connect(groups, pids);
  connected_ = true;
}

void ParallelRanks::unlink() noexcept {
  group_.unlink();
  own_.unlink();
}

const ParallelRanks::Header& ParallelRanks::header(int rank) const {
  return *reinterpret_cast<const Header*>(bases_[static_cast<size_t>(rank)]);
}

float* ParallelRanks::slot(int rank, unsigned turn) const {
  return reinterpret_cast<float*>(bases_[static_cast<size_t>(rank)] + kHeaderBytes +
                                  (turn & 1) * slot_bytes(slot_floats_));
}

}  // namespace anyaccel::llm
