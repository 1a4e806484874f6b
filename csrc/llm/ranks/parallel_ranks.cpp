// SPDX-License-Identifier: Apache-2.0
#include "llm/ranks/parallel_ranks.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <numeric>
#include <sstream>

#include "llm/errors.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSignatureBytes = 64;  // 8 are used; slots begin on a line
constexpr char kNoEndpoint[] = "-";
constexpr double kLeaderSeconds = 5;

std::vector<int> checked(const std::vector<int>& hosts, int size) {
  if (hosts.empty()) return std::vector<int>(static_cast<size_t>(std::max(size, 0)), 0);
  int next = 0;
  bool right = hosts.size() == static_cast<size_t>(size);
  for (const int host : hosts) {
    right = right && host >= 0 && host <= next;
    next = std::max(next, host + 1);
  }
  if (!right)
    throw UsageError("hosts: needs one number a rank, of " + std::to_string(size) + ", from 0 on as they come");
  return hosts;
}

std::vector<int> ranks_of(const std::vector<int>& hosts, int host) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    if (hosts[rank] == host) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

int host_of(const std::vector<int>& hosts, int rank) {
  if (rank < 0 || rank >= static_cast<int>(hosts.size()))
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(hosts.size()));
  return hosts[static_cast<size_t>(rank)];
}

int place_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// What a rank's name() says.
struct Name {
  std::string group, segment;
  ParallelRanks::Header header{};
  std::string wire, endpoint;

  static Name read(const std::string& text) {
    std::istringstream stream(text);
    Name name;
    ParallelRanks::Header& header = name.header;
    stream >> name.group >> name.segment >> header.model >> header.vocab_first >> header.vocab_count >>
        header.cache_pages >> header.state_pages >> header.socket >> name.wire >> name.endpoint;
    if (!stream)
      throw UsageError("connect: '" + text.substr(0, text.find(' ')) + "...' is not what create_segment() returned");
    return name;
  }
};

}  // namespace

ParallelRanks::ParallelRanks(int rank, int size, size_t slot_floats, double timeout_s, const Header& header,
                             comm::ShmSegment::Kind kind, const std::vector<int>& hosts,
                             const std::vector<std::string>& addresses, int first_rank, comm::WireFormat wire,
                             std::string transport)
    : rank_(rank),
      size_(size),
      first_rank_(first_rank),
      slot_floats_(slot_floats),
      timeout_s_(timeout_s),
      hosts_(checked(hosts, size)),
      here_(ranks_of(hosts_, host_of(hosts_, rank))),
      own_place_(place_of(here_, rank)),
      wire_(here_.size() == hosts_.size() ? comm::WireFormat::f32 : wire),  // what is on one host goes through memory
      transport_(std::move(transport)),
      // What no other rank opens need not be in a file system of limited size.
      kind_(here_.size() == 1 ? comm::ShmSegment::Kind::memfd : kind),
      group_(own_place_, static_cast<int>(here_.size()), size_t{64} * here_.size(), timeout_s, kind_) {
  std::vector<int> numbers = here_;
  for (int& each : numbers) each += first_rank;
  group_.set_numbers(numbers);
  const int count = 1 + *std::max_element(hosts_.begin(), hosts_.end());
  const size_t elsewhere = hosts_.size() - here_.size();
  own_ = comm::ShmSegment::create(kPage + 2 * slot_bytes() * (1 + (is_leader() ? elsewhere : 0)), kind_);
  new (own_.data()) Failure{};
  if (count > 1 && is_leader()) host_links_.emplace(hosts_[static_cast<size_t>(rank)], count, addresses, timeout_s);
  std::ostringstream text;
  text << group_.name() << ' ' << own_.name() << ' ' << header.model << ' ' << header.vocab_first << ' '
       << header.vocab_count << ' ' << header.cache_pages << ' ' << header.state_pages << ' ' << header.socket << ' '
       << comm::wire_format_name(wire_) << ' ' << (host_links_ ? host_links_->endpoint() : kNoEndpoint);
  name_ = text.str();
}

size_t ParallelRanks::slot_bytes() const {
  const size_t more = wire_ == comm::WireFormat::f32 ? 0 : comm::encoded_bytes(wire_, slot_floats_);
  return (kSignatureBytes + slot_floats_ * sizeof(float) + more + kPage - 1) / kPage * kPage;
}

void ParallelRanks::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  if (names.size() != hosts_.size() || pids.size() != names.size())
    throw UsageError("connect: needs one name and one pid a rank, of " + std::to_string(size_));
  if (connected_) throw UsageError("connect: already connected");
  std::vector<Name> all;
  for (const std::string& name : names) all.push_back(Name::read(name));
  headers_.clear();
  for (const Name& name : all) headers_.push_back(name.header);
  for (size_t r = 0; r < all.size(); ++r) {
    const auto own = static_cast<size_t>(rank_);
    if (all[r].header.model != all[own].header.model)
      throw UsageError("rank " + number(r) + " has another model than rank " + number(own));
    if (all[r].wire != all[own].wire)
      throw UsageError("rank " + number(r) + " sends " + all[r].wire + " between hosts, rank " + number(own) + " " +
                       all[own].wire + "; give all ranks the same wire_dtype (ANYACCEL_WIRE_DTYPE)");
  }
  group_by_socket();

  const size_t elsewhere = hosts_.size() - here_.size();
  std::vector<std::string> groups;
  std::vector<int> pids_here;
  peers_.clear();
  bases_.assign(hosts_.size(), nullptr);
  uint8_t* leader = nullptr;
  for (const int r : here_) {
    const auto at = static_cast<size_t>(r);
    groups.push_back(all[at].group);
    pids_here.push_back(pids[at]);
    void* data = own_.data();
    if (r != rank_) {
      peers_.push_back(
          comm::ShmSegment::open(all[at].segment, kPage + 2 * slot_bytes() * (1 + (r == here_[0] ? elsewhere : 0))));
      data = peers_.back().data();
    }
    if (leader == nullptr) leader = static_cast<uint8_t*>(data);
    bases_[at] = static_cast<uint8_t*>(data) + kPage;
  }
  failure_ = reinterpret_cast<Failure*>(leader);
  size_t place = 1;  // among the slots of the leader's segment
  for (size_t r = 0; r < hosts_.size(); ++r)
    if (!is_here(r)) bases_[r] = leader + kPage + 2 * slot_bytes() * place++;
  group_.connect(groups, pids_here);
  if (host_links_) {
    std::vector<std::string> endpoints;
    for (const Name& name : all)
      if (name.endpoint != kNoEndpoint) endpoints.push_back(name.endpoint);
    connect_hosts(endpoints);
  }
  connected_ = true;
}

void ParallelRanks::group_by_socket() {
  std::map<int64_t, std::vector<int>> by_socket;
  for (int rank = 0; rank < size_; ++rank) by_socket[header(rank).socket].push_back(rank);
  const auto most = static_cast<int>(by_socket.begin()->second.size());
  bool grouped = on_one_host() && by_socket.size() > 1 && by_socket.begin()->first >= 0;
  for (const auto& [socket, ranks] : by_socket) grouped = grouped && static_cast<int>(ranks.size()) == most;
  sockets_ = SocketRanks{};
  sockets_.each = grouped ? most : 1;
  sockets_.count = size_ / sockets_.each;
  sockets_.ranks.resize(static_cast<size_t>(size_));
  std::iota(sockets_.ranks.begin(), sockets_.ranks.end(), 0);
  if (grouped)
    std::stable_sort(sockets_.ranks.begin(), sockets_.ranks.end(),
                     [this](int a, int b) { return header(a).socket < header(b).socket; });
  const int at = place_of(sockets_.ranks, rank_);
  sockets_.socket = at / sockets_.each;
  sockets_.place = at % sockets_.each;
}

int ParallelRanks::owner_of_token(int64_t token) const {
  int rank = size_ - 1;
  while (rank > 0 && token < header(rank).vocab_first) --rank;
  return rank;
}

// A host's leader is its first rank, and hosts are numbered as they come: so are the endpoints.
void ParallelRanks::connect_hosts(const std::vector<std::string>& endpoints) {
  std::vector<std::string> ranks;
  for (int host = 0; host < static_cast<int>(endpoints.size()); ++host) {
    std::string text;
    for (const int rank : ranks_of(hosts_, host))
      text += (text.empty() ? "" : ", ") + number(static_cast<size_t>(rank));
    ranks.push_back((text.find(',') == std::string::npos ? "rank " : "ranks ") + text);
  }
  taken_.resize(endpoints.size());
  host_links_->connect(endpoints, ranks, comm::make_transport(transport_));
}

void ParallelRanks::unlink() noexcept {
  group_.unlink();
  own_.unlink();
}

void ParallelRanks::set_timeout(double timeout_s) {
  timeout_s_ = timeout_s;
  group_.set_timeout(timeout_s);
  if (host_links_) host_links_->set_timeout(timeout_s);
}

void ParallelRanks::set_interrupt_check(const std::function<void()>& check) {
  group_.set_interrupt_check(check);
  if (host_links_) host_links_->set_interrupt_check(check);
}

uint8_t* ParallelRanks::base(int rank, unsigned turn) const {
  return bases_[static_cast<size_t>(rank)] + (turn & 1) * slot_bytes();
}

float* ParallelRanks::slot(int rank, unsigned turn) const {
  return reinterpret_cast<float*>(base(rank, turn) + kSignatureBytes);
}

uint64_t& ParallelRanks::signature(int rank, unsigned turn) const {
  return *reinterpret_cast<uint64_t*>(base(rank, turn));
}

uint8_t* ParallelRanks::encoded(int rank, unsigned turn) const {
  return base(rank, turn) + kSignatureBytes + slot_floats_ * sizeof(float);
}

void ParallelRanks::exchange(unsigned turn, const Parts& parts) {
  if (on_one_host()) return group_.barrier();
  if (encodes(parts)) encode_own(turn, parts);
  if (is_leader()) return exchange_as_leader(turn, parts);
  group_.barrier();
  await_leader();
}

void ParallelRanks::collect(int host, unsigned turn, const Parts& parts, std::vector<iovec>& pieces) const {
  pieces.clear();
  for (int rank = 0; rank < size_; ++rank) {
    if (hosts_[static_cast<size_t>(rank)] != host) continue;
    if (encodes(parts)) {
      pieces.push_back({base(rank, turn), kSignatureBytes});
      pieces.push_back({encoded(rank, turn), comm::encoded_bytes(wire_, floats_of(parts))});
      continue;
    }
    const auto floats = static_cast<size_t>(parts.floats + parts.logits * header(rank).vocab_count);
    pieces.push_back({base(rank, turn), kSignatureBytes + std::min(floats, slot_floats_) * sizeof(float)});
  }
}

size_t ParallelRanks::floats_of(const Parts& parts) const {
  return std::min(static_cast<size_t>(parts.floats), slot_floats_);
}

void ParallelRanks::encode_own(unsigned turn, const Parts& parts) {
  const size_t count = floats_of(parts);
  comm::encode(wire_, slot(rank_, turn), count, encoded(rank_, turn));
  comm::decode(wire_, encoded(rank_, turn), count, slot(rank_, turn));
}

void ParallelRanks::decode_others(unsigned turn, const Parts& parts) {
  for (int rank = 0; rank < size_; ++rank)
    if (!is_here(static_cast<size_t>(rank)))
      comm::decode(wire_, encoded(rank, turn), floats_of(parts), slot(rank, turn));
}

void ParallelRanks::exchange_as_leader(unsigned turn, const Parts& parts) {
  const int own_host = hosts_[static_cast<size_t>(rank_)];
  try {
    if (here_.size() > 1) group_.barrier();
    for (int host = 0; host < static_cast<int>(taken_.size()); ++host)
      collect(host, turn, parts, host == own_host ? given_ : taken_[static_cast<size_t>(host)]);
    host_links_->exchange(given_, taken_);
    if (encodes(parts)) decode_others(turn, parts);
    if (here_.size() > 1) group_.barrier();
  } catch (const comm::CommError& error) {
    give_up(error.kind, error.what());
    throw;
  } catch (const std::exception& error) {  // of the interrupt check
    give_up(comm::CommError::Kind::broken, error.what());
    throw;
  }
}

// Tells the other hosts, and the ranks of this one, which wait in shared memory.
void ParallelRanks::give_up(comm::CommError::Kind kind, const char* why) noexcept {
  host_links_->fail(why);
  std::strncpy(failure_->text, why, sizeof failure_->text - 1);
  failure_->there.store(1 + static_cast<uint32_t>(kind), std::memory_order_release);
  group_.give_up();
}

void ParallelRanks::fail(const char* why) noexcept {
  if (host_links_) give_up(comm::CommError::Kind::broken, why);
  group_.give_up();
}

void ParallelRanks::await_leader() {
  try {
    // The leader has a deadline for the other hosts, and knows who is late; an end of it is noticed at once. So this
    // one is for a leader that is there and does nothing.
    group_.barrier(2 * timeout_s_ + kLeaderSeconds);
  } catch (const comm::CommError&) {
    const uint32_t there = failure_->there.load(std::memory_order_acquire);
    if (there == 0) throw;
    throw comm::CommError(static_cast<comm::CommError::Kind>(there - 1), failure_->text);
  }
}

}  // namespace anyaccel::llm
