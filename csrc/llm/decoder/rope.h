// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of rotary positions, kept from step to step.
#pragma once

#include <cstdint>
#include <vector>

#include "llm/decoder/spec.h"

namespace anyaccel::llm {

// The cosines and sines by which the pairs of one token are rotated.
struct Rotation {
  const float* cosine = nullptr;
  const float* sine = nullptr;
};

class RopeTable {
 public:
  explicit RopeTable(const RopeSpec& spec) : spec_(&spec) {}

  // Another kind of rotation holds for contexts of `tokens` tokens than for ones of `others`: longrope's two sets of
  // factors, dynamic NTK's base. What was cached with one does not fit keys rotated with the other.
  bool changes_between(int64_t tokens, int64_t others) const;

  // For tokens at position, position + 1, ... of a context that has `context` tokens at the end of the call.
  // Pointers hold until the next reset(). Throws std::bad_alloc.
  void reset();
  void rotations(int64_t position, int tokens, int64_t context, Rotation* out);

 private:
  struct Table {
    std::vector<float> values;  // [positions][cosines, sines]
    int64_t positions = 0;
  };
  void grow(Table& table, const std::vector<double>& inv_freq, double scale, int64_t positions);
  void fill(const std::vector<double>& inv_freq, double scale, int64_t position, float* out) const;

  const RopeSpec* spec_;
  Table short_, long_;
  std::vector<std::vector<float>> own_;  // of dynamic NTK, which has other angles in every step
  std::vector<std::vector<float>> old_;  // tables that grew during this step
};

}  // namespace anyaccel::llm
