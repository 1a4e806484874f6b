// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/rope.h"

#include <algorithm>
#include <cmath>

namespace anyaccel::llm {
namespace {

constexpr int64_t kGrowth = 512;

}  // namespace

void RopeTable::fill(const std::vector<double>& inv_freq, double scale, int64_t position, float* out) const {
  const size_t half = inv_freq.size();
  for (size_t i = 0; i < half; ++i) {
    // Transformers rounds both factors and the angle to float; at large positions that is more than the last digits.
    const float angle = static_cast<float>(position) * static_cast<float>(inv_freq[i]);
    out[i] = static_cast<float>(static_cast<double>(std::cos(angle)) * scale);
    out[half + i] = static_cast<float>(static_cast<double>(std::sin(angle)) * scale);
  }
}

void RopeTable::grow(Table& table, const std::vector<double>& inv_freq, double scale, int64_t positions) {
  if (positions <= table.positions) return;
  const int64_t wanted = std::max((positions + kGrowth - 1) / kGrowth * kGrowth, table.positions * 5 / 4);
  const size_t width = 2 * inv_freq.size();
  std::vector<float> values(static_cast<size_t>(wanted) * width);
  std::copy(table.values.begin(), table.values.end(), values.begin());
  for (int64_t position = table.positions; position < wanted; ++position)
    fill(inv_freq, scale, position, values.data() + static_cast<size_t>(position) * width);
  // Rotations that were given out in this step point into the table before it grew, so that stays until the next.
  old_.push_back(std::move(table.values));
  table.values = std::move(values);
  table.positions = wanted;
}

bool RopeTable::changes_between(int64_t tokens, int64_t others) const {
  if (!spec_->long_inv_freq.empty()) return (tokens > spec_->long_from) != (others > spec_->long_from);
  if (spec_->dynamic_base > 0 && spec_->dynamic_from > 0)
    return tokens != others && std::max(tokens, others) > spec_->dynamic_from;
  return false;
}

void RopeTable::reset() {
  own_.clear();
  old_.clear();
}

void RopeTable::rotations(int64_t position, int tokens, int64_t context, Rotation* out) {
  const size_t half = spec_->inv_freq.size();
  const float* values;
  if (spec_->dynamic_base > 0 && spec_->dynamic_from > 0 && context > spec_->dynamic_from) {
    // "Dynamic NTK-aware scaling" (bloc97, emozilla, 2023): as _compute_dynamic_ntk_parameters of transformers.
    const double dim = 2.0 * static_cast<double>(half), factor = spec_->dynamic_factor;
    const double growth =
        factor * static_cast<double>(context) / static_cast<double>(spec_->dynamic_from) - (factor - 1);
    const double base = spec_->dynamic_base * std::pow(growth, dim / (dim - 2));
    std::vector<double> inv_freq(half);
    for (size_t i = 0; i < half; ++i) inv_freq[i] = 1.0 / std::pow(base, 2.0 * static_cast<double>(i) / dim);
    std::vector<float> own(static_cast<size_t>(tokens) * 2 * half);
    for (int i = 0; i < tokens; ++i)
      fill(inv_freq, spec_->scale, position + i, own.data() + static_cast<size_t>(i) * 2 * half);
    own_.push_back(std::move(own));
    values = own_.back().data();
  } else {
    const bool is_long = !spec_->long_inv_freq.empty() && context > spec_->long_from;
    Table& table = is_long ? long_ : short_;
    grow(table, is_long ? spec_->long_inv_freq : spec_->inv_freq, is_long ? spec_->long_scale : spec_->scale,
         position + tokens);
    values = table.values.data() + static_cast<size_t>(position) * 2 * half;
  }
  for (int i = 0; i < tokens; ++i) {
    out[i].cosine = values + static_cast<size_t>(i) * 2 * half;
    out[i].sine = out[i].cosine + half;
  }
}

}  // namespace anyaccel::llm
