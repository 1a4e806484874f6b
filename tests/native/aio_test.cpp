// SPDX-License-Identifier: Apache-2.0
// Everything that csrc/aio does with threads and memory, for the sanitizers; results are checked by the tests in
// Python too. Usage: aio_test [folder]. Built from this file and csrc/aio/*.cpp.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "aio/handle.h"

using namespace anyaccel::aio;

namespace {

#define CHECK(what)                                                   \
  do {                                                                \
    if (!(what)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
      std::abort();                                                   \
    }                                                                 \
  } while (false)

constexpr std::chrono::milliseconds kForever{60'000};
std::atomic<int64_t> next_number{0};

struct Answer {
  Failure failure;
  Leftover leftover = Leftover::untouched;
};

int64_t begin(Handle& handle, const std::string& path, std::vector<Segment> segments, const FileOptions& options,
              Failure* refused = nullptr) {
  auto request = std::make_unique<Request>(std::move(segments), handle.block_bytes());
  const Failure failure = request->open(path, -1, options);
  if (refused != nullptr) *refused = failure;
  if (failure) return -1;
  const int64_t number = ++next_number;
  handle.submit(number, std::move(request));
  return number;
}

Answer finish(Handle& handle, int64_t number) {
  std::shared_ptr<Request> request;
  while ((request = handle.wait(number, std::chrono::milliseconds(1))) == nullptr)
    CHECK(handle.find(number)->bytes_done.load() >= 0);
  const Answer answer{request->failure, request->leftover};
  handle.forget(number);
  return answer;
}

void fill(std::vector<char>& bytes, uint64_t seed) {
  std::mt19937_64 random{seed};
  for (char& byte : bytes) byte = static_cast<char>(random());
}

// Several threads write and read ranges of files of their own, through one handle.
void round_trips(const Config& config, const std::string& folder, uint64_t seed) {
  Handle handle(config);
  std::vector<std::thread> threads;
  for (int who = 0; who < 4; ++who)
    threads.emplace_back([&, who] {
      std::mt19937_64 random{seed * 31 + static_cast<uint64_t>(who)};
      const std::string path = folder + "/file" + std::to_string(who);
      for (int turn = 0; turn < 12; ++turn) {
        const size_t size = random() % 4 == 0 ? random() % 5000 : random() % 400'000, shift = random() % 3 * 511;
        const auto offset = static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 20'000);
        std::vector<char> data(size + shift), back(size + shift);
        fill(data, random());
        const size_t cut = size == 0 ? 0 : random() % size;
        const auto parts = [&](std::vector<char>& memory) {
          char* first = memory.data() + shift;
          return std::vector<Segment>{
              {offset, first, static_cast<int64_t>(cut)},
              {offset + static_cast<int64_t>(cut), first + cut, static_cast<int64_t>(size - cut)}};
        };
        const FileOptions options{true, offset == 0 && random() % 2 == 0, false};
        CHECK(!finish(handle, begin(handle, path, parts(data), options)).failure);
        CHECK(!finish(handle, begin(handle, path, parts(back), {false, false, random() % 4 == 0})).failure);
        CHECK(std::memcmp(data.data() + shift, back.data() + shift, size) == 0);
      }
      unlink(path.c_str());
    });
  for (std::thread& thread : threads) thread.join();
}

// Several threads wait for the same requests, and each forgets them.
void shared_waits(const Config& config, const std::string& folder) {
  Handle handle(config);
  const std::string path = folder + "/shared";
  std::vector<char> data(200'000, 's');
  const auto size = static_cast<int64_t>(data.size());
  CHECK(!finish(handle, begin(handle, path, {{0, data.data(), size}}, {true})).failure);
  std::vector<std::vector<char>> back(8, std::vector<char>(data.size()));
  std::vector<int64_t> numbers;
  for (std::vector<char>& memory : back) numbers.push_back(begin(handle, path, {{0, memory.data(), size}}, {}));
  std::vector<std::thread> threads;
  for (int who = 0; who < 3; ++who)
    threads.emplace_back([&] {
      for (size_t i = 0; i < numbers.size(); ++i) {
        try {
          const auto request = handle.wait(numbers[i], kForever);
          CHECK(request != nullptr && !request->failure);
        } catch (const std::out_of_range&) {  // forgotten, so done
        }
        CHECK(back[i] == data);
        handle.forget(numbers[i]);
      }
    });
  for (std::thread& thread : threads) thread.join();
  unlink(path.c_str());
}

void failures(const Config& config, const std::string& folder) {
  Handle handle(config);
  std::vector<char> memory(300'000);
  const std::vector<Segment> segments{{0, memory.data(), static_cast<int64_t>(memory.size())}};
  Failure refused;
  begin(handle, folder + "/missing", segments, {}, &refused);
  CHECK(refused.step == Step::open && refused.error == ENOENT);

  const std::string path = folder + "/shrinks";
  CHECK(!finish(handle, begin(handle, path, segments, {true})).failure);
  // It has become shorter since it was opened.
  auto request = std::make_unique<Request>(segments, handle.block_bytes());
  CHECK(!request->open(path, -1, {}));
  CHECK(truncate(path.c_str(), 100'001) == 0);
  const int64_t number = ++next_number;
  handle.submit(number, std::move(request));
  const Answer answer = finish(handle, number);
  CHECK(answer.failure.step == Step::end_of_file && answer.failure.offset >= 100'001);
  bool thrown = false;
  try {
    handle.find(number);
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown);
  unlink(path.c_str());
}

// Requests are cancelled, waited for and dropped while they run.
void drops(const Config& config, const std::string& folder, uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<std::vector<char>> memory(12, std::vector<char>(1 << 20, 'x'));
  {
    Handle handle(config);
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < memory.size(); ++i)
      numbers.push_back(begin(handle, folder + "/drop" + std::to_string(i), {{0, memory[i].data(), 1 << 20}},
                              {true, i % 2 == 0, false}));
    for (size_t i = 0; i < memory.size(); i += 3) {
      handle.find(numbers[i])->cancel();
      const Answer answer = finish(handle, numbers[i]);
      if (answer.failure) CHECK(answer.failure.step == Step::cancelled && answer.leftover != Leftover::undefined);
    }
    CHECK(handle.wait(numbers[1], std::chrono::milliseconds(random() % 3)) == nullptr ||
          handle.wait(numbers[1], kForever) != nullptr);
    handle.forget(numbers[4]);  // done or not
  }
  for (size_t i = 0; i < memory.size(); ++i) unlink((folder + "/drop" + std::to_string(i)).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder = std::string(argc > 1 ? argv[1] : "/var/tmp") + "/aio-test-XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  for (const auto& [engine, name] :
       {std::pair{Engine::io_uring, "io_uring"}, {Engine::linux_aio, "linux_aio"}, {Engine::threads, "threads"}})
    for (const Config& base :
         {Config{4096, 1, 1, false, engine}, Config{8192, 7, 3, true, engine}, Config{1 << 16, 32, 2, false, engine}}) {
      try {
        Handle probe(base);
      } catch (const std::system_error& error) {
        std::printf("%s: not here: %s\n", name, error.what());
        break;
      }
      for (uint64_t seed = 0; seed < 3; ++seed) {
        round_trips(base, folder, seed);
        shared_waits(base, folder);
        failures(base, folder);
        drops(base, folder, seed);
      }
      std::printf("%s, blocks of %lld, depth %u, %u threads: fine\n", name, static_cast<long long>(base.block_bytes),
                  base.depth, base.threads);
    }
  CHECK(rmdir(folder.c_str()) == 0);
}
