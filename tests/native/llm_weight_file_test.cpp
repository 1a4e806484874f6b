// SPDX-License-Identifier: Apache-2.0
// Weights through a file: what was written comes back with the same checksum; every change and every cut is found.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "llm/decoder/weight_file.h"
#include "llm/pack/matrix.h"

namespace {

using namespace anyaccel::llm;
using Sums = std::vector<uint64_t>;

void expect(bool ok, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

int temporary_file() {
  char path[] = "/tmp/anyaccel-weights-XXXXXX";
  const int fd = mkstemp(path);
  expect(fd >= 0, "mkstemp");
  unlink(path);
  return fd;
}

void round_trip(size_t bytes) {
  std::mt19937_64 random(bytes);
  std::vector<uint8_t> data(bytes);
  for (auto& byte : data) byte = static_cast<uint8_t>(random());
  const int fd = temporary_file();
  size_t last = 0;
  const Sums written = write_weights(fd, 100, data.data(), {bytes}, 3, [&](size_t done) { last = done; });
  expect(last == bytes, "progress ends at the size");
  expect(Sums{weights_checksum(data.data(), bytes)} == written, "checksum of memory");
  for (int threads : {0, 1, 2, 5}) {
    std::vector<uint8_t> back(bytes);
    expect(read_weights(fd, 100, back.data(), {bytes}, threads) == written, "checksum of reading");
    expect(back == data, "bytes");
  }
  for (int change = 0; change < 20 && bytes > 0; ++change) {
    const size_t at = random() % bytes;
    data[at] ^= static_cast<uint8_t>(1U << (random() % 8));
    expect(Sums{weights_checksum(data.data(), bytes)} != written, "one bit changed");
    const size_t other = random() % bytes;
    if (other != at) {
      data[other] ^= 0x80;
      expect(Sums{weights_checksum(data.data(), bytes)} != written, "two bits changed");
      data[other] ^= 0x80;
    }
    data[at] = static_cast<uint8_t>(0);
    std::vector<uint8_t> whole(bytes);
    read_weights(fd, 100, whole.data(), {bytes}, 1);
    data = whole;
  }
  if (bytes > 0) {
    expect(ftruncate(fd, static_cast<off_t>(100 + bytes - 1)) == 0, "ftruncate");
    bool thrown = false;
    try {
      std::vector<uint8_t> back(bytes);
      read_weights(fd, 100, back.data(), {bytes});
    } catch (const std::system_error&) {
      thrown = true;
    }
    expect(thrown, "a cut file is an error");
    expect(Sums{weights_checksum(data.data(), bytes - 1)} != written, "a shorter length");
  }
  close(fd);
}

void mapped(size_t bytes) {
  std::mt19937_64 random(bytes);
  std::vector<uint8_t> data(bytes);
  for (auto& byte : data) byte = static_cast<uint8_t>(random());
  const int fd = temporary_file();
  const Sums written = write_weights(fd, 0, data.data(), {bytes});
  for (int threads : {1, 3}) {
    const auto memory = allocate_weights(bytes);
    size_t last = 0;
    expect(map_weights(fd, 0, memory.get(), {bytes}, threads, [&](size_t done) { last = done; }) == written,
           "checksum of mapping");
    expect(last == bytes, "progress of mapping ends at the size");
    expect(std::memcmp(memory.get(), data.data(), bytes) == 0, "bytes of mapping");
    static_cast<uint8_t*>(memory.get())[bytes / 2] ^= 1;  // of this process alone
    expect(read_weights(fd, 0, data.data(), {bytes}) == written, "the file stays as it is");
  }
  const uint8_t other = data[bytes / 3] ^ 1;
  expect(pwrite(fd, &other, 1, static_cast<off_t>(bytes / 3)) == 1, "pwrite");
  const auto memory = allocate_weights(bytes);
  expect(map_weights(fd, 0, memory.get(), {bytes}) != written, "damage of a mapped file");
  expect(ftruncate(fd, static_cast<off_t>(bytes - 1)) == 0, "ftruncate");
  bool thrown = false;
  try {
    map_weights(fd, 0, memory.get(), {bytes});
  } catch (const std::system_error& error) {
    thrown = error.code().value() == EIO;
  }
  expect(thrown, "a cut file is not mapped");
  close(fd);
}

// Each piece has the checksum that it has alone, so that it can be read alone.
void in_pieces() {
  const std::vector<size_t> pieces{700001, 0, 64, 2000000};
  std::mt19937_64 random(1);
  std::vector<uint8_t> data(700001 + 64 + 2000000);
  for (auto& byte : data) byte = static_cast<uint8_t>(random());
  const int fd = temporary_file();
  const Sums written = write_weights(fd, 0, data.data(), pieces, 2);
  expect(written.size() == pieces.size(), "a checksum a piece");
  size_t at = 0;
  for (size_t i = 0; i < pieces.size(); at += pieces[i++])
    expect(weights_checksum(data.data() + at, pieces[i]) == written[i], "checksum of a piece");
  std::vector<uint8_t> back(data.size());
  expect(read_weights(fd, 0, back.data(), pieces, 3) == written && back == data, "pieces come back");
  data[700001] ^= 1;
  const Sums other = write_weights(fd, 0, data.data(), pieces, 2);
  expect(other[0] == written[0] && other[2] != written[2] && other[3] == written[3], "one piece has changed");
  close(fd);
}

void errors() {
  std::vector<uint8_t> data(3 << 20);
  bool thrown = false;
  try {
    write_weights(-1, 0, data.data(), {data.size()});
  } catch (const std::system_error& error) {
    thrown = error.code().value() == EBADF;
  }
  expect(thrown, "a bad descriptor");
  const int fd = temporary_file();
  thrown = false;
  try {
    write_weights(fd, 0, data.data(), {data.size()}, 2, [](size_t) { throw std::runtime_error("enough"); });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  expect(thrown, "what progress throws is passed on");
  close(fd);
}

}  // namespace

int main() {
  for (size_t bytes : {0UL, 1UL, 7UL, 64UL, 65UL, 4096UL, 524288UL, 524289UL, 5000001UL}) round_trip(bytes);
  for (size_t bytes : {1000UL, (2UL << 20) - 1, 2UL << 20, 5000001UL}) mapped(bytes);
  in_pieces();
  errors();
  std::puts("ok");
}
