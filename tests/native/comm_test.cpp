// SPDX-License-Identifier: Apache-2.0
// Collectives: every instruction set against the scalar one, groups of threads (which share one mapping, so that the
// thread sanitizer sees what each does to the other's memory) and groups of processes, one of which dies.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/errors.h"
#include "comm/messages.h"
#include "comm/shm_group.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::comm;

constexpr double kTimeout = kEmulated ? 300 : 60;
// Of random collectives, of which there are nine. Emulated, a rank that waits for its peers takes their time.
constexpr int kTurns = kQuick ? 30 : kEmulated ? 90 : 300;
constexpr size_t kSmall = kQuick ? 700 : 3000;  // of four bytes each; a buffer of the groups of threads has 1024 bytes

// --- kernels

bool is_nan(DType dtype, const uint8_t* p) {
  switch (dtype) {
    case DType::f32: {
      float value;
      std::memcpy(&value, p, sizeof value);
      return std::isnan(value);
    }
    case DType::f64: {
      double value;
      std::memcpy(&value, p, sizeof value);
      return std::isnan(value);
    }
    case DType::bf16:
    case DType::f16: {
      uint16_t bits;
      std::memcpy(&bits, p, sizeof bits);
      return (bits & 0x7fff) > (dtype == DType::bf16 ? 0x7f80 : 0x7c00);
    }
    default:
      return false;
  }
}

// Which of several NaNs comes out is not promised.
bool same(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  const size_t item = dtype_bytes(dtype);
  for (size_t i = 0; i < a.size(); i += item)
    if (std::memcmp(&a[i], &b[i], item) != 0 && !(is_nan(dtype, &a[i]) && is_nan(dtype, &b[i]))) return false;
  return true;
}

void test_every_isa_gives_the_same_bits() {
  std::mt19937_64 random(1);
  for (int d = 0; d < kDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    const size_t item = dtype_bytes(dtype);
    for (int o = 0; o < kReduceOps; ++o) {
      const ReduceFn scalar = reduce_kernels(Isa::scalar).by[d][o];
      for (size_t count : {size_t{0}, size_t{1}, size_t{33}, size_t{2000}}) {
        for (int n : {1, 2, 3, 5}) {
          std::vector<std::vector<uint8_t>> data(n, std::vector<uint8_t>(count * item));
          std::vector<const void*> sources;
          for (auto& one : data) {
            for (uint8_t& byte : one) byte = static_cast<uint8_t>(random());
            sources.push_back(one.data());
          }
          if (scalar == nullptr) {
            CHECK(o >= static_cast<int>(ReduceOp::band) && d <= static_cast<int>(DType::f64));
            continue;
          }
          std::vector<uint8_t> want(count * item), got(count * item), second(count * item);
          scalar(sources.data(), n, want.data(), nullptr, count);
          for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
            if (!can_run(isa) || (kQuick && isa != highest_of_every_kernel(selected_isa()))) continue;
            const ReduceFn fn = reduce_kernels(isa).by[d][o];
            fn(sources.data(), n, got.data(), second.data(), count);
            CHECK(same(dtype, got, want));
            CHECK(second == got);
            // In place.
            std::vector<uint8_t> own = data.back();
            std::vector<const void*> all = sources;
            all.back() = own.data();
            fn(all.data(), n, own.data(), nullptr, count);
            CHECK(same(dtype, own, got));
          }
        }
      }
    }
  }
}

template <class T>
T one(DType dtype, ReduceOp op, std::vector<T> values) {
  std::vector<const void*> sources;
  for (const T& value : values) sources.push_back(&value);
  T out;
  reduce_kernels(Isa::scalar)
      .by[static_cast<int>(dtype)][static_cast<int>(op)](sources.data(), static_cast<int>(values.size()), &out, nullptr,
                                                         1);
  return out;
}

void test_what_the_operations_are() {
  CHECK(one<double>(DType::f64, ReduceOp::sum, {1, 2, 4}) == 7);
  CHECK(one<double>(DType::f64, ReduceOp::avg, {1, 2, 3}) == 2);
  CHECK(one<float>(DType::f32, ReduceOp::product, {1.5f, 2, 3}) == 9);
  CHECK(one<float>(DType::f32, ReduceOp::max, {-1.5f, 2, 0}) == 2);
  CHECK(std::isnan(one<float>(DType::f32, ReduceOp::max, {1, NAN, 2})));
  CHECK(std::isnan(one<double>(DType::f64, ReduceOp::min, {NAN, 1})));
  CHECK(one<int8_t>(DType::i8, ReduceOp::sum, {100, 100}) == -56);
  CHECK(one<int16_t>(DType::i16, ReduceOp::product, {300, 300}) == static_cast<int16_t>(90000));
  CHECK(one<int64_t>(DType::i64, ReduceOp::sum, {INT64_MAX, 1}) == INT64_MIN);
  CHECK(one<int32_t>(DType::i32, ReduceOp::avg, {-3, -4}) == -3);
  CHECK(one<uint8_t>(DType::u8, ReduceOp::max, {200, 100}) == 200);
  CHECK(one<uint8_t>(DType::u8, ReduceOp::band, {6, 3}) == 2);
  CHECK(one<int32_t>(DType::i32, ReduceOp::bor, {6, 3}) == 7);
  CHECK(one<int64_t>(DType::i64, ReduceOp::bxor, {6, 3}) == 5);
  // fp32 inside: 256 + 1 + 1 is 258, while bf16 sums would stay at 256.
  CHECK(one<uint16_t>(DType::bf16, ReduceOp::sum, {0x4380, 0x3f80, 0x3f80}) == 0x4381);
}

// --- groups of threads

template <class Body>
void on_threads(int size, size_t buffer_bytes, Body body, size_t pair_bytes = 4096, double timeout = kTimeout) {
  std::vector<std::unique_ptr<ShmGroup>> groups;
  std::vector<ShmGroup*> all;
  for (int r = 0; r < size; ++r) {
    groups.push_back(std::make_unique<ShmGroup>(r, size, buffer_bytes, timeout, ShmSegment::Kind::memfd,
                                                Messages::bytes_a_rank(size, pair_bytes)));
    all.push_back(groups.back().get());
  }
  for (ShmGroup* group : all) group->connect(all);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { body(*all[r], r); });
  for (std::thread& thread : threads) thread.join();
}

int32_t value(int rank, size_t i, int turn) { return static_cast<int32_t>(i % 97) * (rank + 1) + turn; }

std::vector<int32_t> values(int rank, size_t count, int turn) {
  std::vector<int32_t> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = value(rank, i, turn);
  return result;
}

std::vector<int32_t> sums(int size, size_t count, int turn) {
  std::vector<int32_t> result(count);
  for (int r = 0; r < size; ++r)
    for (size_t i = 0; i < count; ++i) result[i] += value(r, i, turn);
  return result;
}

// Collectives in an order and of sizes that all ranks draw alike.
void random_collectives(ShmGroup& group, int rank, int turns, size_t most) {
  const int size = group.size();
  std::mt19937 random(7);
  for (int turn = 0; turn < turns; ++turn) {
    const size_t count = random() % most;
    const int root = static_cast<int>(random() % static_cast<unsigned>(size));
    const std::vector<int32_t> mine = values(rank, count, turn), total = sums(size, count, turn);
    std::vector<std::vector<int32_t>> parts(size, std::vector<int32_t>(count));
    std::vector<void*> outs;
    for (auto& part : parts) outs.push_back(part.data());
    const std::vector<size_t> counts(size, count);
    switch (random() % 9) {
      case 0: {
        std::vector<int32_t> data = mine;
        group.all_reduce(data.data(), count, DType::i32, ReduceOp::sum);
        CHECK(data == total);
        break;
      }
      case 1: {
        std::vector<int32_t> data = mine;
        group.reduce(data.data(), data.data(), count, DType::i32, ReduceOp::sum, root);
        CHECK(data == (rank == root ? total : mine));
        break;
      }
      case 2: {
        std::vector<int32_t> data = mine;
        group.broadcast(data.data(), count, DType::i32, root);
        CHECK(data == values(root, count, turn));
        break;
      }
      case 3:
        group.all_gather(mine.data(), outs.data(), counts.data(), DType::i32);
        for (int r = 0; r < size; ++r) CHECK(parts[r] == values(r, count, turn));
        break;
      case 4: {
        std::vector<size_t> uneven;
        for (int r = 0; r < size; ++r) uneven.push_back(r == root ? count : count / 3);
        group.all_gather(mine.data(), outs.data(), uneven.data(), DType::i32);
        for (int r = 0; r < size; ++r) {
          const std::vector<int32_t> theirs = values(r, count, turn);
          CHECK(std::equal(theirs.begin(), theirs.begin() + static_cast<long>(uneven[r]), parts[r].begin()));
        }
        break;
      }
      case 5:
        group.gather(mine.data(), outs.data(), count, DType::i32, root);
        for (int r = 0; r < size; ++r)
          CHECK(parts[r] == (rank == root ? values(r, count, turn) : std::vector<int32_t>(count)));
        break;
      case 6: {
        std::vector<std::vector<int32_t>> given;
        std::vector<const void*> ins;
        for (int r = 0; r < size; ++r) given.push_back(values(r, count, turn));
        for (auto& part : given) ins.push_back(part.data());
        std::vector<int32_t> got(count);
        group.scatter(ins.data(), got.data(), count, DType::i32, root);
        CHECK(got == mine);
        group.reduce_scatter(ins.data(), got.data(), count, DType::i32, ReduceOp::max);
        CHECK(got == mine);  // all ranks give the same
        break;
      }
      case 7: {
        // Rank a sends (a + b) % 3 * count / 3 elements to rank b.
        const auto between = [&](int a, int b) { return static_cast<size_t>((a + b) % 3) * count / 3; };
        std::vector<size_t> ins_counts, outs_counts;
        std::vector<const void*> ins;
        for (int r = 0; r < size; ++r) {
          ins.push_back(mine.data());
          ins_counts.push_back(between(rank, r));
          outs_counts.push_back(between(r, rank));
        }
        group.all_to_all(ins.data(), ins_counts.data(), outs.data(), outs_counts.data(), DType::i32);
        for (int r = 0; r < size; ++r) {
          const std::vector<int32_t> theirs = values(r, count, turn);
          CHECK(std::equal(theirs.begin(), theirs.begin() + static_cast<long>(between(r, rank)), parts[r].begin()));
        }
        break;
      }
      default:
        group.barrier();
    }
  }
}

void test_random_collectives_of_threads() {
  for (int size : {1, 2, 3, 5}) {
    if (kQuick && size != 3) continue;
    on_threads(size, 64 * 16, [](ShmGroup& group, int rank) { random_collectives(group, rank, kTurns, kSmall); });
    on_threads(size, 64 << 10, [](ShmGroup& group, int rank) { random_collectives(group, rank, kTurns / 3, 60000); });
  }
}

void test_symmetric() {
  for (int size : {1, 2, 3}) {
    if (kQuick && size != 2) continue;
    constexpr size_t kCount = 5000;
    std::vector<std::vector<float>> memory(size, std::vector<float>(kCount));
    std::vector<char*> bases;
    for (auto& own : memory) bases.push_back(reinterpret_cast<char*>(own.data()));
    on_threads(size, 64 * 64, [&](ShmGroup& group, int rank) {
      group.add_symmetric(1, bases, kCount * sizeof(float));
      std::vector<float> ordinary(kCount);
      for (int turn = 0; turn < (kEmulated ? 12 : 50); ++turn) {
        // Every fourth time one rank's tensor is an ordinary one.
        const bool mixed = turn % 4 == 3 && rank == 0;
        float* data = mixed ? ordinary.data() : memory[rank].data();
        std::fill(data, data + kCount, static_cast<float>(rank + turn));
        const size_t from = turn % 2 == 0 ? 0 : 16;
        group.all_reduce(data + from, kCount - from, DType::f32, ReduceOp::sum);
        float want = 0;
        for (int r = 0; r < group.size(); ++r) want += static_cast<float>(r + turn);
        for (size_t i = 0; i < kCount; ++i) CHECK(data[i] == (i < from ? static_cast<float>(rank + turn) : want));
      }
      group.barrier();
      group.remove_symmetric(1);
      group.all_reduce(ordinary.data(), kCount, DType::f32, ReduceOp::sum);
    });
  }
}

void test_add_rms_norm() {
  constexpr size_t kWidth = 75;
  for (size_t rows : {size_t{1}, size_t{500}}) {
    on_threads(2, 64 << 10, [&](ShmGroup& group, int rank) {
      std::vector<float> partial(rows * kWidth), residual(rows * kWidth, 1.0f), weight(kWidth, 2.0f);
      for (size_t i = 0; i < partial.size(); ++i) partial[i] = static_cast<float>((i + static_cast<size_t>(rank)) % 5);
      group.all_reduce_add_rms_norm(partial.data(), residual.data(), weight.data(), 1e-6f, rows, kWidth, DType::f32);
      for (size_t row = 0; row < rows; ++row) {
        double squares = 0;
        for (size_t i = row * kWidth; i < (row + 1) * kWidth; ++i) {
          CHECK(residual[i] == 1.0f + static_cast<float>(i % 5 + (i + 1) % 5));
          squares += static_cast<double>(residual[i]) * residual[i];
        }
        for (size_t i = row * kWidth; i < (row + 1) * kWidth; ++i)
          CHECK(std::abs(partial[i] - 2 * residual[i] / std::sqrt(squares / kWidth + 1e-6)) < 1e-4);
      }
    });
  }
}

void test_messages_of_threads() {
  for (size_t pair_bytes : {size_t{0}, size_t{64} << 10}) {
    on_threads(
        3, 64 * 16,
        [](ShmGroup& group, int rank) {
          Messages messages(group);
          const int next = (rank + 1) % 3, before = (rank + 2) % 3;
          for (size_t count : {size_t{0}, size_t{1}, size_t{40}, size_t{100000}}) {
            for (int turn = 0; turn < (kEmulated ? 4 : 20); ++turn) {
              const std::vector<int32_t> first = values(rank, count, turn), second = values(rank, count, turn + 1);
              std::vector<int32_t> a(count), b(count);
              auto s1 = messages.send(first.data(), count, DType::i32, next, 1);
              auto s2 = messages.send(second.data(), count, DType::i32, next, 2);
              // The other way round.
              auto r2 = messages.receive(b.data(), count, DType::i32, before, 2);
              auto r1 = messages.receive(a.data(), count, DType::i32, turn % 2 == 0 ? before : -1, 1);
              for (auto& message : {r1, s2, r2, s1}) messages.wait(*message);
              CHECK(a == values(before, count, turn));
              CHECK(b == values(before, count, turn + 1));
              CHECK(r1->peer == before);
              group.barrier();
            }
          }
        },
        pair_bytes);
  }
}

void test_disagreement_and_abort() {
  on_threads(2, 64 * 16, [](ShmGroup& group, int rank) {
    std::vector<int32_t> data(10, 5);
    try {
      group.all_reduce(data.data(), rank == 0 ? 10 : 9, DType::i32, ReduceOp::sum);
      CHECK(false);
    } catch (const CommError& error) {
      CHECK(std::string(error.what()).find("ranks disagree") != std::string::npos);
      CHECK(data == std::vector<int32_t>(10, 5));
    }
  });
  on_threads(2, 64 * 16, [](ShmGroup& group, int rank) {
    std::thread helper;
    if (rank == 0) helper = std::thread([&] { usleep(50'000), group.abort(); });
    try {
      if (rank == 0) group.barrier();
      if (rank == 1) usleep(100'000), group.barrier(), group.barrier();
      CHECK(false);
    } catch (const CommError& error) {
      CHECK(std::string(error.what()).find("abort") != std::string::npos ||
            std::string(error.what()).find("given up") != std::string::npos);
    }
    if (helper.joinable()) helper.join();
  });
}

// --- groups of processes

void test_processes_and_a_death() {
  constexpr int kSize = 3;
  int to_child[kSize][2], to_parent[2];
  CHECK(pipe(to_parent) == 0);
  pid_t pids[kSize];
  for (int r = 0; r < kSize; ++r) {
    CHECK(pipe(to_child[r]) == 0);
    pids[r] = fork();
    if (pids[r] != 0) continue;
    ShmGroup group(r, kSize, 4096, kTimeout, ShmSegment::Kind::memfd);
    char endpoint[128] = {};
    std::snprintf(endpoint, sizeof endpoint, "%d %s", r, group.name().c_str());
    CHECK(write(to_parent[1], endpoint, sizeof endpoint) == sizeof endpoint);
    char names[kSize][128];
    int numbers[kSize];
    for (auto& name : names) CHECK(read(to_child[r][0], name, sizeof name) == sizeof name);
    CHECK(read(to_child[r][0], numbers, sizeof numbers) == sizeof numbers);
    group.connect(std::vector<std::string>(names, names + kSize), std::vector<int>(numbers, numbers + kSize));
    group.barrier();
    group.unlink();
    random_collectives(group, r, kTurns * 2 / 3, kSmall);
    group.barrier();
    if (r == 1) kill(getpid(), SIGKILL);
    try {
      group.barrier();
      _exit(1);
    } catch (const CommError& error) {
      _exit(std::string(error.what()).find("rank 1") != std::string::npos ? 7 : 2);
    }
  }
  char names[kSize][128] = {};
  for (int i = 0; i < kSize; ++i) {
    char endpoint[128];
    CHECK(read(to_parent[0], endpoint, sizeof endpoint) == sizeof endpoint);
    std::snprintf(names[endpoint[0] - '0'], sizeof names[0], "%s", endpoint + 2);
  }
  for (auto& pipes : to_child) {
    for (auto& name : names) CHECK(write(pipes[1], name, sizeof name) == sizeof name);
    CHECK(write(pipes[1], pids, sizeof pids) == sizeof pids);
  }
  for (int r = 0; r < kSize; ++r) {
    int status = 0;
    CHECK(waitpid(pids[r], &status, 0) == pids[r]);
    if (r == 1)
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    else
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
}

}  // namespace

// A rank that waits for long costs no time of its core, and is woken by what it waits for.
void test_a_long_wait_sleeps() {
  on_threads(2, 4096, [](ShmGroup& group, int rank) {
    group.barrier();
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto spent = [] {
      timespec t;
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
      return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    };
    const double before = spent();
    group.barrier();
    CHECK(spent() - before < 0.1);
  });
  std::atomic<uint32_t> word{1};
  std::thread sleeper([&] {
    while (word.load() == 1) anyaccel::sleep_while(word, 1, 3600'000'000'000);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  word.store(2);
  anyaccel::wake_all(word);
  sleeper.join();
}

int main() {
  test_processes_and_a_death();  // before there are threads
  test_every_isa_gives_the_same_bits();
  test_what_the_operations_are();
  test_random_collectives_of_threads();
  test_symmetric();
  test_add_rms_norm();
  test_messages_of_threads();
  test_a_long_wait_sleeps();
  test_disagreement_and_abort();
  std::puts("comm: all tests passed");
  return 0;
}
