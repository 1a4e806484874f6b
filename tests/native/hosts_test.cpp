// SPDX-License-Identifier: Apache-2.0
// What goes between hosts: here these are threads of one process, with TCP over the loopback between them.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/errors.h"
#include "comm/host_links.h"
#include "comm/rank_watch.h"
#include "comm/wire_format.h"
#include "common/descriptor.h"
#include "llm/errors.h"
#include "llm/ranks/parallel_ranks.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::comm;
using llm::ParallelRanks;

constexpr double kTimeout = 60;
const std::vector<std::string> kLoopback{"127.0.0.1"};

// Calls work(i) on a thread each.
void together(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

std::string error_of(const std::function<void()>& call, CommError::Kind kind) {
  try {
    call();
  } catch (const CommError& error) {
    if (error.kind != kind) std::fprintf(stderr, "kind %d: %s\n", static_cast<int>(error.kind), error.what());
    CHECK(error.kind == kind);
    return error.what();
  }
  std::fprintf(stderr, "no error was thrown\n");
  std::abort();
}

bool has(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) std::fprintf(stderr, "no '%s' in '%s'\n", part.c_str(), text.c_str());
  return text.find(part) != std::string::npos;
}

using Hosts = std::vector<std::unique_ptr<HostLinks>>;

Hosts make(int count, double timeout_s) {
  Hosts hosts;
  for (int host = 0; host < count; ++host)
    hosts.push_back(std::make_unique<HostLinks>(host, count, kLoopback, timeout_s));
  return hosts;
}

std::vector<std::string> cards_of(const Hosts& hosts) {
  std::vector<std::string> endpoints;
  for (const auto& host : hosts) endpoints.push_back(host->endpoint());
  return endpoints;
}

std::vector<std::string> ranks_of(size_t count) {
  std::vector<std::string> ranks;
  for (size_t host = 0; host < count; ++host) ranks.push_back("rank " + std::to_string(host));
  return ranks;
}

Hosts connected(int count) {
  Hosts hosts = make(count, kTimeout);
  const auto endpoints = cards_of(hosts);
  together(count, [&](int host) { hosts[static_cast<size_t>(host)]->connect(endpoints, ranks_of(endpoints.size())); });
  return hosts;
}

// Sends so many bytes in two pieces, and checks what comes.
void exchange(HostLinks& self, int host, int hosts, size_t bytes, int round) {
  const auto value = [&](int from, size_t at) { return static_cast<uint8_t>(from * 31 + round * 7 + at * 13); };
  std::vector<uint8_t> own(bytes);
  for (size_t i = 0; i < bytes; ++i) own[i] = value(host, i);
  const size_t cut = bytes / 3;
  const auto pieces = [&](std::vector<uint8_t>& memory) {
    return std::vector<iovec>{{memory.data(), cut}, {memory.data() + cut, bytes - cut}};
  };
  std::vector<std::vector<uint8_t>> got(static_cast<size_t>(hosts), std::vector<uint8_t>(bytes));
  std::vector<std::vector<iovec>> taken;
  for (auto& memory : got) taken.push_back(pieces(memory));
  self.exchange(pieces(own), taken);
  for (int from = 0; from < hosts; ++from)
    for (size_t i = 0; from != host && i < bytes; ++i) CHECK(got[static_cast<size_t>(from)][i] == value(from, i));
}

void test_exchanges() {
  for (const int count : {2, 3, 4}) {
    Hosts hosts = connected(count);
    // The large one is more than sockets hold: all send and take at the same time.
    const std::vector<size_t> sizes{4, 0, 1, 2400, 70'000, kSanitized ? 300'000u : 20'000'000u, 2400};
    together(count, [&](int host) {
      for (size_t round = 0; round < sizes.size(); ++round)
        exchange(*hosts[static_cast<size_t>(host)], host, count, sizes[round], static_cast<int>(round));
    });
  }
}

Descriptor visit(const std::string& endpoint) {
  const std::string port = endpoint.substr(endpoint.rfind(',') + 1);
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(port.c_str())));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

// Those who have not read the endpoint are sent away, and keep nobody from coming.
void test_strangers() {
  Hosts hosts = make(2, kTimeout);
  const auto endpoints = cards_of(hosts);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.push_back(visit(endpoints[0]));
    std::string words(static_cast<size_t>(40 * i), 'x');
    if (i > 1) std::memcpy(words.data(), "anyaccel\1\0\0\0\1\0\0\0", 16);  // all is right but the key
    if (i > 0) CHECK(send(strangers.back().get(), words.data(), words.size(), MSG_NOSIGNAL) > 0);
  }
  together(2, [&](int host) { hosts[static_cast<size_t>(host)]->connect(endpoints, ranks_of(2)); });
  together(2, [&](int host) { exchange(*hosts[static_cast<size_t>(host)], host, 2, 100, 0); });
  char byte;
  for (const Descriptor& stranger : strangers) CHECK(recv(stranger.get(), &byte, 1, 0) <= 0);

  const std::string wrong = endpoints[0].substr(0, endpoints[0].find(';'));
  for (const std::string& endpoint :
       {std::string(), wrong, wrong + ";00;127.0.0.1,1", endpoints[0].substr(0, 70 + wrong.size()),
        wrong + ";" + std::string(64, '0') + ";nowhere,80", wrong + ";" + std::string(64, '0') + ";127.0.0.1,x"}) {
    HostLinks host(1, 2, kLoopback, 1);
    bool refused = false;
    try {
      host.connect({endpoint, host.endpoint()}, ranks_of(2));
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void test_who_does_not_come() {
  {
    Hosts hosts = make(3, 0.2);
    const auto endpoints = cards_of(hosts);
    together(2, [&](int host) {
      const std::string text = error_of([&] { hosts[static_cast<size_t>(host)]->connect(endpoints, ranks_of(3)); },
                                        CommError::Kind::timeout);
      CHECK(has(text, "no connection with rank 2 on ") && has(text, "within the timeout of 0.2 s"));
    });
  }
  {
    // Nobody listens any more where the endpoint says.
    auto gone = std::make_unique<HostLinks>(0, 2, kLoopback, 0.2);
    const std::string endpoint = gone->endpoint();
    gone.reset();
    HostLinks host(1, 2, kLoopback, 0.3);
    const std::string text =
        error_of([&] { host.connect({endpoint, host.endpoint()}, ranks_of(2)); }, CommError::Kind::timeout);
    CHECK(has(text, "(127.0.0.1 port ") && has(text, "Connection refused)"));
  }
  {
    Hosts hosts = connected(2);
    for (const auto& host : hosts) host->set_timeout(0.2);
    const std::string late = error_of([&] { exchange(*hosts[0], 0, 2, 100, 0); }, CommError::Kind::timeout);
    CHECK(has(late, "rank 1 on ") && has(late, " did not come within the timeout of 0.2 s"));
    CHECK(has(error_of([&] { exchange(*hosts[0], 0, 2, 100, 0); }, CommError::Kind::broken), "earlier error"));
    // The late one has all that was sent to it, and learns it the next time.
    exchange(*hosts[1], 1, 2, 100, 0);
    const std::string caller_dtype = error_of([&] { exchange(*hosts[1], 1, 2, 100, 0); }, CommError::Kind::broken);
    CHECK(has(caller_dtype, "rank 0 on ") && has(caller_dtype, " gave up: rank 1 on "));
  }
}

// A library that joins the hosts when all have asked for it, but not this one.
class LateTransport : public Transport {
 public:
  explicit LateTransport(bool* gave_up) : gave_up_(gave_up) {}
  Endpoint endpoint(int) override { return {"late", 0, 0, {}}; }
  void connect(int, const std::vector<Endpoint>&) override {}
  bool connected() override { return false; }
  void begin(const Bytes&, std::vector<Bytes>&) override {}
  bool done() override { return false; }
  bool waits_for(int) const override { return true; }
  void give_up() noexcept override { *gave_up_ = true; }

 private:
  bool* const gave_up_;
};

void test_a_transport_that_does_not_join() {
  Hosts hosts = make(2, 0.2);
  const auto endpoints = cards_of(hosts);
  bool gave_up[2] = {};
  std::string said[2];
  together(2, [&](int host) {
    try {
      const auto at = static_cast<size_t>(host);
      hosts[at]->connect(endpoints, ranks_of(2), std::make_unique<LateTransport>(&gave_up[host]));
    } catch (const CommError& error) {
      said[host] = error.what();
    }
  });
  // The second one may be caller_dtype by the first.
  for (int host = 0; host < 2; ++host) CHECK(gave_up[host] && has(said[host], "within the timeout of 0.2 s"));
}

void test_who_leaves() {
  for (const size_t bytes : {size_t{100}, size_t{30'000'000}}) {
    Hosts hosts = connected(3);
    together(3, [&](int host) {
      auto& self = hosts[static_cast<size_t>(host)];
      exchange(*self, host, 3, 1000, 0);
      if (host == 2) {
        self.reset();
        return;
      }
      try {
        exchange(*self, host, 3, bytes, 1);
        CHECK(false);
      } catch (const CommError& error) {
        // One of them may hear it from the other first; who is in the middle of a large message cannot say why it goes.
        CHECK(has(error.what(), "ended or left") && (bytes > 100 || has(error.what(), "rank 2 on ")));
      }
    });
  }
  // One that fails says why, also to those that come later, and to those who expect less than the words take.
  for (const size_t bytes : {size_t{0}, size_t{5}, size_t{100'000}}) {
    Hosts hosts = connected(2);
    hosts[1]->fail("rank 3 has ended");
    const std::string text = error_of([&] { exchange(*hosts[0], 0, 2, bytes, 0); }, CommError::Kind::broken);
    CHECK(has(text, "rank 1 on ") && has(text, " gave up: rank 3 has ended"));
  }
}

void test_disagreement() {
  Hosts hosts = connected(2);
  together(2, [&](int host) {
    const std::string text =
        error_of([&] { exchange(*hosts[static_cast<size_t>(host)], host, 2, host == 0 ? 100 : 200, 0); },
                 CommError::Kind::broken);
    CHECK(has(text, "ranks disagree"));
  });
}

void test_an_interrupt() {
  Hosts hosts = connected(2);
  hosts[0]->set_interrupt_check([] { throw std::runtime_error("Ctrl-C"); });
  bool interrupted = false;
  try {
    exchange(*hosts[0], 0, 2, 100, 0);
  } catch (const std::runtime_error& error) {
    interrupted = std::string(error.what()) == "Ctrl-C";
  }
  CHECK(interrupted);
  exchange(*hosts[1], 1, 2, 100, 0);
  CHECK(has(error_of([&] { exchange(*hosts[1], 1, 2, 100, 0); }, CommError::Kind::broken), "gave up: Ctrl-C"));
}

// --- one to one

std::vector<uint8_t> values(size_t bytes, int round) {
  std::vector<uint8_t> found(bytes);
  for (size_t i = 0; i < bytes; ++i) found[i] = static_cast<uint8_t>(round * 7 + static_cast<int>(i % 251));
  return found;
}

void test_one_to_one() {
  Hosts hosts = connected(3);
  together(3, [&](int host) {
    HostLinks& self = *hosts[static_cast<size_t>(host)];
    for (int round = 0; round < 20; ++round) {  // along a chain, then from its end to all, between exchanges
      const size_t bytes = round % 5 == 4 ? 3'000'000 : static_cast<size_t>(round) * 100;
      const std::vector<uint8_t> right = values(bytes, round);
      std::vector<uint8_t> own = host == 0 ? right : std::vector<uint8_t>(bytes);
      if (host > 0) self.receive(host - 1, {{own.data(), bytes}});
      CHECK(own == right);
      if (host < 2) self.send(host + 1, {{own.data(), bytes / 2}, {own.data() + bytes / 2, bytes - bytes / 2}});
      uint64_t last = host == 2 ? 77 + static_cast<uint64_t>(round) : 0;
      for (int to = 0; to < 2 && host == 2; ++to) self.send(to, {{&last, sizeof last}});
      if (host < 2) self.receive(2, {{&last, sizeof last}});
      CHECK(last == 77 + static_cast<uint64_t>(round));
      if (round % 4 == 0) exchange(self, host, 3, 100, round);
    }
  });
}

void test_one_to_one_that_fails() {
  std::vector<uint8_t> large = values(50'000'000, 0);  // more than lies between two hosts
  {
    Hosts hosts = connected(2);
    const auto late = [&] { hosts[1]->fail("rank 3 has ended"); };
    std::thread other(late);
    const std::string text =
        error_of([&] { hosts[0]->send(1, {{large.data(), large.size()}}); }, CommError::Kind::broken);
    other.join();
    CHECK(has(text, "rank 1 on ") && has(text, " gave up: rank 3 has ended"));
  }
  {
    Hosts hosts = connected(3);  // who waits for one hears what another one says
    hosts[2]->fail("rank 3 has ended");
    CHECK(has(error_of([&] { hosts[0]->receive(1, {{large.data(), 8}}); }, CommError::Kind::broken),
              " gave up: rank 3 has ended"));
  }
  {
    Hosts hosts = connected(2);
    hosts[1].reset();
    CHECK(has(error_of([&] { hosts[0]->send(1, {{large.data(), large.size()}}); }, CommError::Kind::peer_lost),
              "rank 1 on "));
  }
  {
    Hosts hosts = connected(2);
    hosts[0]->set_timeout(0.2);
    CHECK(has(error_of([&] { hosts[0]->receive(1, {{large.data(), 8}}); }, CommError::Kind::timeout),
              "did not come within the timeout of 0.2 s"));
  }
}

// --- ranks of a decoder

constexpr size_t kFloats = 5000;

struct Ranks {
  std::vector<std::unique_ptr<ParallelRanks>> all;
  Ranks(const std::vector<int>& hosts, std::vector<int64_t> vocabulary = {}, WireFormat wire = WireFormat::f32) {
    const int size = static_cast<int>(hosts.size());
    vocabulary.resize(hosts.size(), 10);
    std::vector<std::string> names;
    int64_t first = 0;
    for (int rank = 0; rank < size; ++rank) {
      const int64_t count = vocabulary[static_cast<size_t>(rank)];
      all.push_back(std::make_unique<ParallelRanks>(rank, size, kFloats, kTimeout,
                                                    ParallelRanks::Header{7, first, count, 100 + rank},
                                                    ShmSegment::Kind::memfd, hosts, kLoopback, 0, wire));
      first += count;
      names.push_back(all.back()->name());
    }
    const std::vector<int> pids(hosts.size(), getpid());
    together(size, [&](int rank) { all[static_cast<size_t>(rank)]->connect(names, pids); });
    for (const auto& rank : all) rank->unlink();
  }
  ParallelRanks& at(int rank) { return *all[static_cast<size_t>(rank)]; }
};

float value_of(int rank, unsigned turn, size_t at) { return static_cast<float>(rank * 1000 + turn * 10 + at % 7); }

void exchange(ParallelRanks& self, unsigned turn, const ParallelRanks::Parts& parts) {
  const auto floats = [&](int rank) {
    return static_cast<size_t>(parts.floats + parts.logits * self.header(rank).vocab_count);
  };
  self.signature(self.rank(), turn) = 100 + turn;
  for (size_t i = 0; i < floats(self.rank()); ++i) self.slot(self.rank(), turn)[i] = value_of(self.rank(), turn, i);
  self.exchange(turn, parts);
  for (int rank = 0; rank < self.size(); ++rank) {
    CHECK(self.signature(rank, turn) == 100 + turn);
    for (size_t i = 0; i < floats(rank); ++i) CHECK(self.slot(rank, turn)[i] == value_of(rank, turn, i));
  }
}

void test_ranks() {
  const std::vector<std::vector<int>> placements{{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 2}, {0, 1, 1}};
  for (const auto& hosts : placements) {
    Ranks ranks(hosts, {3, 12, 1});
    together(static_cast<int>(hosts.size()), [&](int rank) {
      for (int other = 0; other < static_cast<int>(hosts.size()); ++other)
        CHECK(ranks.at(rank).header(other).cache_pages == 100 + other);
      for (unsigned turn = 0; turn < (kSanitized ? 40 : 400); ++turn)
        exchange(ranks.at(rank), turn,
                 turn % 3 == 0 ? ParallelRanks::Parts{0, turn % 5} : ParallelRanks::Parts{kFloats, 0});
    });
  }
}

// --- fewer bytes between hosts

// Values of very different sizes; blocks of i8 are 32 of them.
std::vector<float> many_values(size_t count, int seed) {
  std::vector<float> values(count);
  uint64_t state = 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed);
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float unit = static_cast<float>(static_cast<int64_t>(state >> 32) - (int64_t{1} << 31)) * 0x1p-31f;
    values[i] = unit * std::exp2(static_cast<float>(i / 32 % 40) - 20);
  }
  return values;
}

std::vector<float> there_and_back(WireFormat format, const std::vector<float>& values) {
  // In words, as the memory that is sent is.
  std::vector<uint32_t> encoded((encoded_bytes(format, values.size()) + 3) / 4);
  auto* bytes = reinterpret_cast<uint8_t*>(encoded.data());
  std::vector<float> found(values.size());
  encode(format, values.data(), values.size(), bytes);
  decode(format, bytes, values.size(), found.data());
  return found;
}

void check_bounds(WireFormat format, const std::vector<float>& values, const std::vector<float>& found) {
  for (size_t i = 0; i < values.size(); ++i) {
    float largest = 0, second = 0;  // of the block
    const size_t begin = i / 32 * 32;
    for (size_t j = begin; j < std::min(begin + 32, values.size()); ++j) {
      const float size = std::fabs(values[j]);
      second = std::max(second, std::min(size, largest));
      largest = std::max(largest, size);
    }
    const float error = std::fabs(found[i] - values[i]);
    if (format == WireFormat::f32) CHECK(error == 0);
    if (format == WireFormat::bf16) CHECK(error <= std::fabs(values[i]) * 0x1p-8f);
    if (format == WireFormat::i8) CHECK(error <= second / 254 * 1.0001f);
  }
}

void test_wire_formats() {
  CHECK(encoded_bytes(WireFormat::f32, 100) == 400 && encoded_bytes(WireFormat::bf16, 100) == 200);
  CHECK(encoded_bytes(WireFormat::i8, 96) == 3 * 40 && encoded_bytes(WireFormat::i8, 97) == 4 * 40);
  for (const WireFormat format : {WireFormat::f32, WireFormat::bf16, WireFormat::i8}) {
    CHECK(read_wire_format(wire_format_name(format)) == format);
    for (const size_t count : {0, 1, 31, 32, 33, 5000})
      check_bounds(format, many_values(count, 1), there_and_back(format, many_values(count, 1)));
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    for (const float bad : {nan, infinity, -infinity}) {
      std::vector<float> values = many_values(70, 2);
      values[40] = bad;
      const std::vector<float> found = there_and_back(format, values);
      CHECK(!std::isfinite(found[40]) && std::isfinite(found[0]) && std::isfinite(found[69]));
    }
    std::vector<float> tiny(40, 0x1p-130f);
    tiny[3] = -0.0f;
    for (const float value : there_and_back(format, tiny)) CHECK(std::fabs(value) <= 0x1p-119f);
  }
  // To nearest even: 1 + 2^-8 lies between two values, and so does 1 + 3 * 2^-8.
  CHECK(there_and_back(WireFormat::bf16, {1.00390625f, 1.01171875f}) == (std::vector<float>{1.0f, 1.015625f}));
  CHECK(there_and_back(WireFormat::i8, {-1000.3f, 127.0f, -127.0f, 2.5f, 3.5f, -0.4f}) ==
        (std::vector<float>{-1000.3f, 127.0f, -127.0f, 2.0f, 4.0f, 0.0f}));
  bool refused = false;
  try {
    read_wire_format("fp8");
  } catch (const std::invalid_argument& error) {
    refused = has(error.what(), "'fp8'");
  }
  CHECK(refused);
}

// All ranks have the same parts, within the bound of what was written; logits come as they are.
void test_ranks_with_fewer_bytes() {
  for (const WireFormat format : {WireFormat::bf16, WireFormat::i8}) {
    for (const auto& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 2}}) {
      const size_t count = hosts.size();
      Ranks ranks(hosts, {3, 12}, format);
      std::vector<std::vector<float>> seen(count);
      together(static_cast<int>(count), [&](int rank) {
        ParallelRanks& self = ranks.at(rank);
        for (unsigned turn = 0; turn < 20; ++turn) {
          const size_t floats = turn % 4 == 3 ? kFloats : 777;
          const auto own = many_values(floats, rank + 10 * static_cast<int>(turn));
          std::copy(own.begin(), own.end(), self.slot(rank, turn));
          self.signature(rank, turn) = 5 + turn;
          self.exchange(turn, {static_cast<int64_t>(floats), 0});
          for (int other = 0; other < self.size(); ++other) {
            CHECK(self.signature(other, turn) == 5 + turn);
            const float* slot = self.slot(other, turn);
            const std::vector<float> found(slot, slot + floats);
            const auto right = many_values(floats, other + 10 * static_cast<int>(turn));
            CHECK(found == there_and_back(format, right));
            check_bounds(format, right, found);
          }
          exchange(self, turn + 1, {0, 40});
          ++turn;
        }
      });
    }
  }
}

void test_ranks_that_send_differently() {
  std::vector<std::unique_ptr<ParallelRanks>> ranks;
  std::vector<std::string> names;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<ParallelRanks>(rank, 2, kFloats, 1, ParallelRanks::Header{7, 10 * rank, 10, 1},
                                                    ShmSegment::Kind::memfd, std::vector<int>{0, 1}, kLoopback, 0,
                                                    rank == 0 ? WireFormat::f32 : WireFormat::i8));
    names.push_back(ranks.back()->name());
  }
  for (const auto& rank : ranks) {
    std::string text;
    try {
      rank->connect(names, {getpid(), getpid()});
    } catch (const llm::UsageError& error) {
      text = error.what();
    }
    CHECK(has(text, "wire_dtype") && has(text, "rank 1 ") && has(text, "i8") && has(text, "f32"));
  }
}

void test_ranks_whose_host_leaves() {
  Ranks ranks({0, 0, 1, 1});
  together(4, [&](int rank) {
    exchange(ranks.at(rank), 0, {100, 0});
    if (rank == 3) {
      ranks.all[3].reset();
      return;
    }
    try {
      exchange(ranks.at(rank), 1, {100, 0});
      CHECK(false);
    } catch (const CommError& error) {
      CHECK(has(error.what(), "rank 3 "));
      // All ranks of the other host are told what its leader is told.
      if (rank < 2) CHECK(has(error.what(), "ranks 2, 3 on ") && has(error.what(), "has left"));
    }
  });
}

void test_ranks_that_wait() {
  Ranks ranks({0, 0, 1});
  std::string texts[2];
  together(2, [&](int rank) {
    if (rank == 0) ranks.at(0).set_timeout(0.3);
    // The leader may be late itself on a busy machine: the other one waits for it, not for the clock.
    try {
      exchange(ranks.at(rank), 0, {100, 0});
    } catch (const CommError& error) {
      CHECK(error.kind == CommError::Kind::timeout || rank == 1);
      texts[rank] = error.what();
    }
  });
  CHECK(has(texts[0], "did not come within the timeout of 0.3 s"));
  if (texts[0].find("rank 2 on ") == 0) CHECK(texts[1] == texts[0]);
}

void test_wrong_hosts() {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0}, {1, 0}, {0, 2}, {0, -1}}) {
    bool refused = false;
    try {
      ParallelRanks(0, 2, kFloats, 1, {}, ShmSegment::Kind::memfd, hosts, kLoopback);
    } catch (const llm::UsageError&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void until(const std::function<bool()>& done) {
  for (int i = 0; i < 6000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(done());
}

// Ranks hear of each other, come to the same place, and see who leaves.
void test_ranks_watch_each_other() {
  std::vector<std::unique_ptr<RankWatch>> ranks;
  std::vector<std::string> endpoints;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<RankWatch>(rank, 3, kLoopback, 0.05));
    endpoints.push_back(ranks.back()->endpoint());
  }
  together(3, [&](int rank) { ranks[static_cast<size_t>(rank)]->connect(endpoints, kTimeout, nullptr); });
  CHECK(has(ranks[0]->name(2), "rank 2 on "));
  until([&] { return ranks[0]->look()[1].beats >= 3 && ranks[2]->look()[1].beats >= 3; });
  CHECK(ranks[0]->look()[0].silent_s == 0 && ranks[0]->look()[1].left_s < 0);
  for (const uint64_t place : {7, 8}) {
    ranks[1]->arrive(place);
    until([&] { return ranks[0]->arrived(1, place) && ranks[2]->arrived(1, place); });
    CHECK(!ranks[0]->arrived(2, place) && !ranks[0]->arrived(0, place));
  }
  CHECK(ranks[0]->arrived(1, 7));  // who is further has been there
  ranks[1]->close();
  until([&] { return ranks[0]->look()[1].left_s >= 0 && ranks[2]->look()[1].left_s >= 0; });
  const double silent_s = ranks[0]->look()[1].silent_s;
  until([&] { return ranks[0]->look()[1].silent_s > silent_s; });
  CHECK(ranks[0]->look()[2].left_s < 0);
}

}  // namespace

int main() {
  test_ranks_watch_each_other();
  test_exchanges();
  test_strangers();
  test_who_does_not_come();
  test_a_transport_that_does_not_join();
  test_who_leaves();
  test_disagreement();
  test_an_interrupt();
  test_one_to_one();
  test_one_to_one_that_fails();
  test_ranks();
  test_wire_formats();
  test_ranks_with_fewer_bytes();
  test_ranks_that_send_differently();
  test_ranks_whose_host_leaves();
  test_ranks_that_wait();
  test_wrong_hosts();
  std::printf("ok\n");
  return 0;
}
